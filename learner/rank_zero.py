"""Rank 0's care for the others: start them where nobody has, show them life, notice a loss, send them home.

*consumes* ends of children and errors of connections; *produces* beats, and :class:`TrainingError` for the role when a
rank is lost; *waits for* nothing else. A rank that is lost ends the learner within ``LOSS_SECONDS``: the supervisor
starts it again, and all ranks go on from the newest checkpoint.
"""

from __future__ import annotations

import asyncio
import logging
import os
import threading
from datetime import timedelta

import anyio
import anyio.to_thread
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from learner.distributed.collectives import Place, RankGroup, join, leave, place_of
from learner.distributed.ranks import BEAT_SECONDS
from pipeline.config import RunConfig
from pipeline.errors import TrainingError
from pipeline.runtime.children import RankProcesses
from pipeline.runtime.process import ExitCode

log = logging.getLogger(__name__)
LOSS_SECONDS = 15.0
"""After a loss, before the process is ended by force: training may be stuck in a collective."""
REAP_SECONDS = 1.0
"""Between the end of a child's connections and the end of the child."""


class RankZero:
    """Rank 0 of several. Made by :meth:`begin`; :meth:`end` must be called."""

    def __init__(self, config: RunConfig, place: Place) -> None:
        self._children: RankProcesses | None = None
        self._loss = ""
        self._lost = anyio.Event()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._guard = threading.Lock()
        self._force_later: threading.Timer | None = None
        store = None
        if place.size == 1:
            place = Place(0, config.learner.ranks)
            timeout = timedelta(seconds=config.learner.ranks_timeout_seconds)
            store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timeout)
            self._children = RankProcesses(config, store.port, self._note)
            self._children.start()
        try:
            device = join(place, config.learner, store)
            self.group = RankGroup(device, threading.Event(), config.learner.ranks_timeout_seconds)
        except BaseException:
            self._close(asked=False)
            raise
        log.info("rank 0 of %d on %s", place.size, device)

    @classmethod
    def begin(cls, config: RunConfig) -> RankZero | None:
        """None for a learner of one process. Blocks until all ranks are there."""
        place = place_of(config.learner)
        return cls(config, place) if max(place.size, config.learner.ranks) > 1 else None

    async def watch(self) -> None:
        """Beat until cancelled. Raises :class:`TrainingError` when a rank is lost."""
        self._loop = asyncio.get_running_loop()
        while not self._loss:
            with anyio.move_on_after(BEAT_SECONDS):
                await self._lost.wait()
                break
            try:
                await anyio.to_thread.run_sync(self.group.beat)
            except RuntimeError as error:
                self._note(self._gone(REAP_SECONDS) or f"a rank does not answer: {error}")
        raise TrainingError(self._words(self._loss))

    def end(self) -> None:
        """Send the others home, and wait for them a bounded time. Blocks."""
        gone = self._gone() or self._loss
        if not gone:
            try:
                self.group.end()
            except RuntimeError as error:
                gone = self._gone(REAP_SECONDS) or f"a rank does not answer: {error}"
        if gone:
            log.error("%s", self._words(gone))
        self._close(asked=not gone)

    def _gone(self, wait_seconds: float = 0.0) -> str:
        return "" if self._children is None else self._children.gone(wait_seconds)

    def _close(self, *, asked: bool) -> None:
        if self._force_later is not None:
            self._force_later.cancel()
        if self._children is not None:
            self._children.close(asked=asked)
        leave()

    def _note(self, loss: str) -> None:
        """In any thread."""
        with self._guard:
            if self._loss:
                return
            self._loss = loss
            self._force_later = threading.Timer(LOSS_SECONDS, self._force)
            self._force_later.daemon = True
            self._force_later.start()
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._lost.set)

    def _words(self, loss: str) -> str:
        return (
            f"the learner has lost a rank: {loss}. All ranks end; started again, the learner goes on "
            "from its newest checkpoint"
        )

    def _force(self) -> None:
        os.write(2, f"learner: {self._words(self._loss)} (training was stuck for {LOSS_SECONDS:g} s)\n".encode())
        os._exit(ExitCode.FAILED)
