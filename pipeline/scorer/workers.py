"""Worker processes for score functions: how many there may be, and that starting one is not a function's time."""

from __future__ import annotations

import importlib
import logging
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any, TypeVar

import anyio
import anyio.to_process

from pipeline.scorer.conversation import resolve

log = logging.getLogger("afterplay.scorer")

START_SECONDS_MAX = 180.0
"""For a process to start and import what it needs: long, because a start that is given up begins from nothing."""
IDLE_SECONDS_MAX = 240.0
"""anyio ends processes that are idle for five minutes."""
_NO_LIMIT = float("inf")

T = TypeVar("T")


class Workers:
    """At most ``n`` calls at once, each in a process of anyio's pool. A call that is cancelled ends its process."""

    def __init__(self, n: int) -> None:
        self._slots = anyio.CapacityLimiter(n)
        self._unlimited = anyio.CapacityLimiter(_NO_LIMIT)
        self._idle_since: list[float] = []
        """Time of last use of each process that has started, seconds of the monotonic clock."""

    @asynccontextmanager
    async def slot(self, path: str, needs: str | None = None) -> AsyncIterator[None]:
        """Wait for a slot, and for a process that has imported the function at ``path`` and the module ``needs``
        (unless it has served another function before). Inside, :meth:`run` may be called once."""
        async with self._slots:
            idle = self._idle_since.pop() if self._idle_since else None
            if idle is None or time.monotonic() - idle > IDLE_SECONDS_MAX:
                self._idle_since.clear()
                with anyio.move_on_after(START_SECONDS_MAX):
                    await anyio.to_process.run_sync(warm_up, path, needs, cancellable=True, limiter=self._unlimited)
            yield

    async def run(self, function: Callable[..., T], *args: Any) -> T:
        """``function(*args)`` in the process. Raises :class:`anyio.BrokenWorkerProcess` when that dies."""
        value = await anyio.to_process.run_sync(function, *args, cancellable=True, limiter=self._unlimited)
        self._idle_since.append(time.monotonic())
        return value


def warm_up(path: str, needs: str | None) -> None:
    """Runs in a new process. What fails here fails again, and is reported, when the function is called."""
    try:
        importlib.import_module("pipeline.scorer.functions")
        resolve(path)
        if needs is not None:
            importlib.import_module(needs)
    except Exception as error:
        log.debug("warming a worker up: %r", error)
