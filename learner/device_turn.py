"""Models and optimizer state between the device and host memory, in place.

A parameter stays the same object, and so does each tensor of an optimizer's state: only the memory behind it changes.
Whoever holds them (optimizer, average, adapters) notices nothing. Nothing may compute while they are away.

The learner's side of a device that it shares with the engine (``engine.colocate``).

*Consumes* the loop's wish to train; *produces* a device that nobody else uses, with the learner's models on it; *waits
for* the engines to fall asleep; *unblocked by* the keepers, which say so.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from functools import partial

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


log = logging.getLogger(__name__)


class DeviceTurn:
    """Taken before an update, left after it. The engines wake with the publication that follows."""

    def __init__(self, share: SharedDevice, trainer: Trainer, *, offload: bool) -> None:
        self._share = share
        self._device = trainer.policy.device
        self._offload = Offload(trainer) if offload else None

    async def take(self, waiting: Callable[[str], None]) -> None:
        """Wait until the engines sleep, then bring the models back. ``waiting`` is told what it waits for."""
        await self._share.taken(waiting)
        if self._offload is not None:
            await anyio.to_thread.run_sync(self._offload.to_device)

    async def leave(self) -> None:
        """Give up what the device can do without. The weights to publish must have been copied before."""
        leave = partial(free_cached, self._device) if self._offload is None else self._offload.to_host
        await anyio.to_thread.run_sync(leave)


def limit_memory(config: RunConfig) -> None:
    """Hold the learner to its part of the device (``engine.colocate: split``)."""
    share, device = learner_share(config.engine), resolve_device(config.learner.device)
    if share is not None and device.type == "cuda":
        torch.cuda.set_per_process_memory_fraction(share)
        log.info("the learner may take %.0f%% of the GPU's memory", 100 * share)
