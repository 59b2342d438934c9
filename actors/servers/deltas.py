"""Application of weight deltas to torch tensors, in the embedded engine and in vLLM's workers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from pipeline.errors import DeltaMismatch
from pipeline.runtime.weights import Bits, apply_deltas, read_delta

_UNSIGNED = {1: torch.uint8, 2: torch.uint16, 4: torch.uint32, 8: torch.uint64}


@torch.no_grad()
def patch(tensors: Mapping[str, Tensor], files: Sequence[Path]) -> None:
    """Bring ``tensors`` to the version of the last delta in ``files``, in place; further tensors stay as they are.

    Tensors on the host in the published type are changed directly, others by way of a copy there. Raises
    :class:`DeltaMismatch`, with all tensors as they were, where the result would not be that version.
    """
    deltas = [read_delta(file) for file in files]
    hosts: dict[str, Tensor] = {}
    for name, change in deltas[-1].patches.items():
        tensor = tensors.get(name)
        if tensor is None or tuple(tensor.shape) != change.shape:
            raise DeltaMismatch(f"expected a tensor {name} of shape {change.shape}, which is not here")
        hosts[name] = tensor.detach().to("cpu", _dtype(change.dtype)).contiguous()
    apply_deltas({name: _bits(host) for name, host in hosts.items()}, deltas)
    for name, host in hosts.items():
        if host.data_ptr() != tensors[name].data_ptr():
            tensors[name].copy_(host)


def read_base(folder: Path, file: Path) -> dict[str, Tensor]:
    """The tensors in ``folder`` that the delta ``file`` changes, in its types, in host memory. Raises
    :class:`DeltaMismatch`."""
    wanted = read_delta(file).patches
    found: dict[str, Tensor] = {}
    try:
        for path in sorted(folder.glob("*.safetensors")):
            with safe_open(path, framework="pt") as opened:
                for name in wanted.keys() & set(opened.keys()):
                    found[name] = opened.get_tensor(name).to(_dtype(wanted[name].dtype)).clone()
    except (OSError, SafetensorError) as error:
        raise DeltaMismatch(f"the weights in {folder} cannot be read: {error}") from error
    if missing := sorted(wanted.keys() - found.keys()):
        raise DeltaMismatch(f"{folder} has no tensor {missing[0]}")
    return found


def _dtype(name: str) -> torch.dtype:
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise DeltaMismatch(f"expected the name of a torch type, got {name!r}")
    return dtype


def _bits(tensor: Tensor) -> Bits:
    return tensor.reshape(-1).view(_UNSIGNED[tensor.element_size()]).numpy()
