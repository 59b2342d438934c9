"""The ``model/`` folder of a checkpoint of several ranks, made of their shards a file of bounded size at a time.

Names, conversions and contents are those of ``save_pretrained`` of the whole model, which is nowhere in memory.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from itertools import groupby
from pathlib import Path
from typing import Any

import orjson
import torch
from safetensors import safe_open
from torch import Tensor

from learner.models.model_folder import INDEX, SINGLE

FILE_BYTES_MAX = 2 * 10**9
"""Weights that are whole in memory at the same time. A layer that has more is one file."""
_LAYER = re.compile(r".*?\.\d+\.")
_DONE = "{}.part"
"""A name that ``save_pretrained`` does not take for a leftover of another call."""


def write_model(
    model: Any,
    folder: Path,
    weights: Mapping[str, Tensor],
    read: Callable[[dict[str, Tensor]], None],
    written: Callable[[], None],
) -> None:
    """Write the Hugging Face folder of ``model``. Only names, shapes and types of ``weights`` are used: ``read`` fills
    empty tensors with their values. ``written`` is called after each file."""
    parts = divide_names({name: tensor.nbytes for name, tensor in weights.items()})
    for number, names in enumerate(parts):
        tensors = {name: torch.empty(weights[name].shape, dtype=weights[name].dtype) for name in names}
        read(tensors)
        model.save_pretrained(folder, state_dict=tensors, max_shard_size=1 << 62)
        (folder / SINGLE).rename(folder / _DONE.format(number))
        del tensors
        written()
    _name_files(folder, len(parts), sum(tensor.nbytes for tensor in weights.values()))


def divide_names(sizes: Mapping[str, int]) -> list[list[str]]:
    """Names of the weights of each file, by their bytes. A layer stays in one file, because a conversion may make one
    weight of several.

    >>> divide_names({"embed": 2, "layers.0.a": 10**9, "layers.0.b": 10**9, "layers.1.a": 10**9, "norm": 2})
    [['embed'], ['layers.0.a', 'layers.0.b'], ['layers.1.a', 'norm']]
    """
    files: list[list[str]] = []
    size = 0
    for _, layer in groupby(sizes, lambda name: found[0] if (found := _LAYER.match(name)) else name):
        names = list(layer)
        n_bytes = sum(sizes[name] for name in names)
        if not files or size + n_bytes > FILE_BYTES_MAX:
            files.append([])
            size = 0
        files[-1] += names
        size += n_bytes
    return files


def _name_files(folder: Path, count: int, n_bytes: int) -> None:
    if count == 1:
        (folder / _DONE.format(0)).rename(folder / SINGLE)
        return
    weight_map: dict[str, str] = {}
    for number in range(count):
        file = folder / f"model-{number + 1:05}-of-{count:05}.safetensors"
        (folder / _DONE.format(number)).rename(file)
        with safe_open(file, framework="pt") as tensors:
            weight_map |= dict.fromkeys(tensors.keys(), file.name)
    index = {"metadata": {"total_size": n_bytes}, "weight_map": weight_map}
    (folder / INDEX).write_bytes(orjson.dumps(index, option=orjson.OPT_INDENT_2 | orjson.OPT_SORT_KEYS))
