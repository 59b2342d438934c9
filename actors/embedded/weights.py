"""Published weights into the model of the embedded engine: a whole folder, or weight deltas; all of them or none.

Published weights have the names of files. Where transformers converts them for the model (experts), they are converted
here too, one group after another.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor
from transformers.conversion_mapping import get_model_conversion_mapping

from actors.servers.deltas import patch
from actors.servers.refusal import Refusal
from pipeline.runtime.stored_names import Group, read_groups, written_groups


def load_weights(model: Any, folder: Path) -> None:
    """Copy the tensors of ``folder/*.safetensors`` into ``model`` in place, cast to its dtype.

    Raises :class:`Refusal` (400) before anything changes when a tensor is missing, unknown or of another shape.
    """
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise Refusal(400, f"weights_path: no *.safetensors files in {folder}")
    tensors: dict[str, Tensor] = {}
    try:
        for file in files:
            tensors.update(load_file(file))
    except (OSError, SafetensorError) as error:
        raise Refusal(400, f"weights_path: cannot read {file}: {error}") from error
    state: dict[str, Tensor] = model.state_dict()
    groups = read_groups(get_model_conversion_mapping(model), tensors, state)
    shapes = {name: shape for group in groups for name, shape in _shapes(group, tensors, model).items()}
    covered = {state[name].data_ptr() for name in shapes if name in state}
    missing = sorted(name for name, tensor in state.items() if name not in shapes and tensor.data_ptr() not in covered)
    unknown = sorted(shapes.keys() - state.keys())
    if missing or unknown:
        raise Refusal(
            400, f"weights_path: {folder} does not fit the model: missing {missing[:3]}, unknown {unknown[:3]}"
        )
    for name, shape in shapes.items():
        if shape != state[name].shape:
            raise Refusal(
                400, f"weights_path: {name} has shape {tuple(shape)}, the model has {tuple(state[name].shape)}"
            )
    _take(state, groups, tensors, model)


def patch_weights(model: Any, files: Sequence[Path]) -> None:
    """Bring the weights of ``model`` to the version of the last delta in ``files``. Converted weights are patched in
    copies by their names in files. Raises :class:`pipeline.errors.DeltaMismatch`, with all weights as they were."""
    state: dict[str, Tensor] = model.state_dict()
    stored: dict[str, Tensor] = {}
    converted: dict[str, Tensor] = {}
    for group in written_groups(model, state, get_model_conversion_mapping):
        tensors = group.converted(state, model)
        stored |= tensors
        if group.converter is not None:
            converted |= tensors
    patch(stored, files)
    _take(state, read_groups(get_model_conversion_mapping(model), converted, state), converted, model)


@torch.no_grad()
def _take(state: dict[str, Tensor], groups: Sequence[Group], tensors: dict[str, Tensor], model: Any) -> None:
    for group in groups:
        for name, tensor in group.converted(tensors, model).items():
            state[name].copy_(tensor)


def _shapes(group: Group, tensors: dict[str, Tensor], model: Any) -> dict[str, torch.Size]:
    """Shapes of what a group becomes. Raises :class:`Refusal` where it cannot be converted."""
    if group.converter is None:
        return {group.target: tensors[group.names[0]].shape}
    try:
        results = group.converted({name: tensors[name].to("meta") for name in group.names}, model)
    except (RuntimeError, ValueError) as error:
        raise Refusal(400, f"weights_path: {group.names[0]} … does not become {group.target}: {error}") from error
    return {name: tensor.shape for name, tensor in results.items()}
