"""Guards around plug-in code: they bound the tasks and threads that it leaves running, the time for which it blocks the
event loop, and its output.

:class:`TaskOwner` cancels tasks that plug-in code started and left running. A context variable names the owner and is
inherited by whatever that code starts; the event loop's task factory (installed once, a few hundred nanoseconds a task)
registers each new task with it.

:class:`LoopWatchdog` interrupts plug-in code that holds the event loop: ``time.sleep`` in an ``async def``, a lock, a
synchronous HTTP request, an endless loop. Meanwhile no other episode makes progress and no time limit is checked. A
thread notices that the loop does not iterate, writes the stack of the main thread to the log, and sends that thread a
signal. The handler raises :class:`TimeoutError` inside the blocking code if it is a plug-in's: its episode or call
fails, with a traceback that ends in the blocking line, and all others continue. C code that never returns to Python is
not interrupted: the process is ended and started again when it makes no progress.

:class:`BlockingCalls` runs plain functions in threads. anyio's worker threads are joined at exit, so one call that
hangs would keep the process alive, and an abandoned call frees its slot at once, so hung calls would pile up.
The threads here are daemons. None can be ended: the slot of a call that hangs is given to another, up to a bound.

:class:`BoundedOutput` limits how much plug-ins print to the role's log. Only what passes ``sys.stdout`` and
``sys.stderr`` is counted, not the role's own log lines or what C code writes to the file descriptors.
"""

from __future__ import annotations

import asyncio
import logging
import math
import signal
import sys
import threading
import time
import traceback
import weakref
from collections.abc import Callable, Coroutine, Generator, Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from functools import partial
from types import FrameType
from typing import Any, TextIO, TypeVar

from pipeline.errors import failure_of, is_failure, is_ours, line_among

T = TypeVar("T")
_OWNER: ContextVar[TaskOwner | None] = ContextVar("afterplay_owner_of_tasks", default=None)


class kept_running:
    """Tasks started inside have no owner and survive the episode or call: for a connection or a browser that a plug-in
    opens once, when it is first needed."""

    __slots__ = ("_token",)

    def __enter__(self) -> None:
        self._token = _OWNER.set(None)

    def __exit__(self, *error: object) -> None:
        _OWNER.reset(self._token)


class TaskOwner:
    """The tasks of one owner that have not ended."""

    def __init__(self) -> None:
        self._tasks: weakref.WeakSet[asyncio.Task[Any]] | None = None

    @contextmanager
    def owning(self) -> Iterator[None]:
        """Tasks started inside belong to this owner."""
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
        """Cancel the tasks that are still running; returns how many."""
        running = [task for task in self._tasks or () if not task.done()]
        for task in running:
            task.cancel("the episode or call that started this task has ended")
        return len(running)


def watch_tasks() -> None:
    """Register tasks of the running event loop with their owners from now on. May be called again."""
    loop = asyncio.get_running_loop()
    before = loop.get_task_factory()
    if getattr(before, "afterplay_notes_owners", False):
        return

    def start(
        loop: asyncio.AbstractEventLoop, coroutine: Coroutine[Any, Any, Any] | Generator[Any, None, Any], **options: Any
    ) -> asyncio.Task[Any]:
        owner = _OWNER.get()
        if owner is not None and isinstance(coroutine, Coroutine):
            code = getattr(coroutine, "cr_code", None)
            if code is None or not is_ours(code.co_filename):  # ours guard what they call
                coroutine = _WithoutExit(coroutine)
        if before is None:
            task: Any = asyncio.Task(coroutine, loop=loop, **options)
        else:
            task = before(loop, coroutine, **options)
        if owner is not None and isinstance(task, asyncio.Task):
            owner.add(task)
        return task  # type: ignore[no-any-return]

    start.afterplay_notes_owners = True  # type: ignore[attr-defined]
    loop.set_task_factory(start)


class _WithoutExit(Coroutine[Any, Any, Any]):
    """A coroutine in which what asyncio would take for the end of the process, and raise out of its event loop, is an
    ordinary failure."""

    def __init__(self, coroutine: Coroutine[Any, Any, Any]) -> None:
        self._coroutine = coroutine

    def send(self, value: Any) -> Any:
        return self._step(self._coroutine.send, value)

    def throw(self, *error: Any) -> Any:
        return self._step(self._coroutine.throw, *error)

    def _step(self, step: Callable[..., Any], *args: Any) -> Any:
        try:
            return step(*args)
        except (SystemExit, KeyboardInterrupt, GeneratorExit) as error:
            if not is_failure(error):
                raise
            raise failure_of("", error) from error

    def close(self) -> None:
        self._coroutine.close()

    def __await__(self) -> Generator[Any, Any, Any]:
        return self._coroutine.__await__()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._coroutine, name)


