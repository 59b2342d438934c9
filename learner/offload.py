"""Models and optimizer state between the device and host memory, in place.

A parameter stays the same object, and so does each tensor of an optimizer's state: only the memory behind it changes.
Whoever holds them (optimizer, average, adapters) notices nothing. Nothing may compute while they are away.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from learner.reference import FrozenCopy
from learner.trainer import Trainer

HOST = torch.device("cpu")


class Offload:
    """Everything large that a trainer holds on ``trainer.policy.device``."""

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self._home = trainer.policy.device
        self._left: list[Tensor] = []

    @property
    def away(self) -> bool:
        return bool(self._left)

    @torch.no_grad()
    def to_host(self) -> int:
        """Move everything to host memory and give the device's back; bytes moved. Harmless when it is there."""
        if self.away:
            return 0
        self._left = [tensor for tensor in self._tensors() if tensor.device.type == self._home.type]
        moved = sum(_move(tensor, HOST) for tensor in self._left)
        free_cached(self._home)
        return moved

    @torch.no_grad()
    def to_device(self) -> int:
        """Undo :meth:`to_host`; bytes moved. Harmless when nothing is away."""
        left, self._left = self._left, []
        return sum(_move(tensor, self._home) for tensor in left)

    def _tensors(self) -> Iterator[Tensor]:
        """Each once, also where weights are tied."""
        seen: set[int] = set()
        for tensor in self._all():
            if id(tensor) not in seen:
                seen.add(id(tensor))
                yield tensor

    def _all(self) -> Iterator[Tensor]:
        trainer = self._trainer
        modules, optimizers = [trainer.policy.model], [trainer.optimizer]
        if trainer.critic is not None:
            modules += trainer.critic.modules
            optimizers.append(trainer.critic.optimizer)
        if isinstance(trainer.reference, FrozenCopy):
            modules.append(trainer.reference.model)
        for module in modules:
            yield from module.parameters()
            yield from module.buffers()
        for optimizer in optimizers:
            for state in optimizer.state.values():
                yield from (value for value in state.values() if isinstance(value, Tensor))
        if trainer.average is not None:
            yield from trainer.average.state().values()


def free_cached(device: torch.device) -> None:
    """Give memory that torch keeps for later back to the device."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()


def _move(tensor: Tensor, device: torch.device) -> int:
    tensor.data = tensor.data.to(device, copy=True)
    if tensor.grad is not None:
        tensor.grad = None
    return tensor.numel() * tensor.element_size()
