"""A transformer on a device: hidden states at the positions that predict sampled tokens, interruptible by layer.

Dimensions: B rows, T padded length, S sampled tokens of a micro-batch, H hidden size.
"""

from __future__ import annotations

import threading
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from learner.batching import MicroBatch
from pipeline.config.learner import LearnerConfig
from pipeline.errors import ConfigurationError

DTYPES: dict[str, torch.dtype] = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class Interrupted(Exception):
    """The pass was given up because the process is stopping. Nothing was changed by it."""


class Backbone:
    """``model`` without dropout on ``device``, its weights in ``dtype``.

    ``interrupt`` is looked at before each layer, forward and backward: when set, the pass raises :class:`Interrupted`
    within a layer's time. Several models may share one.
    """

    def __init__(
        self,
        model: Any,
        config: LearnerConfig,
        device: torch.device,
        interrupt: threading.Event | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        self.model = model.to(device=device, dtype=dtype)
        self._without_dropout()
        self.device = device
        self.interrupt = interrupt or threading.Event()
        self._config = config
        self._compute = DTYPES[config.compute_dtype]
        if config.gradient_checkpointing:
            self.model.gradient_checkpointing_enable()
        for layer in self._layers():
            layer.register_forward_hook(self._watch)

    @property
    def parameters(self) -> list[torch.nn.Parameter]:
        """Those that are trained."""
        return [parameter for _, parameter in self.named_parameters]

    @property
    def named_parameters(self) -> list[tuple[str, torch.nn.Parameter]]:
        return [(name, p) for name, p in self.model.named_parameters() if p.requires_grad]

    def hidden(self, batch: MicroBatch) -> Tensor:
        """Last hidden state at each position whose output predicts a sampled token, the one before it, ``[S, H]``, in
        the compute type. With gradient where gradients are enabled."""
        tokens = torch.from_numpy(batch.token_ids_BT).to(self.device, non_blocking=True)
        with self._autocast():
            hidden_BTH = self.model.base_model(input_ids=tokens, use_cache=False).last_hidden_state
            predictors = torch.from_numpy(batch.predictors_S).to(self.device)
            hidden_SH: Tensor = hidden_BTH.reshape(-1, hidden_BTH.shape[-1]).index_select(0, predictors)
        return hidden_SH

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


def read_model(folder: Path, *, trust_remote_code: bool = False) -> Any:
    """The causal language model of a Hugging Face folder, in float32. Raises :class:`ConfigurationError` when there is
    none."""
    if not (folder / "config.json").is_file():
        raise ConfigurationError(
            f"expected a Hugging Face model folder with config.json, got {folder}: check model.source"
        )
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, trust_remote_code=trust_remote_code)
