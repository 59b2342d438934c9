"""A pretended GPU: tensors that are moved to ``cuda`` stay in the memory of the host and are marked. An operation that
reads tensors of both devices raises, as it does on a real GPU, so a tensor that was made on the wrong device shows
without one. Values are those of the CPU, to the last bit.

What it cannot show: kernels, streams, memory, types that only a GPU computes in, compiled code, other threads, and
hooks of saved tensors, which PyTorch calls within an operation (``gradient_checkpointing: offload``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.utils.checkpoint
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

GPU = torch.device("cuda", 0)
_ACROSS = {"aten::copy_", "aten::_to_copy"}
"""Operations that read one device and write another."""
_INDEXED = {"aten::index", "aten::index_put", "aten::index_put_", "aten::_unsafe_index", "aten::_index_put_impl_"}
"""Operations with indices that may lie on the host."""
_AWAITED = {"aten::_local_scalar_dense", "aten::nonzero", "aten::bincount", "aten::masked_select"}
"""Operations whose result depends on values that the host must know."""


class Marks:
    """Storages that are on the pretended GPU. They are kept, so that no new one has the address of an old one."""

    def __init__(self) -> None:
        self._storages: dict[int, torch.UntypedStorage] = {}
        self.operations = 0
        """Operations on the GPU so far."""
        self.waits = 0
        """Calls so far in which the host waits for the GPU: values read, and copies that are not ``non_blocking``."""
        self.inside = False
        """Within a call that got a tensor of the GPU: PyTorch takes the device of what it makes from that tensor."""

    def has(self, tensor: Any) -> bool:
        return isinstance(tensor, Tensor) and tensor.untyped_storage()._cdata in self._storages

    def add(self, results: Any) -> Any:
        for tensor in tree_leaves(results):
            if isinstance(tensor, Tensor):
                storage = tensor.untyped_storage()
                self._storages[storage._cdata] = storage
        return results


def _is_gpu(device: Any) -> bool:
    return device is not None and torch.device(device).type == "cuda"


class _Operations(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Every operation, also of a backward pass."""

    def __init__(self, marks: Marks) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._marks = marks

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, marks = dict(kwargs or {}), self._marks
        made_on = kwargs.get("device")
        if _is_gpu(made_on):
            kwargs["device"] = torch.device("cpu")
        if kwargs.get("pin_memory"):
            kwargs["pin_memory"] = False
        name = func.name().partition(".")[0]
        read = args[:1] if name in _INDEXED else (args, kwargs)
        tensors = [t for t in tree_leaves(read) if isinstance(t, Tensor)]
        there = [marks.has(t) for t in tensors]
        if any(there) and name not in _ACROSS:
            marks.operations += 1
            marks.waits += name in _AWAITED
            for tensor, on_gpu in zip(tensors, there, strict=True):
                if not on_gpu and tensor.dim():
                    raise RuntimeError(
                        f"{func}: expected all tensors on the GPU, got one of shape {tuple(tensor.shape)} on the host"
                    )
        if name == "aten::histc":  # whole numbers on a GPU, on a CPU none
            args = (args[0].float(), *args[1:])
        results = func(*args, **kwargs)
        if name == "aten::copy_":
            return results
        on_gpu = _is_gpu(made_on) or (any(there) if made_on is None else marks.inside)
        return marks.add(results) if on_gpu else results