def called(function: Callable[..., T], *args: Any, **options: Any) -> T:
    """``function(*args, **options)``, for a thread. What would mean something else to who awaits it (``sys.exit``, a
    ``StopIteration``) is an ordinary failure."""
    try:
        return function(*args, **options)
    except BaseException as error:
        if isinstance(error, Exception) and not isinstance(error, StopIteration):
            raise
        raise failure_of("", error) from error


log = logging.getLogger(__name__)

SIGNAL = signal.SIGVTALRM
"""Rarely used by libraries; SIGALRM often is, for time limits of their own."""
TICKS = 8
"""Checks of the clock, by loop and thread, within the limit."""
STACK_FRAMES_MAX = 40
BLOCKED_SECONDS_MAX = 30.0
"""A quarter of the time without progress after which a process counts as stuck."""


@contextmanager
def interrupting_blocks(seconds_max: float = BLOCKED_SECONDS_MAX, stacks: bool = True) -> Iterator[None]:
    """Interrupt plug-in code inside that holds the running event loop for more than ``seconds_max``, repeatedly if it
    continues. ``stacks``: the log gets the stack of each. Only the main thread's loop can be watched; in other threads
    this does nothing."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    watch = LoopWatchdog(seconds_max, stacks)
    try:
        yield
    finally:
        watch.stop()


class LoopWatchdog:
    """Watches the event loop of the main thread until :meth:`stop`. Created in that thread."""

    def __init__(self, seconds_max: float, stacks: bool) -> None:
        self._seconds_max = seconds_max
        self._stacks = stacks
        self._loop = asyncio.get_running_loop()
        self._reported_at = time.monotonic()
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True, name="blocked-loop")
        self._previous = signal.signal(SIGNAL, self._interrupt)
        self._tick()
        self._thread.start()

    def stop(self) -> None:
        self._stopped.set()
        self._thread.join()
        self._timer.cancel()
        signal.signal(SIGNAL, self._previous)

    def _interrupt(self, number: int, frame: FrameType | None) -> None:
        """Signal handler: runs in the main thread, inside whatever holds the loop."""
        a_plug_in_runs = _OWNER.get() is not None
        if time.monotonic() - self._ticked_at > self._seconds_max and a_plug_in_runs:
            raise TimeoutError(
                f"it held the event loop for {self._seconds_max:g} s, which blocks all other episodes, and was "
                "interrupted: await slow operations, or make it a plain def that runs in a thread (blocking: true)"
            )

    def _tick(self) -> None:
        self._ticked_at = time.monotonic()
        self._timer = self._loop.call_later(self._seconds_max / TICKS, self._tick)

    def _look(self) -> None:
        while not self._stopped.wait(self._seconds_max / TICKS):
            blocked_for = time.monotonic() - self._ticked_at
            if blocked_for <= self._seconds_max or time.monotonic() - self._reported_at <= self._seconds_max:
                continue
            self._reported_at = time.monotonic()
            frame = sys._current_frames().get(threading.main_thread().ident or 0)
            if self._stacks and frame is not None:
                stack = "".join(traceback.format_stack(frame, STACK_FRAMES_MAX))
                log.error("the event loop has been blocked for %.1f s, here:\n%s", blocked_for, stack)
            signal.pthread_kill(threading.main_thread().ident or 0, SIGNAL)


HUNG_MIN, HUNG_MAX = 4, 256
"""Bounds of the number of hung calls whose slots are given to others; between them it is that of the slots."""
GRACE_SECONDS = 5.0
"""A call that nobody waits for any more may take so long to end, where it is within its time limit."""


class BlockingCalls:
    """At most ``threads_max`` calls at once; others wait their turn (and are cancelled cleanly).

    A call *hangs* when nobody waits for it any more and it has not returned ``seconds_max`` after its start. Its slot
    is free again, until ``hung_max`` calls hang."""

    def __init__(self, threads_max: int, seconds_max: float = math.inf) -> None:
        self._slots = asyncio.Semaphore(threads_max)
        self._seconds_max = seconds_max
        self._hung: set[_CallThread] = set()
        self.hung_max = min(max(threads_max, HUNG_MIN), HUNG_MAX)

    @property
    def hung(self) -> int:
        """Calls that hang now."""
        return len(self._hung)

    @property
    def exhausted(self) -> bool:
        """True if no further slot is freed: the process should be started again."""
        return len(self._hung) >= self.hung_max

    def hung_at(self) -> str:
        """The line of the user's code in which a call hangs (:func:`line_among`); empty where none is found."""
        frames = sys._current_frames()
        found = (frames[thread.ident] for thread in self._hung if thread.ident in frames)
        return next((line for frame in found if (line := line_among(traceback.extract_stack(frame)))), "")

    async def run(
        self,
        function: Callable[..., T],
        *args: Any,
        begun: Callable[[], object] | None = None,
        late: Callable[[T], object] | None = None,
    ) -> T:
        """Call ``function`` in a thread of its own; ``begun`` is called when it has one. Cancelling leaves the call
        behind; ``late`` then gets what it returns in the end, in a thread."""
        await self._slots.acquire()
        try:
            if begun is not None:
                begun()
            thread = _CallThread(function, args, late, self._ended)
            thread.start()
        except BaseException:
            self._slots.release()
            raise
        try:
            return await thread.future  # type: ignore[no-any-return]
        except asyncio.CancelledError:
            thread.abandoned = True
            if thread.ended:
                thread.leave()
            else:
                left = max(GRACE_SECONDS, self._seconds_max - (time.monotonic() - thread.started_at))
                if math.isfinite(left):
                    thread.timer = asyncio.get_running_loop().call_later(left, self._hangs, thread)
            raise

    def _hangs(self, thread: _CallThread) -> None:
        if not self.exhausted:
            self._hung.add(thread)
            self._slots.release()

    def _ended(self, thread: _CallThread) -> None:
        if thread.timer is not None:
            thread.timer.cancel()
        if thread in self._hung:
            self._hung.remove(thread)
        else:
            self._slots.release()


