"""A transformer on a device: hidden states at the positions that predict sampled tokens, interruptible by layer.

Dimensions: B rows, T padded length, S sampled tokens of a micro-batch, H hidden size.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import Tensor

from learner.data.microbatch import MicroBatch
from learner.distributed.ranks import ALONE, Interrupt, Ranks
from learner.models.model_folder import is_empty
from learner.policy.attention import choose_form, packed_inputs, packs_by_varlen
from learner.policy.flops import pass_cost, peak_flops
from pipeline.config.learner import LearnerConfig
from pipeline.errors import Interrupted
from pipeline.runtime.processor import fast_dtype

logger = logging.getLogger(__name__)
DtypeName = Literal["bfloat16", "float32", "float16"]
DTYPES: dict[DtypeName, torch.dtype] = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class Backbone:
    """``model`` without dropout on ``device``, its weights in ``dtype``, in eval mode (but see :meth:`eval_mode`). An
    empty one (:meth:`learner.models.model_folder.ModelFolder.empty`) is to be divided and then filled.

    ``interrupt`` is looked at before each layer, forward and backward: when set, the pass raises :class:`Interrupted`
    within a layer's time. Several models may share one. Several ranks look at it between micro-batches only, together
    (``Ranks.agree``): one that gives up within a layer would leave the others in their collectives.
    """

    def __init__(
        self,
        model: Any,
        config: LearnerConfig,
        device: torch.device,
        interrupt: Interrupt | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        self.model = model.to(dtype=dtype) if is_empty(model) else model.to(device=device, dtype=dtype)
        _without_dropout(self.model)
        self.device = device
        self.interrupt = interrupt or Interrupt()
        self.on_layer: Callable[[], None] = lambda: None
        """Called after each layer, forward and backward: a pass makes progress."""
        self.ranks: Ranks = ALONE
        """The ranks that the weights are divided among."""
        self._run: Callable[[Callable[[], Any]], Any] = lambda work: work()
        self._config = config
        self._compute = compute_dtype(config, device)
        if config.gradient_checkpointing:
            self.model.gradient_checkpointing_enable()
        for layer in self.layers:
            layer.register_forward_hook(self._watch)
        self._varlen = packs_by_varlen(self.model, self.device, self._compute)
        form = choose_form(self.model, config, self.device, self._autocast(), self._compute, varlen=self._varlen)
        self.form = replace(form, cost=pass_cost(self.model))
        """Form of the rows that :meth:`hidden` takes."""
        self.peak_flops = peak_flops(device, self._compute)

    @property
    def parameters(self) -> list[torch.nn.Parameter]:
        """Trained parameters."""
        return [parameter for _, parameter in self.named_parameters]

    @property
    def named_parameters(self) -> list[tuple[str, torch.nn.Parameter]]:
        return [(name, p) for name, p in self.model.named_parameters() if p.requires_grad]

    def hidden(self, batch: MicroBatch) -> Tensor:
        """Last hidden state at each position whose output predicts a sampled token, the one before it, ``[S, H]``, in
        the compute type. With gradient where gradients are enabled."""
        hidden_SH: Tensor = self._run(lambda: self._hidden(batch))
        return hidden_SH

    def eval_mode(self) -> None:
        """Back to eval mode. With gradient checkpointing a pass with gradient leaves the model in train mode: there
        alone transformers makes checkpoints, and the backward pass must find the same mode. Generation in train mode
        would lose its cache and go wrong."""
        self.model.eval()

    def divided(self, ranks: Ranks, run: Callable[[Callable[[], Any]], Any]) -> None:
        """The weights are shards from now on; ``run`` makes those outside of the layers whole while work reads them."""
        self.ranks, self._run = ranks, run

    @property
    def compute_dtype(self) -> torch.dtype:
        return self._compute

    @property
    def layers(self) -> list[torch.nn.Module]:
        """The longest list of modules: the decoder layers of every architecture in transformers."""
        lists = [list(m) for m in self.model.modules() if isinstance(m, torch.nn.ModuleList)]
        return max(lists, key=len, default=[])

    def _hidden(self, batch: MicroBatch) -> Tensor:
        self.model.train(self._config.gradient_checkpointing and torch.is_grad_enabled())
        if batch.layout is not None:
            inputs = packed_inputs(batch.layout, self.device, varlen=self._varlen)
        else:
            tokens = torch.from_numpy(batch.token_ids_BT).to(self.device, non_blocking=True)
            inputs = {"input_ids": tokens, "use_cache": False}
        with self._autocast():
            hidden_BTH = self.model.base_model(**inputs).last_hidden_state
            predictors = torch.from_numpy(batch.predictors_S).to(self.device)
            hidden_SH: Tensor = hidden_BTH.reshape(-1, hidden_BTH.shape[-1]).index_select(0, predictors)
        return hidden_SH

    def _autocast(self) -> AbstractContextManager[Any]:
        if self._compute is torch.float32:
            return nullcontext()
        return torch.autocast(self.device.type, dtype=self._compute)

    def _watch(self, module: torch.nn.Module, inputs: Any, output: Any) -> None:
        self._after_layer()
        hidden = output[0] if isinstance(output, tuple) else output
        if isinstance(hidden, Tensor) and hidden.requires_grad:
            hidden.register_hook(self._after_layer)  # type: ignore[no-untyped-call]

    def _after_layer(self, gradient: Tensor | None = None) -> None:
        self.on_layer()
        if self.ranks.size == 1 and self.interrupt.is_set():
            raise Interrupted


def compute_dtype(config: LearnerConfig, device: torch.device) -> torch.dtype:
    """Type of the passes on ``device``: ``learner.compute_dtype``."""
    name: Literal["auto"] | DtypeName = config.compute_dtype
    if name == "auto":
        frozen = config.lora.frozen_dtype if config.lora.rank else "float32"
        name = fast_dtype() if device.type == "cpu" and frozen == "float32" else "bfloat16"
        logger.info("learner.compute_dtype: auto is %s on this machine", name)
    return DTYPES[name]


def _without_dropout(model: torch.nn.Module) -> None:
    """The engine samples without dropout, so π is defined without it, in train mode too: layers of dropout, and
    probabilities that a module hands to the function."""
    model.eval()
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
        for name, value in list(vars(module).items()):
            if isinstance(value, float) and name.endswith(("dropout", "dropout_prob", "pdrop")):
                setattr(module, name, 0.0)
