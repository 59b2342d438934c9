"""Loads the causal language model of a Hugging Face folder: whole, or of each weight only this rank's shard.

Shards: the model is made without memory for its weights (on the meta device), divided by FSDP, and then filled with
slices that are read from the safetensors files. So a rank never holds more than its shard and the slice being copied;
where transformers converts weights (experts), of a merged weight only the experts of its shard.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
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
from transformers.core_model_loading import MergeModulelist

from pipeline.errors import ConfigurationError
from pipeline.runtime.stored_names import Group, read_groups

log = logging.getLogger(__name__)
INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
Read = Callable[[str, slice, list[int], Tensor], object]
"""Copies rows of a weight, of its whole shape, into a tensor."""


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
        model = AutoModelForCausalLM.from_pretrained(self._path, device_map={"": device}, **self._options)
        return _that_can_be_saved(model)

    def empty(self) -> Any:
        """The model in float32 with its buffers, and its weights on the meta device: :meth:`fill` reads them."""
        options = {"trust_remote_code": self._options["trust_remote_code"]}
        config = AutoConfig.from_pretrained(self._path, **options)
        with init_empty_weights(include_buffers=False):
            model: Any = AutoModelForCausalLM.from_config(config, **self._options)
        model.tie_weights()
        if model.can_generate() and (self._path / "generation_config.json").is_file():
            model.generation_config = GenerationConfig.from_pretrained(self._path)
        return _that_can_be_saved(model.eval())

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
                filled[tensor] = _filled(tensor, partial(read, own[0]), device)
            else:
                read(own[0], slice(None), list(tensor.shape), tensor)
        for module in model.modules():
            for name, parameter in list(module._parameters.items()):
                if parameter in filled:
                    module._parameters[name] = filled[parameter]

    def _reader(self, model: Any, wanted: list[list[str]]) -> Read:
        """Reads rows of weights, called by the first of the names that they have in the model; from the files, or where
        these have no weight that becomes one in the model, from the whole model."""
        files, prefix = self._files(), f"{model.base_model_prefix}."
        plain = {names[0]: [name.replace(".base_layer.", ".") for name in names] for names in wanted}
        transforms = get_model_conversion_mapping(model)
        known = {name for names in plain.values() for name in names}
        groups = {name: g for g in read_groups(transforms, files, known, prefix) for name in _results(g)}
        found = {own: (name, groups[name]) for own, names in plain.items() for name in names if name in groups}
        if len(found) == len(plain):
            model._weight_conversions = [transform for transform in transforms if transform.was_used()]
            return lambda own, rows, shape, into: self._read(*found[own], files, model, rows, shape, into)
        log.info("each rank reads the whole model: not all weights have a name in the files of %s", self._path)
        read = self.read(torch.device("cpu"))
        model._weight_conversions = getattr(read, "_weight_conversions", None)
        whole = read.state_dict()
        names = {own: [n for name in names for n in (name, prefix + name)] for own, names in plain.items()}
        return lambda own, rows, _, into: into.copy_(next(whole[name] for name in names[own] if name in whole)[rows])

    def _read(
        self, own: str, group: Group, files: Mapping[str, Path], model: Any, rows: slice, shape: list[int], into: Tensor
    ) -> None:
        """Copy ``rows`` of the weight ``own`` of ``shape``, which ``group`` becomes, one expert after another."""
        with ExitStack() as stack:  # to open a file of many experts takes longer than to read one of them
            opened = {
                path: stack.enter_context(safe_open(path, framework="pt")) for path in {files[n] for n in group.names}
            }
            self._copy(own, group, {name: opened[files[name]] for name in group.names}, model, rows, shape, into)

    def _copy(
        self, own: str, group: Group, files: Mapping[str, Any], model: Any, rows: slice, shape: list[int], into: Tensor
    ) -> None:
        if group.converter is None:
            tensor = files[group.names[0]].get_slice(group.names[0])
            self._check(own, group, shape, tensor.get_shape())
            into.copy_(tensor[rows])
            return

        def converted(names: Iterable[str]) -> Tensor:
            result: Tensor = group.converted({name: files[name].get_tensor(name) for name in names}, model)[own]
            return result

        if not _stacks_rows(group):
            result = converted(group.names)
            self._check(own, group, shape, list(result.shape))
            into.copy_(result[rows])
            return
        of_pattern: dict[str, list[str]] = {}
        for name, pattern in zip(group.names, group.patterns, strict=True):
            of_pattern.setdefault(pattern, []).append(name)
        for names in of_pattern.values():
            self._check(own, group, shape, [len(names), *shape[1:]])
        for row, experts in zip(into, list(zip(*of_pattern.values(), strict=True))[rows], strict=True):
            result = converted(experts)
            self._check(own, group, shape, [shape[0], *result.shape[1:]])
            row.copy_(result[0])

    def _check(self, own: str, group: Group, expected: list[int], came: list[int]) -> None:
        if came != expected:
            name = own if group.converter is not None else group.names[0]
            raise ConfigurationError(f"expected {name} of the shape {expected} in {self._path}, got {came}")

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


def _that_can_be_saved(model: Any) -> Any:
    """The model, with a generation config that transformers can write. It reads one that contradicts itself, but
    refuses to write it: then only the token ids stay."""
    if model.can_generate():
        try:
            model.generation_config.validate(strict=True)
        except ValueError as error:
            log.warning("checkpoints have only the token ids of generation_config.json: %s", error)
            kept = {k: v for k, v in model.generation_config.to_dict().items() if k.endswith("token_id")}
            model.generation_config = GenerationConfig(**kept)
    return model


def _results(group: Group) -> list[str]:
    """Names of the weights that a group becomes."""
    if group.converter is None:
        return [group.target]
    first, *others = group.converter.target_patterns
    return [group.target, *(group.target.replace(first, other) for other in others)]


def _stacks_rows(group: Group) -> bool:
    """True where each weight of a pattern is one row of the result."""
    first, *others = group.converter.operations
    dims = [getattr(op, name) for op in others for name in ("dim", "dim0", "dim1") if hasattr(op, name)]
    return isinstance(first, MergeModulelist) and first.dim == 0 and len(dims) >= len(others) and 0 not in dims


def _filled(empty: Any, read: Callable[[slice, list[int], Tensor], object], device: torch.device) -> torch.nn.Parameter:
    """A parameter like ``empty`` with its values, of a divided one those of this rank."""
    is_divided = isinstance(empty, DTensor)
    rows = own_rows(empty.shape[0], empty.device_mesh) if isinstance(empty, DTensor) else slice(None)
    local = torch.empty(empty.to_local().shape if is_divided else empty.shape, dtype=empty.dtype, device=device)
    read(rows, list(empty.shape), local)
    value = divided(local, empty, empty.device_mesh) if is_divided else local
    return torch.nn.Parameter(value, requires_grad=empty.requires_grad)


def own_rows(rows: int, mesh: DeviceMesh) -> slice:
    """Rows of this rank of a tensor that is divided by its first dimension."""
    share = -(-rows // mesh.size())
    first = min(mesh.get_local_rank() * share, rows)
    return slice(first, min(first + share, rows))


def divided(local: Tensor, whole: Tensor, mesh: DeviceMesh) -> DTensor:
    """A tensor with the shape of ``whole``, of which this rank holds ``local``."""
    return DTensor.from_local(local, mesh, [Shard(0)], run_check=False, shape=whole.shape, stride=whole.stride())
