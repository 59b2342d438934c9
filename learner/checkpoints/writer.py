"""Writes checkpoints during training.

*consumes* images of the trainer, one at a time; *produces* durable checkpoints, and reports each to the replay stage
only then; *waits for* an image; *unblocked by* the holder of the ``slot``. At most one write is under way and none is
queued: a caller that asks for the slot before the last checkpoint is durable waits.
"""

from __future__ import annotations

import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import anyio

from learner.checkpoints.checkpoint import CheckpointImage, write_image
from learner.metrics import LearnerMetrics
from pipeline.runtime.disk import when_room

log = logging.getLogger(__name__)


@dataclass
class CheckpointWriter:
    root: Path
    initial_model: Path
    keep: int
    durable: Callable[[int], Awaitable[None]]
    """Called with the updates of each checkpoint once it is on disk."""
    metrics: LearnerMetrics

    def __post_init__(self) -> None:
        self.writing: int | None = None
        """Updates of the checkpoint under way."""
        self.saved: dict[str, float] = {}
        """``updates`` of the last durable checkpoint, and the ``seconds`` of its write."""
        self.failure: Exception | None = None
        """The error that has ended :meth:`run`."""
        self.protected: frozenset[int] = frozenset()
        """Updates of checkpoints that are never pruned: under evaluation, or the best."""
        self._durable_at = 0.0
        self._image: CheckpointImage | None = None
        self._wake = anyio.Event()
        self._idle = anyio.Event()
        self._idle.set()

    async def run(self) -> None:
        """Write what is submitted, until cancelled; again while the disk is full. Raises :class:`OSError` or
        :class:`pipeline.errors.StoreError` when the disk does not take it."""
        while True:
            await self._wake.wait()
            self._wake = anyio.Event()
            image, self._image = self._image, None
            if image is None:
                continue
            start, updates = time.perf_counter(), image.updates
            write = partial(write_image, self.root, image, self.initial_model, self.keep, lambda: self.protected)
            what = f"the checkpoint of step {updates}"
            try:
                await when_room(write, self.root, what, image.n_bytes, abandon=True)
            except Exception as error:
                self.failure = error
                raise
            del image, write  # the next one is made before this line is reached again
            seconds = time.perf_counter() - start
            self.saved = {"updates": updates, "seconds": seconds}
            self.metrics.checkpoint_duration_seconds.observe(seconds)
            self._durable_at = time.monotonic()
            self.metrics.checkpoint_age_seconds.set_function(lambda: time.monotonic() - self._durable_at)
            log.info("checkpoint of %d updates is durable after %.1f s", updates, seconds)
            self.writing = None  # the next line wakes tasks that wait for this checkpoint
            await self.durable(updates)
            self._become_idle()

    @asynccontextmanager
    async def slot(self, updates: int) -> AsyncIterator[Callable[[CheckpointImage], None]]:
        """The slot for the checkpoint of ``updates`` updates, once no write is under way: inside, the image is taken
        and passed to the function that this yields. :meth:`idle` waits for that too: other ranks have begun to write by
        then. ``run`` must be running."""

        def submit(image: CheckpointImage) -> None:
            self._image = image
            self._wake.set()

        await self.idle()
        self._idle = anyio.Event()
        self.writing = updates
        try:
            yield submit
        finally:
            if self._image is None:
                self._become_idle()

    def _become_idle(self) -> None:
        self.writing = None
        self._idle.set()

    async def idle(self) -> None:
        """Wait until everything begun is durable and reported. Unbounded: the caller sets the bound."""
        while not self._idle.is_set():
            await self._idle.wait()
