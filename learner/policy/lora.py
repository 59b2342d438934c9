"""Low-rank adapters in a model (Hu et al. 2021, arXiv:2106.09685), by peft.

The layers are replaced in place, so the model is called and scored as before. Nothing is ever merged into the weights
in training: merged copies are made from them, so the frozen weights stay the same bits.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import peft
import torch
from peft.tuners.lora import LoraLayer
from peft.utils import transformers_weight_conversion as conversion
from safetensors.torch import load_file, save_file
from torch import Tensor

from learner.distributed.ranks import ALONE, Ranks
from pipeline.config.learner import LoraConfig
from pipeline.errors import ConfigurationError, FormatMismatch

WEIGHTS = "adapter_model.safetensors"
_NAME = "default"


class Adapters:
    """Freezes ``model`` and puts adapters into it; B begins at 0, so the policy begins unchanged.

    ``folder`` holds saved ones to resume from. Raises :class:`ConfigurationError` where no layer has the names of
    ``config.targets``, or peft refuses one, :class:`FormatMismatch` when the saved ones belong to another model or
    rank.
    """

    def __init__(self, model: Any, config: LoraConfig, folder: Path | None = None) -> None:
        options = peft.LoraConfig(
            r=config.rank,
            lora_alpha=2 * config.rank if config.alpha is None else config.alpha,
            target_modules=sorted(_targets(model, config.targets)),
            lora_dropout=0.0,
            bias="none",
            task_type="CAUSAL_LM",
        )
        with warnings.catch_warnings(), _placeholders(model), _targets_as_given():
            warnings.simplefilter("ignore")  # peft warns of tied weights although the output layer gets no adapter
            try:
                self._peft: peft.PeftModel = peft.get_peft_model(model, options)
            except ValueError as error:
                raise ConfigurationError(f"learner.lora.targets: choose other layers: {error}") from error
        adapted = {name: m for name, m in model.named_modules() if isinstance(m, LoraLayer)}
        self._deltas: dict[str, Any] = {name: m.get_delta_weight for name, m in adapted.items()}
        for layer in adapted.values():
            layer.cast_input_dtype_enabled = False  # autocast casts: a float32 copy of each input would be kept
        if folder is not None:
            self.load(folder)

    @contextmanager
    def disabled(self) -> Iterator[None]:
        """The frozen weights alone, while the block runs."""
        with self._peft.disable_adapter():
            yield

    def owns(self, name: str) -> bool:
        """True for an entry of the model's state dict that is part of an adapter."""
        return ".lora_" in name

    def merged_name(self, name: str) -> str:
        """Name of an entry of the model's state dict in a model without adapters."""
        module, marker, rest = name.rpartition(".base_layer.")
        return f"{module}.{rest}" if marker else name

    @torch.no_grad()
    def merged(self, name: str, tensor: Tensor) -> Tensor:
        """An entry of the model's state dict as a model without adapters has it: ``W + alpha / rank · B A``, added in
        float32."""
        module, marker, rest = name.rpartition(".base_layer.")
        return tensor.float() + self._deltas[module](_NAME).float() if marker and rest == "weight" else tensor

    @torch.no_grad()
    def snapshot(self, dtype: torch.dtype, ranks: Ranks = ALONE) -> dict[str, Tensor]:
        """Copies of the adapters' weights on the CPU, by the names of peft's files. All ``ranks`` must call it."""
        state = peft.get_peft_model_state_dict(self._peft, adapter_name=_NAME)
        return {
            name: ranks.whole(t).detach().to(device="cpu", dtype=dtype, copy=True).contiguous()
            for name, t in sorted(state.items())
        }

    def save(self, folder: Path, tensors: Mapping[str, Tensor]) -> None:
        """``tensors`` as an adapter folder that peft and vLLM load. The weights in training are not read."""
        folder.mkdir(parents=True, exist_ok=True)
        self._peft.peft_config[_NAME].save_pretrained(str(folder))
        save_file(dict(tensors), folder / WEIGHTS, metadata={"format": "pt"})

    def load(self, folder: Path) -> None:
        """Take the weights of an adapter folder. Raises :class:`FormatMismatch`."""
        if not (folder / WEIGHTS).is_file():
            raise FormatMismatch(
                f"expected adapters in {folder}, found none: the checkpoint was written without learner.lora; choose "
                "another run.name, or set learner.lora.rank: 0"
            )
        saved = load_file(folder / WEIGHTS)
        own = peft.get_peft_model_state_dict(self._peft, adapter_name=_NAME)
        if {n: t.shape for n, t in saved.items()} != {n: t.shape for n, t in own.items()}:
            raise FormatMismatch(
                f"the adapters in {folder} belong to another model, rank or choice of layers: choose another run.name"
            )
        peft.set_peft_model_state_dict(self._peft, saved, adapter_name=_NAME)


@contextmanager
def _placeholders(model: torch.nn.Module) -> Iterator[None]:
    """Weights without memory on the CPU in place of those on the meta device: peft moves new adapters to the device of
    the layer, where they would lose their values."""
    empty = [(m, name, p) for m in model.modules() for name, p in m._parameters.items() if p is not None and p.is_meta]
    for module, name, parameter in empty:
        nothing = torch.zeros((), dtype=parameter.dtype).expand(parameter.shape)
        module._parameters[name] = torch.nn.Parameter(nothing, requires_grad=False)
    try:
        yield
    finally:
        for module, name, parameter in empty:
            parameter.requires_grad = False
            module._parameters[name] = parameter


@contextmanager
def _targets_as_given() -> Iterator[None]:
    """Without peft's translation of names: in a mixture of experts it takes linear layers called ``gate_proj`` or
    ``down_proj`` for the experts of transformers 4, and adapts the merged experts in their place."""
    translate = conversion.convert_peft_config_for_transformers
    conversion.convert_peft_config_for_transformers = lambda *args, **options: None
    try:
        yield
    finally:
        conversion.convert_peft_config_for_transformers = translate


def _targets(model: Any, ends: tuple[str, ...]) -> set[str]:
    """Full names of the layers that get adapters. Towers of images and sounds, which text does not pass, get none."""
    output, decoder = model.get_output_embeddings(), set(model.get_decoder().modules())
    linear = {
        n for n, m in model.named_modules() if isinstance(m, torch.nn.Linear) and m in decoder and m is not output
    }
    chosen = linear if not ends else {n for n in linear if any(n == end or n.endswith(f".{end}") for end in ends)}
    unused = [end for end in ends if not any(n == end or n.endswith(f".{end}") for n in linear)]
    if unused or not chosen:
        known = sorted({n.rpartition(".")[2] for n in linear})
        raise ConfigurationError(f"learner.lora.targets: no linear layer ends in {unused}; this model has {known}")
    return chosen
