"""The model being trained: float32 master weights, autocast forward pass, log-probs of sampled tokens only.

Dimensions: B rows, T padded length, S sampled tokens of a micro-batch, H hidden size, V vocabulary.
"""

from __future__ import annotations

import threading
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from learner.batching import MicroBatch
from learner.logprobs import Head, sampled_logprobs
from pipeline.config.learner import LearnerConfig
from pipeline.errors import ConfigurationError

DTYPES: dict[str, torch.dtype] = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class Interrupted(Exception):
    """The pass was given up because the process is stopping. Nothing was changed by it."""


class Policy:
    """A causal language model and how to score sampled tokens with it.

    ``interrupt`` is looked at before each layer, forward and backward: when set, the pass raises :class:`Interrupted`
    within a layer's time.
    """

    def __init__(self, model: Any, config: LearnerConfig, device: torch.device) -> None:
        self.model = model.to(device=device, dtype=torch.float32)
        self._without_dropout()
        self.device = device
        self.interrupt = threading.Event()
        self._config = config
        self._compute = DTYPES[config.compute_dtype]
        if config.gradient_checkpointing:
            self.model.gradient_checkpointing_enable()
        for layer in self._layers():
            layer.register_forward_hook(self._watch)

    @classmethod
    def load(cls, folder: Path, config: LearnerConfig, *, trust_remote_code: bool = False) -> Policy:
        """Weights of a Hugging Face folder, in float32. Raises :class:`ConfigurationError` when there is none."""
        if not (folder / "config.json").is_file():
            raise ConfigurationError(
                f"expected a Hugging Face model folder with config.json, got {folder}: check model.source"
            )
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, trust_remote_code=trust_remote_code)
        return cls(model, config, resolve_device(config.device))

    @property
    def parameters(self) -> list[torch.nn.Parameter]:
        return [p for p in self.model.parameters() if p.requires_grad]

    def score(self, batch: MicroBatch) -> tuple[Tensor, Tensor]:
        """log π of the sampled tokens and the entropy there, nats, float32 ``[S]`` each.

        Only positions that predict a sampled token pass the output layer. With gradient where gradients are enabled.
        """
        tokens = torch.from_numpy(batch.token_ids_BT).to(self.device, non_blocking=True)
        with self._autocast():
            hidden_BTH = self.model.base_model(input_ids=tokens, use_cache=False).last_hidden_state
            predictors = torch.from_numpy(batch.predictors_S).to(self.device)
            hidden_SH = hidden_BTH.reshape(-1, hidden_BTH.shape[-1]).index_select(0, predictors)
        return sampled_logprobs(
            hidden_SH,
            self._head(),
            torch.from_numpy(batch.targets_S).to(self.device),
            torch.from_numpy(batch.temperatures_S).to(self.device),
            rows_max=self._config.logits_tokens_max,
            compute_dtype=self._compute,
        )

    def snapshot(self, dtype: Literal["bfloat16", "float32", "float16"]) -> dict[str, Tensor]:
        """Copies of all weights on the CPU in ``dtype``; tied weights once, under the name that the model loads them
        by."""
        tied = set(
            getattr(self.model, "all_tied_weights_keys", None) or getattr(self.model, "_tied_weights_keys", None) or ()
        )
        copies: dict[str, Tensor] = {}
        seen: dict[tuple[int, int], str] = {}
        for name, tensor in sorted(self.model.state_dict().items(), key=lambda item: item[0] in tied):
            place = (tensor.data_ptr(), tensor.numel())
            if tensor.numel() and place in seen:
                continue
            seen[place] = name
            kind = DTYPES[dtype] if tensor.is_floating_point() else tensor.dtype
            copies[name] = tensor.detach().to(device="cpu", dtype=kind, copy=True).contiguous()
        return copies

    def _without_dropout(self) -> None:
        """The engine samples without dropout, so π is defined without it; train mode stays on for gradient
        checkpointing."""
        self.model.train()
        for module in self.model.modules():
            if isinstance(module, torch.nn.Dropout):
                module.p = 0.0
            elif hasattr(module, "attention_dropout"):
                module.attention_dropout = 0.0

    def _autocast(self) -> AbstractContextManager[Any]:
        if self._compute is torch.float32:
            return nullcontext()
        return torch.autocast(self.device.type, dtype=self._compute)

    def _head(self) -> Head:
        config, layer = self.model.config, self.model.get_output_embeddings()
        scaling = getattr(config, "logits_scaling", None)
        scale = 1.0 / scaling if scaling else getattr(config, "logit_scale", None) or 1.0
        return Head(
            layer.weight, getattr(layer, "bias", None), float(scale), getattr(config, "final_logit_softcapping", None)
        )

    def _layers(self) -> list[torch.nn.Module]:
        """The longest list of modules: the decoder layers of every architecture in transformers."""
        lists = [list(m) for m in self.model.modules() if isinstance(m, torch.nn.ModuleList)]
        return max(lists, key=len, default=[])

    def _watch(self, module: torch.nn.Module, inputs: Any, output: Any) -> None:
        self._stop_if_asked()
        hidden = output[0] if isinstance(output, tuple) else output
        if isinstance(hidden, Tensor) and hidden.requires_grad:
            hidden.register_hook(self._stop_if_asked)  # type: ignore[no-untyped-call]

    def _stop_if_asked(self, gradient: Tensor | None = None) -> None:
        if self.interrupt.is_set():
            raise Interrupted


def resolve_device(device: Literal["auto", "cpu", "cuda"]) -> torch.device:
    """``auto`` takes the GPU where there is one. Raises :class:`ConfigurationError` for cuda without one."""
    if device == "cuda" and not torch.cuda.is_available():
        raise ConfigurationError(
            "learner.device is cuda, but torch sees no GPU: install a CUDA build of torch or set it to cpu"
        )
    return torch.device("cuda" if device != "cpu" and torch.cuda.is_available() else "cpu")
