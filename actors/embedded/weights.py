"""Load a safetensors folder into a live model, all of it or nothing."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from actors.embedded.requests import Refused

if TYPE_CHECKING:
    import torch


def load_weights(model: Any, folder: Path) -> int:
    """Copy the tensors of ``folder/*.safetensors`` into ``model`` in place, cast to its dtype; returns how many.

    Raises :class:`Refused` (400) before anything changes when a tensor is missing, unknown or of another shape.
    """
    import torch
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise Refused(400, f"weights_path: no *.safetensors files in {folder}")
    tensors: dict[str, torch.Tensor] = {}
    try:
        for file in files:
            tensors.update(load_file(file))
    except (OSError, SafetensorError) as error:
        raise Refused(400, f"weights_path: cannot read {file}: {error}") from error
    state: dict[str, torch.Tensor] = model.state_dict()
    covered = {state[name].data_ptr() for name in tensors if name in state}
    missing = sorted(name for name, tensor in state.items() if name not in tensors and tensor.data_ptr() not in covered)
    unknown = sorted(tensors.keys() - state.keys())
    if missing or unknown:
        raise Refused(
            400, f"weights_path: {folder} does not fit the model: missing {missing[:3]}, unknown {unknown[:3]}"
        )
    for name, tensor in tensors.items():
        if tensor.shape != state[name].shape:
            raise Refused(
                400, f"weights_path: {name} has shape {tuple(tensor.shape)}, the model has {tuple(state[name].shape)}"
            )
    with torch.no_grad():
        for name, tensor in tensors.items():
            state[name].copy_(tensor)
    return len(tensors)
