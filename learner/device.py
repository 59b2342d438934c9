"""The learner's side of a device that it shares with the engine (``engine.colocate``).

*Consumes* the loop's wish to train; *produces* a device that nobody else uses, with the learner's models on it; *waits
for* the engines to fall asleep; *unblocked by* the keepers, which say so.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial

import anyio
import anyio.to_thread
import torch

from learner.offload import Offload, free_cached
from learner.policy import resolve_device
from learner.publisher.colocated import SharedDevice
from learner.trainer import Trainer
from pipeline.config import RunConfig
from pipeline.config.colocation import learner_share

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
