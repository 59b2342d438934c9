"""The model being trained: float32 master weights, autocast forward pass, log-probs of sampled tokens only.

Dimensions: B rows, T padded length, S sampled tokens of a micro-batch, H hidden size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from learner.data.microbatch import MicroBatch
from learner.distributed.ranks import Interrupt, resolve_device
from learner.models.model_folder import ModelFolder
from learner.policy.backbone import DTYPES, Backbone, DtypeName
from learner.policy.logprobs import Head, sampled_logprobs
from pipeline.config.learner import LearnerConfig
from pipeline.errors import ConfigurationError

if TYPE_CHECKING:
    from learner.policy.lora import Adapters


class Policy(Backbone):
    """A causal language model that scores sampled tokens.

    With ``config.lora.rank`` only adapters are trained; ``adapter_folder`` holds those to resume from.
    """

    def __init__(
        self,
        model: Any,
        config: LearnerConfig,
        device: torch.device,
        interrupt: Interrupt | None = None,
        dtype: torch.dtype = torch.float32,
        adapter_folder: Path | None = None,
    ) -> None:
        self.adapters: Adapters | None = None
        if config.lora.rank:
            from learner.policy.lora import Adapters  # peft takes seconds to import

            self.adapters = Adapters(model, config.lora, adapter_folder)
        super().__init__(model, config, device, interrupt, dtype)
        if config.lora.rank:
            for parameter in model.parameters():
                if not parameter.requires_grad:
                    parameter.data = parameter.data.to(DTYPES[config.lora.frozen_dtype])

    @classmethod
    def load(
        cls,
        folder: Path,
        config: LearnerConfig,
        *,
        trust_remote_code: bool = False,
        adapter_folder: Path | None = None,
    ) -> Policy:
        """Weights of a Hugging Face folder, in float32. Raises :class:`ConfigurationError` when there is none."""
        device = resolve_device(config.device)
        model = ModelFolder(folder, trust_remote_code=trust_remote_code).read(device)
        return cls(model, config, device, adapter_folder=adapter_folder)

    @contextmanager
    def without_adapters(self) -> Iterator[None]:
        """The initial weights, while the block runs."""
        if self.adapters is None:
            raise ConfigurationError("expected a policy with adapters (learner.lora.rank), got one without")
        with self.adapters.disabled():
            yield

    def score(self, batch: MicroBatch, hidden_SH: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """log π of the sampled tokens and the entropy there, nats, float32 ``[S]`` each. ``hidden_SH``: of
        :meth:`hidden`, where it was called before.

        Only positions that predict a sampled token pass the output layer. With gradient where gradients are enabled.
        """
        scores: tuple[Tensor, Tensor] = self._run(lambda: self._score(batch, hidden_SH))
        return scores

    def _score(self, batch: MicroBatch, hidden_SH: Tensor | None) -> tuple[Tensor, Tensor]:
        return sampled_logprobs(
            self.hidden(batch) if hidden_SH is None else hidden_SH,
            self._head(),
            torch.from_numpy(batch.targets_S).to(self.device),
            torch.from_numpy(batch.temperatures_S).to(self.device),
            rows_max=self._config.logits_tokens_max,
            compute_dtype=self._compute,
        )

    def weights(self, dtype: DtypeName) -> Iterator[tuple[str, Tensor]]:
        """All weights in ``dtype``, one after another, on the device; tied weights once, under the name that the model
        loads them by. Adapters are added to the weights they belong to, under the names of a model without them.

        With several ranks one weight at a time is made whole, and only rank 0 gets it. A weight that has the type
        already is the trained one itself. The ranks work together until the iterator has ended or is closed.
        """
        return self._together(dtype, copies=False)

    def description(self, dtype: DtypeName) -> list[tuple[str, torch.dtype, tuple[int, ...]]]:
        """Name, type and shape of what :meth:`weights` gives, in its order. Not a collective."""
        return [(self._public(name), _kind(tensor, dtype), tuple(tensor.shape)) for name, tensor in self._entries()]

    def snapshot(self, dtype: DtypeName) -> dict[str, Tensor]:
        """Copies of all :meth:`weights` on the CPU; with several ranks only rank 0 has them."""
        return {name: tensor.cpu().contiguous() for name, tensor in self._together(dtype, copies=True)}

    def _together(self, dtype: DtypeName, *, copies: bool) -> Iterator[tuple[str, Tensor]]:
        with self.ranks.together("snapshot", facts={"dtype": dtype}):
            yield from self._weights(dtype, copies=copies)

    def _weights(self, dtype: DtypeName, *, copies: bool) -> Iterator[tuple[str, Tensor]]:
        wanted = self.ranks.rank == 0
        for name, tensor in self._entries():
            kind = _kind(tensor, dtype)
            if self.adapters is not None:
                tensor = self.adapters.merged(name, tensor)
            # cast on the device, and before the gather: a copy that also casts would move the float32 values
            cast = self.ranks.whole(tensor.detach().to(kind, copy=copies and tensor.device.type == "cpu"))
            if wanted:
                try:
                    yield self._public(name), cast
                except GeneratorExit:
                    if self.ranks.size == 1:
                        raise
                    wanted = False  # the other ranks make every weight whole all the same

    def _public(self, name: str) -> str:
        return name if self.adapters is None else self.adapters.merged_name(name)

    def _entries(self) -> Iterator[tuple[str, Tensor]]:
        """The weights as they are trained, each once."""
        tied = set(
            getattr(self.model, "all_tied_weights_keys", None) or getattr(self.model, "_tied_weights_keys", None) or ()
        )
        seen: set[tuple[int, int]] = set()
        parameters = dict(self.model.named_parameters(remove_duplicate=False))
        for name, tensor in sorted(self.model.state_dict().items(), key=lambda item: item[0] in tied):
            divided = isinstance(parameters.get(name), DTensor)  # shards have no storage to tell them apart by
            storage = (id(parameters[name]) if divided else tensor.data_ptr(), tensor.numel())
            if tensor.numel() and storage in seen:
                continue
            seen.add(storage)
            if self.adapters is None or not self.adapters.owns(name):
                yield name, tensor

    def adapter_snapshot(self, dtype: torch.dtype) -> dict[str, Tensor] | None:
        """Copies of the adapters alone on the CPU, by the names of peft's files; None without adapters."""
        if self.adapters is None:
            return None
        with self.ranks.together("adapters"):
            return self.adapters.snapshot(dtype, self.ranks)

    def _head(self) -> Head:
        config, layer = self.model.config, self.model.get_output_embeddings()
        scaling = getattr(config, "logits_scaling", None)
        scale = 1.0 / scaling if scaling else getattr(config, "logit_scale", None) or 1.0
        return Head(
            layer.weight, getattr(layer, "bias", None), float(scale), getattr(config, "final_logit_softcapping", None)
        )


def _kind(tensor: Tensor, dtype: DtypeName) -> torch.dtype:
    """Type of a published weight."""
    return DTYPES[dtype] if tensor.is_floating_point() else tensor.dtype
