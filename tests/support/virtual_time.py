"""Runs a coroutine on an event loop whose clock moves instead of waiting: hours pass in a moment."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from sniffio import thread_local

Result = TypeVar("Result")


BUSY_ROUNDS_MAX = 100
"""Rounds of the loop without a wait after which time passes all the same: anyio repeats a cancellation in each round
until a shielded task ends, which may wait for a time-out."""


class VirtualSelector(selectors.SelectSelector):
    """Waiting takes no time; it moves the clock."""

    now = 0.0
    next_timer: Callable[[], float | None] = lambda self: None
    _busy = 0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        ready = super().select(0)
        self._busy = 0 if timeout or timeout is None else self._busy + 1
        if not ready and timeout:
            self.now += timeout
        elif self._busy > BUSY_ROUNDS_MAX:
            self._busy = 0
            self.now = max(self.now, self.next_timer() or self.now)
        return ready


def run_virtually(main: Callable[[], Coroutine[Any, Any, Result]]) -> Result:
    selector = VirtualSelector()

    class Loop(asyncio.SelectorEventLoop):
        def time(self) -> float:
            return selector.now

        def next_timer(self) -> float | None:
            timers: list[asyncio.TimerHandle] = self._scheduled  # type: ignore[attr-defined]
            return timers[0].when() if timers else None

    def make() -> Loop:
        loop = Loop(selector)
        selector.next_timer = loop.next_timer  # type: ignore[method-assign]
        return loop

    library, thread_local.name = thread_local.name, "asyncio"  # which anyio otherwise finds out in every call
    try:
        with asyncio.Runner(loop_factory=make) as runner:
            return runner.run(main())
    finally:
        thread_local.name = library
