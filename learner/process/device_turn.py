"""The learner's side of a GPU that it shares with the engines (``engine.colocate``).

*consumes* the loop's request to train; *produces* exclusive use of the device, with the learner's models on it; *waits
for* the engines to fall asleep; *unblocked by* their keepers.

With offloading, models and optimizer state move between the device and host memory in place. A parameter stays the same
object, and so does each tensor of an optimizer's state: only the memory behind it changes, so that optimizer
and adapters keep theirs. Nothing may compute while they are in host memory.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import anyio
import anyio.to_thread
import torch
from torch import Tensor

from learner.distributed.ranks import resolve_device
from learner.policy.reference import FrozenCopy
from learner.training.trainer import Trainer
from learner.weights.colocated import SharedDevice
from pipeline.config import RunConfig
from pipeline.config.rollouts import learner_share

log = logging.getLogger(__name__)
HOST = torch.device("cpu")


class Offload:
    """Moves everything large that a trainer holds on ``trainer.policy.device`` to host memory and back."""

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self._device = trainer.policy.device
        self._moved: list[Tensor] = []

    @property
    def offloaded(self) -> bool:
        return bool(self._moved)

    @torch.no_grad()
    def to_host(self) -> int:
        """Move everything to host memory and give the device's back; bytes moved. Idempotent."""
        if self.offloaded:
            return 0
        self._moved = [tensor for tensor in self._tensors() if tensor.device.type == self._device.type]
        moved = sum(_move(tensor, HOST) for tensor in self._moved)
        free_cached(self._device)
        return moved

    @torch.no_grad()
    def to_device(self) -> int:
        """Undo :meth:`to_host`; bytes moved. Idempotent."""
        moved, self._moved = self._moved, []
        return sum(_move(tensor, self._device) for tensor in moved)

    def _tensors(self) -> Iterable[Tensor]:
        """Each once, also where weights are tied."""
        trainer = self._trainer
        modules, optimizers = [trainer.policy.model], [trainer.optimizer]
        if trainer.critic is not None:
            modules += trainer.critic.modules
            optimizers.append(trainer.critic.optimizer)
        if isinstance(trainer.reference, FrozenCopy):
            modules.append(trainer.reference.model)
        found: list[Any] = [tensor for module in modules for tensor in (*module.parameters(), *module.buffers())]
        found += [value for optimizer in optimizers for state in optimizer.state.values() for value in state.values()]
        return {id(tensor): tensor for tensor in found if isinstance(tensor, Tensor)}.values()


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


class DeviceTurn:
    """Acquired before an update, released after it. The engines wake with the publication that follows."""

    def __init__(self, shared: SharedDevice, trainer: Trainer, *, offload: bool) -> None:
        self._shared = shared
        self._device = trainer.policy.device
        self._offload = Offload(trainer) if offload else None

    async def acquire(self, waiting: Callable[[str], None]) -> None:
        """Wait until the engines sleep, then bring the models back. ``waiting`` gets the reason."""
        await self._shared.acquire(waiting)
        if self._offload is not None:
            await anyio.to_thread.run_sync(self._offload.to_device)

    async def release(self) -> None:
        """Free the memory of the device. The weights to publish must have been copied before."""
        free = partial(free_cached, self._device) if self._offload is None else self._offload.to_host
        await anyio.to_thread.run_sync(free)


def limit_memory(config: RunConfig) -> None:
    """Hold the learner to its part of the device (``engine.colocate: split``)."""
    share, device = learner_share(config.engine), resolve_device(config.learner.device)
    if share is not None and device.type == "cuda":
        torch.cuda.set_per_process_memory_fraction(share)
        log.info("the learner may take %.0f%% of the GPU's memory", 100 * share)
