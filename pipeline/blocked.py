"""Plug-in code that holds the event loop is told by name, and interrupted.

A plug-in may block where it should wait: ``time.sleep`` in an ``async def``, a lock, a request by a library that knows
no asyncio, an endless loop. Then no other episode goes on and no limit on time is looked at. A thread sees that the
loop does not come round, writes the stack of the main thread to the log, and sends the main thread a signal. Its
handler raises :class:`TimeoutError` inside the code that blocks, if that is a plug-in's (:mod:`pipeline.owned`): its
own episode or call fails, with a traceback that ends in the blocking line, and all others go on. Code of a library in C
that never returns to Python is not interrupted: the supervisor ends the process when its heart stops."""

from __future__ import annotations

import asyncio
import logging
import signal
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from pipeline.owned import plug_in_runs

logger = logging.getLogger(__name__)

SIGNAL = signal.SIGVTALRM
"""Rarely used by others: SIGALRM is, by libraries with time limits of their own."""
TICKS = 8
"""Times that loop and thread look at the clock within the limit."""
STACK_FRAMES_MAX = 40
BLOCKED_SECONDS_MAX = 30.0
"""Half of what makes the supervisor think that a process is stuck."""


@contextmanager
def interrupting_blocks(seconds_max: float = BLOCKED_SECONDS_MAX) -> Iterator[None]:
    """Inside, plug-in code that holds the running event loop for more than ``seconds_max`` is interrupted, again and
    again if it does not give up. Only the main thread's loop can be watched: elsewhere nothing happens."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    watch = _Watch(seconds_max)
    previous = signal.signal(SIGNAL, watch.interrupt)
    watch.start()
    try:
        yield
    finally:
        watch.stop()
        signal.signal(SIGNAL, previous)


class _Watch:
    def __init__(self, seconds_max: float) -> None:
        self._seconds_max = seconds_max
        self._loop = asyncio.get_running_loop()
        self._came_round_at = self._told_at = time.monotonic()
        self._timer: asyncio.TimerHandle | None = None
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True, name="blocked-loop")

    def start(self) -> None:
        self._tick()
        self._thread.start()

    def stop(self) -> None:
        self._stopped.set()
        self._thread.join()
        if self._timer is not None:
            self._timer.cancel()

    def interrupt(self, number: int, frame: FrameType | None) -> None:
        """Runs in the main thread, in the middle of whatever holds the loop."""
        if time.monotonic() - self._came_round_at > self._seconds_max and plug_in_runs():
            raise TimeoutError(
                f"it held the event loop for {self._seconds_max:g} s, so that nothing else could go on, and was "
                "interrupted: await what takes long, or make it a plain def that runs in a thread (blocking: true)"
            )

    def _tick(self) -> None:
        self._came_round_at = time.monotonic()
        self._timer = self._loop.call_later(self._seconds_max / TICKS, self._tick)

    def _look(self) -> None:
        while not self._stopped.wait(self._seconds_max / TICKS):
            blocked_for = time.monotonic() - self._came_round_at
            if blocked_for <= self._seconds_max or time.monotonic() - self._told_at <= self._seconds_max:
                continue
            self._told_at = time.monotonic()
            frame = sys._current_frames().get(threading.main_thread().ident or 0)
            stack = "".join(traceback.format_stack(frame, STACK_FRAMES_MAX)) if frame is not None else ""
            logger.error("the event loop has not come round for %.1f s; it is held here:\n%s", blocked_for, stack)
            signal.pthread_kill(threading.main_thread().ident or 0, SIGNAL)
