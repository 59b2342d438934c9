"""The learner's side of GPUs that it shares with the engines (``engine.colocate``).

*consumes* the loop's request to train; *produces* exclusive use of the devices, with the learner's models on them;
*waits for* the engines to fall asleep; *unblocked by* their keepers.

All ranks take their turn at once: each has its device when all engines sleep, and engines wake when every rank has
freed its own. With offloading, models and optimizer state move between device and host memory in place. A parameter
stays the same object, and so does each tensor of an optimizer's state: only the memory behind it changes, so that
optimizer, adapters and FSDP keep theirs. Nothing may compute while they are in host memory.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import anyio
import anyio.to_thread
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn import Module

from learner.distributed.collectives import divided_modules, follow_moved
from learner.distributed.ranks import free_cached, local_part, resolve_device
from learner.policy.reference import FrozenCopy
from learner.training.trainer import Trainer
from learner.weights.colocated import SharedDevice
from pipeline.config import RunConfig
from pipeline.config.rollouts import learner_share

log = logging.getLogger(__name__)
HOST = torch.device("cpu")


class Offload:
    """Moves everything large that the trainers of all ranks hold on their devices to host memory and back. Where
    ``moves`` is False it leaves them there, and gives back only memory that torch keeps for later."""

    def __init__(self, trainer: Trainer, *, moves: bool = True) -> None:
        self._trainer = trainer
        self._moves = moves
        self._device = trainer.policy.device
        self._moved: list[Tensor] = []

    def to_host(self) -> int:
        """Move everything to host memory and give the devices' back; bytes moved, on all ranks. Idempotent."""
        return self._everywhere(to_host=True)

    def to_device(self) -> int:
        """Undo :meth:`to_host`; bytes moved, on all ranks. Idempotent."""
        return self._everywhere(to_host=False)

    def _everywhere(self, *, to_host: bool) -> int:
        with self._trainer.policy.ranks.together("offload", facts={"to_host": to_host, "moves": self._moves}):
            return self.here(to_host=to_host, moves=self._moves)

    @torch.no_grad()
    def here(self, *, to_host: bool, moves: bool) -> int:
        """The part of this rank. Returns when every rank has done its own."""
        moved = 0
        if not to_host:
            moved = self._move(self._moved, self._device)
            self._moved = []
        elif not self._moved:
            if moves:
                self._moved = [t for t in self._tensors() if local_part(t).device.type == self._device.type]
                moved = self._move(self._moved, HOST)
            free_cached(self._device)
        return int(self._trainer.policy.ranks.summed([moved])[0])

    def _move(self, tensors: Sequence[Tensor], device: torch.device) -> int:
        for tensor in tensors:
            # for a parameter ``to_local`` gives another object, which would be moved in its place
            local = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
            local.data = local.data.to(device, copy=True)
            if tensor.grad is not None:
                tensor.grad = None
        for module in self._modules() if tensors else ():
            follow_moved(module)
        return sum(local_part(tensor).nbytes for tensor in tensors)

    def _modules(self) -> list[Module]:
        trainer = self._trainer
        modules = [trainer.policy.root]
        if trainer.critic is not None:
            modules += trainer.critic.modules
        if isinstance(trainer.reference, FrozenCopy):
            modules.append(trainer.reference.backbone.root)
        return modules

    def _tensors(self) -> Iterable[Tensor]:
        """Each once, also where weights are tied; shards, not what FSDP has gathered of them."""
        trainer = self._trainer
        for divided in (divided for module in self._modules() for divided in divided_modules(module)):
            divided.reshard()
        optimizers = [trainer.optimizer, *([] if trainer.critic is None else [trainer.critic.optimizer])]
        found: list[Any] = [t for module in self._modules() for t in (*module.parameters(), *module.buffers())]
        found += [value for optimizer in optimizers for state in optimizer.state.values() for value in state.values()]
        return {id(tensor): tensor for tensor in found if isinstance(tensor, Tensor)}.values()


class DeviceTurn:
    """Acquired before an update, released after it. The engines wake with the publication that follows."""

    def __init__(self, shared: SharedDevice, trainer: Trainer, *, offload: bool) -> None:
        self._shared = shared
        self._offload = Offload(trainer, moves=offload)

    async def acquire(self, waiting: Callable[[str], None]) -> None:
        """Wait until the engines sleep, then bring the models back. ``waiting`` gets the reason."""
        await self._shared.acquire(waiting)
        await anyio.to_thread.run_sync(self._offload.to_device)

    async def release(self) -> None:
        """Free the memory of the devices. The weights to publish must have been copied before."""
        await anyio.to_thread.run_sync(self._offload.to_host)


def limit_memory(config: RunConfig) -> None:
    """Hold the learner to its part of the device (``engine.colocate: split``)."""
    share, device = learner_share(config.engine), resolve_device(config.learner.device)
    if share is not None and device.type == "cuda":
        torch.cuda.set_per_process_memory_fraction(share)
        log.info("the learner may take %.0f%% of the GPU's memory", 100 * share)
