"""Loads the causal language model of a Hugging Face folder: whole, or of each weight only this rank's shard.

Shards: the model is made without memory for its weights (on the meta device), divided by FSDP, and then filled with
slices that are read from the safetensors files. So a rank never holds more than its shard and the slice being copied.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import orjson
import torch
from accelerate import init_empty_weights
from safetensors import safe_open
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig
from transformers.conversion_mapping import get_model_conversion_mapping

from pipeline.errors import ConfigurationError

log = logging.getLogger(__name__)
INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"


def is_empty(model: torch.nn.Module) -> bool:
    """True where weights are on the meta device."""
    return any(parameter.is_meta for parameter in model.parameters())


class ModelFolder:
    """A Hugging Face folder. Raises :class:`ConfigurationError` when it is none."""

    def __init__(self, path: Path, *, trust_remote_code: bool = False) -> None:
        if not (path / "config.json").is_file():
            raise ConfigurationError(
                f"expected a Hugging Face model folder with config.json, got {path}: check model.source"
            )
        self._path = path
        self._options = {"dtype": torch.float32, "trust_remote_code": trust_remote_code}

    def read(self, device: torch.device) -> Any:
        """The model in float32 on ``device``; each weight goes there from its file."""
        return AutoModelForCausalLM.from_pretrained(self._path, device_map={"": device}, **self._options)

    def empty(self) -> Any:
        """The model in float32 with its buffers, and its weights on the meta device: :meth:`fill` reads them."""
        options = {"trust_remote_code": self._options["trust_remote_code"]}
        config = AutoConfig.from_pretrained(self._path, **options)
        with init_empty_weights(include_buffers=False):
            model: Any = AutoModelForCausalLM.from_config(config, **self._options)
        model.tie_weights()
        if model.can_generate() and (self._path / "generation_config.json").is_file():
            model.generation_config = GenerationConfig.from_pretrained(self._path)
        return model.eval()

    @torch.no_grad()
    def fill(self, model: Any, device: torch.device) -> None:
        """Give every weight of ``model`` that is on the meta device its values on ``device``: of a divided one the
        shard of this rank. ``model`` is :meth:`empty` or its base model, with adapters or without; ties stay.

        Raises :class:`ConfigurationError` for a weight of another shape.
        """
        names: dict[Tensor, list[str]] = {}
        for name, parameter in model.named_parameters(remove_duplicate=False):
            if parameter.is_meta:
                names.setdefault(parameter, []).append(name)
        saved = model.state_dict().keys()
        for name, buffer in model.named_buffers():
            if name in saved:
                names[buffer] = [name]
        read = self._reader(model, list(names.values()))
        filled = {}
        for tensor, own in names.items():
            if tensor.is_meta:
                filled[tensor] = _filled(tensor, partial(read, own[0], list(tensor.shape)), device)
            else:
                tensor.copy_(read(own[0], list(tensor.shape), slice(None)))
        for module in model.modules():
            for name, parameter in list(module._parameters.items()):
                if parameter in filled:
                    module._parameters[name] = filled[parameter]

    def _reader(self, model: Any, wanted: list[list[str]]) -> Callable[[str, list[int], slice], Tensor]:
        """A function that reads rows of a weight, called by the first of the names that it has in the model; from a
        file, or where names in the files are others than the model's from the whole model."""
        files = self._files()
        found = {own[0]: name for own in wanted for name in self._in_files(model, own, files)}
        whole: dict[str, Tensor] | None = None
        if len(found) < len(wanted) or get_model_conversion_mapping(model, add_legacy=False):
            log.info("each rank reads the whole model: weights in %s have other names than the model's", self._path)
            whole = self.read(torch.device("cpu")).state_dict()
            found = {own[0]: name for own in wanted for name in self._in_files(model, own, whole)}

        def read(own: str, shape: list[int], rows: slice) -> Tensor:
            name = found[own]
            if whole is not None:
                return whole[name][rows]
            with safe_open(files[name], framework="pt") as file:
                tensor = file.get_slice(name)
                if tensor.get_shape() != shape:
                    raise ConfigurationError(
                        f"expected {name} of the shape {shape} in {files[name]}, got {tensor.get_shape()}"
                    )
                part: Tensor = tensor[rows]
                return part

        return read

    def _in_files(self, model: Any, own: list[str], files: Mapping[str, Any]) -> list[str]:
        """The first name in ``files`` of a weight, whose names in the model are ``own``; empty: there is none."""
        plain = [name.replace(".base_layer.", ".") for name in own]
        prefix = f"{model.base_model_prefix}."
        names = [*plain, *(prefix + name for name in plain), *(name.removeprefix(prefix) for name in plain)]
        return [name for name in names if name in files][:1]

    def _files(self) -> dict[str, Path]:
        """The file of each weight by its name; empty where there are no safetensors files by their usual names."""
        index, single = self._path / INDEX, self._path / SINGLE
        if single.is_file():
            with safe_open(single, framework="pt") as file:
                return dict.fromkeys(file.keys(), single)
        if index.is_file():
            weights: dict[str, str] = orjson.loads(index.read_bytes())["weight_map"]
            return {name: self._path / file for name, file in weights.items()}
        return {}


def _filled(empty: Any, read: Callable[[slice], Tensor], device: torch.device) -> torch.nn.Parameter:
    """A parameter like ``empty`` with its values, of a divided one those of this rank."""
    if not isinstance(empty, DTensor):
        whole = torch.empty(empty.shape, dtype=empty.dtype, device=device).copy_(read(slice(None)))
        return torch.nn.Parameter(whole, requires_grad=empty.requires_grad)
    local = torch.empty(empty.to_local().shape, dtype=empty.dtype, device=device)
    local.copy_(read(own_rows(empty.shape[0], empty.device_mesh)))
    return torch.nn.Parameter(divided(local, empty, empty.device_mesh), requires_grad=empty.requires_grad)


def own_rows(rows: int, mesh: DeviceMesh) -> slice:
    """Rows of this rank of a tensor that is divided by its first dimension."""
    share = -(-rows // mesh.size())
    first = min(mesh.get_local_rank() * share, rows)
    return slice(first, min(first + share, rows))


def divided(local: Tensor, whole: Tensor, mesh: DeviceMesh) -> DTensor:
    """A tensor with the shape of ``whole``, of which this rank holds ``local``."""
    return DTensor.from_local(local, mesh, [Shard(0)], run_check=False, shape=whole.shape, stride=whole.stride())