class _Calls(TorchFunctionMode):
    """Calls from Python that a tensor of the host would answer without an operation."""

    def __init__(self, marks: Marks) -> None:
        super().__init__()
        self._marks = marks
        self._answers: Mapping[Any, Callable[..., Any]] = {
            Tensor.device.__get__: lambda t: GPU if marks.has(t) else t.device,
            Tensor.is_cuda.__get__: marks.has,  # type: ignore[attr-defined]
            Tensor.is_cpu.__get__: lambda t: t.is_cpu and not marks.has(t),  # type: ignore[attr-defined]
            Tensor.to: self._to,
            Tensor.cpu: lambda t, **_: self._to(t, "cpu"),
            Tensor.cuda: lambda t, *_, **__: self._to(t, GPU),
            Tensor.new_tensor: self._new_tensor,
            Tensor.numpy: self._numpy,
            Tensor.tolist: lambda t: self._to(t, "cpu").tolist(),
            Tensor.pin_memory: lambda t, *_: t,
            Tensor.backward: self._backward,
            torch.tensor: self._made(torch.tensor),
            torch.as_tensor: self._made(torch.as_tensor),
        }

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, marks, before = kwargs or {}, self._marks, self._marks.inside
        marks.inside = any(map(marks.has, tree_leaves((args, kwargs)))) and kwargs.get("device") is None
        try:
            return self._answers.get(func, func)(*args, **kwargs)
        finally:
            marks.inside = before

    def _to(self, tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        given = torch._C._nn._parse_to(*args, **{k: v for k, v in kwargs.items() if k != "copy"})
        device, dtype = given[0], given[1]
        if args and isinstance(args[0], Tensor):
            device, dtype = (GPU if self._marks.has(args[0]) else args[0].device), args[0].dtype
        if device is not None and device.type == "meta":
            return tensor.to(*args, **kwargs)
        was, will = self._marks.has(tensor), self._marks.has(tensor) if device is None else _is_gpu(device)
        self._marks.waits += was != will and not given[2]
        with _disable_current_modes():
            moved = tensor.to(dtype=dtype or tensor.dtype, copy=was != will or bool(kwargs.get("copy")))
        return self._marks.add(moved) if will else moved

    def _made(self, make: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def on_device(data: Any, device: Any = None, **kwargs: Any) -> Tensor:
            if not _is_gpu(device):
                return make(data, device=device, **kwargs)
            return self._to(make(data, **kwargs), device)

        return on_device

    def _new_tensor(self, tensor: Tensor, data: Any, **kwargs: Any) -> Tensor:
        return self._to(tensor.new_tensor(data, **kwargs), GPU if self._marks.has(tensor) else "cpu")

    def _numpy(self, tensor: Tensor, **kwargs: Any) -> Any:
        if self._marks.has(tensor):
            raise TypeError("can't convert a tensor on the GPU to numpy: move it to the host first")
        return tensor.numpy(**kwargs)

    def _backward(self, tensor: Tensor, gradient: Tensor | None = None, **_: Any) -> None:
        seed = torch.ones_like(tensor) if gradient is None else gradient
        if self._marks.has(tensor):
            self._marks.add(seed)
        with self:  # the backward pass of a function of ours asks tensors too
            torch.autograd.Variable._execution_engine.run_backward(
                (tensor,), (seed,), False, False, (), allow_unreachable=True, accumulate_grad=True
            )


class _HostEvent:
    """The part of ``torch.cuda.Event`` that the product uses."""

    def record(self, stream: Any = None) -> None:
        pass

    def synchronize(self) -> None:
        pass

    def elapsed_time(self, other: _HostEvent) -> float:
        return 0.0

    def query(self) -> bool:
        return True


@contextmanager
def second_device() -> Iterator[Marks]:
    """Until the end of the block there is a pretended GPU, ``cuda``."""
    marks = Marks()
    with pytest.MonkeyPatch.context() as patch:
        # it asks for the device of what is saved within an operation, where nobody answers for the pretended GPU
        patch.setitem(torch.utils.checkpoint._allowed_determinism_checks_to_fns, "default", lambda _: None)
        patch.setenv("HF_DEACTIVATE_ASYNC_LOAD", "1")  # other threads know nothing of the pretended GPU
        patch.setattr(torch.cuda, "_lazy_init", lambda: None)
        patch.setattr(torch.cuda, "Event", lambda **_: _HostEvent())
        for name in ("synchronize", "empty_cache", "ipc_collect", "reset_peak_memory_stats", "set_device"):
            patch.setattr(torch.cuda, name, lambda *_: None)
        for name in ("max_memory_allocated", "memory_allocated", "current_device"):
            patch.setattr(torch.cuda, name, lambda *_: 0)
        patch.setattr(torch.cuda, "get_device_name", lambda *_: "pretended")
        patch.setattr(torch.cuda, "get_device_capability", lambda *_: (7, 0))
        with _Operations(marks), _Calls(marks):
            yield marks
