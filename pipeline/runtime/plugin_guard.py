"""Whose code is running: what a plug-in's code started and left behind is cancelled, and what blocks is told apart.

A context variable says whose code is running; it is inherited by whatever that code starts. The event loop's task
factory (installed once, for a few hundred nanoseconds a task) notes new tasks with their owner.

Plug-in code that holds the event loop is told by name, and interrupted.

A plug-in may block where it should wait: ``time.sleep`` in an ``async def``, a lock, a request by a library that
knows no asyncio, an endless loop. Then no other episode goes on and no limit on time is looked at. A thread sees that
the loop does not come round, writes the stack of the main thread to the log, and sends the main thread a signal. Its
handler raises :class:`TimeoutError` inside the code that blocks, if that is a plug-in's
(:mod:`pipeline.runtime.plugin_guard`): its own episode or call fails, with a traceback that ends in the blocking
line, and all others go on. Code of a library in C that never returns to Python is not interrupted: the supervisor
ends the process when its heart stops.

What plug-ins print goes to the role's log, up to a bound: a plug-in that prints megabytes a step fills no disk.

Only what passes ``sys.stdout`` and ``sys.stderr`` is counted; the role's own log lines are not, and neither is what a
library in C writes to the file descriptors.
"""

from __future__ import annotations

import asyncio
import logging
import signal
import sys
import threading
import time
import traceback
import weakref
from collections.abc import Callable, Coroutine, Generator, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from types import FrameType
from typing import Any, TextIO

_OWNER: ContextVar[TaskOwner | None] = ContextVar("afterplay_owner_of_tasks", default=None)


@contextmanager
def kept_running() -> Iterator[None]:
    """What is started inside belongs to nobody and is not ended with an episode or a call: for a connection or a
    browser that a plug-in opens once, when it is first needed."""
    token = _OWNER.set(None)
    try:
        yield
    finally:
        _OWNER.reset(token)


def plug_in_runs() -> bool:
    """Whether the code of an environment, loop, tool or score function is running in this context."""
    return _OWNER.get() is not None


class TaskOwner:
    """The tasks of one owner that have not ended."""

    def __init__(self) -> None:
        self._tasks: weakref.WeakSet[asyncio.Task[Any]] | None = None

    @contextmanager
    def owning(self) -> Iterator[None]:
        """What is started inside belongs to this owner."""
        token = _OWNER.set(self)
        try:
            yield
        finally:
            _OWNER.reset(token)

    def add(self, task: asyncio.Task[Any]) -> None:
        if self._tasks is None:
            self._tasks = weakref.WeakSet()
        self._tasks.add(task)

    def cancel(self) -> int:
        """Cancel what is still running; how many that were."""
        running = [task for task in self._tasks or () if not task.done()]
        for task in running:
            task.cancel("what started this task has ended")
        return len(running)


def watch_tasks() -> None:
    """Note from now on who starts tasks on the running event loop. May be called again."""
    loop = asyncio.get_running_loop()
    before = loop.get_task_factory()
    if getattr(before, "afterplay_notes_owners", False):
        return

    def start(
        loop: asyncio.AbstractEventLoop, coroutine: Coroutine[Any, Any, Any] | Generator[Any, None, Any], **options: Any
    ) -> asyncio.Task[Any]:
        if before is None:
            task: Any = asyncio.Task(coroutine, loop=loop, **options)
        else:
            task = before(loop, coroutine, **options)
        owner = _OWNER.get()
        if owner is not None and isinstance(task, asyncio.Task):
            owner.add(task)
        return task  # type: ignore[no-any-return]

    start.afterplay_notes_owners = True  # type: ignore[attr-defined]
    loop.set_task_factory(start)


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
    watch = LoopWatchdog(seconds_max)
    previous = signal.signal(SIGNAL, watch.interrupt)
    watch.start()
    try:
        yield
    finally:
        watch.stop()
        signal.signal(SIGNAL, previous)


class LoopWatchdog:
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


CHARACTERS_MAX = 1_000_000
WINDOW_SECONDS = 60.0
"""So many characters pass in so much time."""


class BoundedOutput:
    """A text stream that lets through ``characters_max`` in each ``window_seconds``, and says how much it left out."""

    def __init__(
        self, stream: TextIO, characters_max: int, window_seconds: float, now: Callable[[], float] = time.monotonic
    ) -> None:
        self._stream = stream
        self._characters_max = characters_max
        self._window_seconds = window_seconds
        self._now = now
        self._since = now()
        self._room = characters_max
        self._left_out = 0

    def write(self, text: str) -> int:
        if self._now() - self._since > self._window_seconds:
            self.tell()
            self._since, self._room = self._now(), self._characters_max
        shown = text[: self._room]
        self._room -= len(shown)
        if shown:
            self._stream.write(shown)
        if len(shown) < len(text) and not self._left_out:
            self._stream.write(f"\n... more than {self._characters_max} characters were printed: more is left out\n")
            self._stream.flush()
        self._left_out += len(text) - len(shown)
        return len(text)

    def tell(self) -> None:
        """How much was left out since the last time."""
        if self._left_out:
            self._stream.write(f"... {self._left_out} characters of prints were left out\n")
            self._left_out = 0

    def writelines(self, lines: Iterator[str]) -> None:
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


@contextmanager
def bounded_prints(characters_max: int = CHARACTERS_MAX, window_seconds: float = WINDOW_SECONDS) -> Iterator[None]:
    """Bound what is printed inside, on stdout and stderr each."""
    before = sys.stdout, sys.stderr
    bounded = [BoundedOutput(stream, characters_max, window_seconds) for stream in before]
    sys.stdout, sys.stderr = bounded
    try:
        yield
    finally:
        sys.stdout, sys.stderr = before
        for stream in bounded:
            stream.tell()