class _CallThread(threading.Thread):
    """One call. ``ended`` is called in the event loop when it has ended, however late."""

    def __init__(
        self, function: Callable[..., Any], args: tuple[Any, ...], late: Callable[[Any], object] | None,
        ended: Callable[[_CallThread], None],
    ) -> None:  # fmt: skip
        super().__init__(daemon=True, name="plug-in")
        self._call, self._late, self._on_end = (function, args), late, ended
        self._loop = asyncio.get_running_loop()
        self.future: asyncio.Future[Any] = self._loop.create_future()
        self.started_at = time.monotonic()
        self.abandoned = self.ended = False
        self.timer: asyncio.TimerHandle | None = None
        self._rest: Callable[[], object] | None = None
        """Gives what was returned to ``late``, once."""

    def run(self) -> None:
        failure: Exception | None = None
        function, args = self._call
        try:
            value = called(function, *args)
            if self._late is not None and self.abandoned:
                called(self._late, value)
            elif self._late is not None:
                self._rest = partial(called, self._late, value)
        except Exception as error:
            value, failure = None, error
        try:
            self._loop.call_soon_threadsafe(self._settle, value, failure)
        except RuntimeError:
            return  # the loop is closed: nobody waits for this any more

    def leave(self) -> None:
        """Nobody takes what the call has returned: it was given up between its end and that. In the event loop."""
        rest, self._rest = self._rest, None
        if rest is not None:
            threading.Thread(target=rest, daemon=True, name="plug-in").start()

    def _settle(self, value: Any, error: BaseException | None) -> None:
        self.ended = True
        self._on_end(self)
        if self.future.done():
            self.leave()
        elif error is not None:
            self.future.set_exception(error)
        else:
            self.future.set_result(value)


CHARACTERS_MAX = 1_000_000
WINDOW_SECONDS = 60.0
"""``CHARACTERS_MAX`` characters pass in each window."""


class BoundedOutput:
    """Text stream that passes ``characters_max`` in each ``WINDOW_SECONDS``, and reports how much it dropped."""

    def __init__(self, stream: TextIO, characters_max: int) -> None:
        self._stream, self._characters_max = stream, characters_max
        self._since, self._room, self._dropped = time.monotonic(), characters_max, 0

    def write(self, text: str) -> int:
        if time.monotonic() - self._since > WINDOW_SECONDS:
            self.report_dropped()
            self._since, self._room = time.monotonic(), self._characters_max
        shown = text[: self._room]
        self._room -= len(shown)
        if shown:
            self._write(shown)
        if len(shown) < len(text) and not self._dropped:
            self._write(f"\n... more than {self._characters_max} characters were printed: the rest is dropped\n")
            self.flush()
        self._dropped += len(text) - len(shown)
        return len(text)

    def report_dropped(self) -> None:
        """Write how much was dropped since the last report."""
        if self._dropped:
            self._write(f"... {self._dropped} characters of prints were dropped\n")
            self._dropped = 0

    def writelines(self, lines: Iterator[str]) -> None:
        for line in lines:
            self.write(line)

    def flush(self) -> None:
        with suppress(OSError):
            self._stream.flush()

    def _write(self, text: str) -> None:
        """Write, unless the disk of the log is full: a print never fails."""
        with suppress(OSError):
            self._stream.write(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


@contextmanager
def bounded_prints(characters_max: int = CHARACTERS_MAX) -> Iterator[None]:
    """Limit what is printed inside, separately for stdout and stderr."""
    before = sys.stdout, sys.stderr
    bounded = [BoundedOutput(stream, characters_max) for stream in before]
    sys.stdout, sys.stderr = bounded
    try:
        yield
    finally:
        sys.stdout, sys.stderr = before
        for stream in bounded:
            stream.report_dropped()
