"""Calls of user functions: awaited, in a thread, or in a worker process; always with a limit on their time.

A call returns a number or a :class:`ScoreFailure` for each trajectory; errors of user code are never raised. A
coroutine that blocks the event loop for long is reported with a warning.
"""

from __future__ import annotations

import copy
import importlib
import inspect
import logging
import math
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Generator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from numbers import Real
from typing import Any, Generic, NamedTuple, TypeVar

import anyio
import anyio.to_process

from pipeline.config.rewards import ScoreFunction
from pipeline.errors import (
    AfterplayError,
    ConfigurationError,
    PlugInError,
    boundary,
    described,
    failure_of,
    is_failure,
)
from pipeline.runtime.plugin_limits import BlockingCalls, TaskOwner, watch_tasks
from pipeline.runtime.plugins import UserFunction, load_main, resolve
from pipeline.schema import Trajectory
from pipeline.schema.codec import decode_trajectory, encode_trajectory
from pipeline.scorer.graders import BUILT_IN
from pipeline.scorer.verdict import ScoreFailure

T = TypeVar("T")

log = logging.getLogger(__name__)

START_SECONDS_MAX = 180.0
"""For a process to start and import what it needs: long, because a start that is given up begins from nothing."""
IDLE_SECONDS_MAX = 240.0
"""anyio ends processes that are idle for five minutes."""
TRAJECTORY_HINT = (
    "; it gets a Trajectory, not prompts and completions, and afterplay.reply(trajectory) is the last reply"
)

_NO_LIMIT = float("inf")


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
    """Runs in a new process, which imports this module with it. What fails here fails again, and is reported, when the
    function is called."""
    try:
        _function(path)
        if needs is not None:
            importlib.import_module(needs)
    except Exception as error:
        log.debug("warming a worker up: %r", error)


class Steps(Generic[T]):
    """``await Steps(coroutine, held)`` is ``await coroutine``; ``held`` gets the seconds of each step."""

    def __init__(self, coroutine: Coroutine[Any, Any, T], held: Callable[[float], None]) -> None:
        self._coroutine, self._held = coroutine, held

    def __await__(self) -> Generator[Any, Any, T]:
        step: Callable[[], Any] = partial(self._coroutine.send, None)
        while True:
            started = time.perf_counter()
            try:
                waits_for = step()
            except StopIteration as end:
                return end.value  # type: ignore[no-any-return]
            finally:
                self._held(time.perf_counter() - started)
            try:
                sent = yield waits_for
            except BaseException as error:
                step = partial(self._coroutine.throw, error)
            else:
                step = partial(self._coroutine.send, sent)


HUNG_MAX = 4
"""Calls of a function that may hang in threads, which cannot be ended. Then it runs in worker processes, which can."""
HELD_SECONDS_MAX = 0.25
"""An async function that holds the loop for longer is warned about, once."""

Outcome = float | ScoreFailure
InThread = Callable[[Callable[[], object]], Awaitable[object]]
"""Calls a function in a thread and waits for it."""


class _TookTooLong(Exception):
    """The function exceeded its time limit. A ``TimeoutError`` that it raises itself is an ordinary error."""


class Call:
    """One function of the run file. Raises :class:`ConfigurationError` when its path does not lead to one, or it does
    not take its options."""

    def __init__(self, section: ScoreFunction, threads_max: int, workers: Workers) -> None:
        self.name = section.known_as
        self._timeout_seconds = section.timeout_seconds
        self._options = dict(section.options)
        self._per = section.per
        grader = BUILT_IN.get(section.path)
        if grader is None and ":" not in section.path:
            raise ConfigurationError(
                f"scorer.functions: expected one of the graders {', '.join(BUILT_IN)}, or your own function as "
                f"module:function or file.py:function, got {section.path!r}"
            )
        self._path = section.path
        self._needs = grader.needs if grader else None
        self._worker = section.worker if section.worker is not None else grader is not None and grader.worker
        if grader is not None:
            grader.check(self.name)
        self._function = _function(self._path)
        _check_options(self.name, self._function, self._options)
        self._async = inspect.iscoroutinefunction(self._function)
        self._threads = BlockingCalls(threads_max, self._timeout_seconds)
        self._workers = workers
        self._warned_held = False

    async def one(self, trajectory: Trajectory) -> Outcome:
        """The function's number, or why there is none."""
        value = await self._limited(trajectory, trajectory.trajectory_id)
        return (
            value if isinstance(value, ScoreFailure) else self._logged(self._checked(value), trajectory.trajectory_id)
        )

    async def tried(self, trajectory: Trajectory, in_thread: InThread, *, worker: bool = False) -> Outcome:
        """The outcome of a call that nobody logs and that has no limit on its time, in this process or in a worker. A
        function of several trajectories gets this one twice."""
        what = trajectory if self._per == "trajectory" else [trajectory] * 2
        try:
            with boundary(self.name):
                if worker:
                    async with self._workers.slot(self._path, self._needs):
                        value = await self._in_worker(what)
                else:
                    value = await self._here(what, in_thread)
        except AfterplayError as error:
            return self._raised(failure_of(self.name, error))
        if isinstance(value, ScoreFailure):
            return value
        if self._per == "trajectory":
            return self._checked(value)
        outcomes = self._listed(value, 2)
        if isinstance(outcomes, ScoreFailure):
            return outcomes
        return next((outcome for outcome in outcomes if isinstance(outcome, ScoreFailure)), outcomes[0])

    async def many(self, trajectories: Sequence[Trajectory]) -> list[Outcome]:
        """A function of several trajectories: a number for each, or why there is none."""
        n, first = len(trajectories), trajectories[0].trajectory_id
        values = await self._limited(list(trajectories), f"{first} and {n - 1} more")
        if isinstance(values, ScoreFailure):
            return [values] * n
        outcomes = self._listed(values, n)
        if isinstance(outcomes, ScoreFailure):
            return [self._logged(outcomes, first)] * n
        return [self._logged(o, t.trajectory_id) for o, t in zip(outcomes, trajectories, strict=True)]

    def _listed(self, values: object, n: int) -> list[Outcome] | ScoreFailure:
        """An outcome for each of ``n`` trajectories, or why the values are none."""
        listed = values.tolist() if hasattr(values, "tolist") else values
        if isinstance(listed, str | bytes) or not isinstance(listed, Sequence):
            return self._wrong(f"a list of {n} numbers", values)
        if len(listed) != n:
            return self._wrong(f"a list of {n} numbers", f"{len(listed)} of them")
        return [self._checked(value) for value in listed]

    async def _limited(self, what: Trajectory | list[Trajectory], which: str) -> object:
        self._leave_threads()
        try:
            if self._worker:
                async with self._workers.slot(self._path, self._needs):
                    value = await self._in_time(what)
            else:
                value = await self._in_time(what)
            return self._logged(value, which) if isinstance(value, ScoreFailure) else value
        except _TookTooLong:
            failure = ScoreFailure(self.name, "timeout", f"no answer within {self._timeout_seconds} s")
        except anyio.BrokenWorkerProcess:
            failure = ScoreFailure(self.name, "crashed", "its worker process died")
        except BaseException as error:
            if not is_failure(error):
                raise
            failure = self._raised(failure_of(self.name, error))
        return self._logged(failure, which)

    def _raised(self, error: PlugInError) -> ScoreFailure:
        return ScoreFailure(self.name, "raised", described(error), error.kind, error.details)

    async def _in_time(self, what: Trajectory | list[Trajectory]) -> object:
        with anyio.move_on_after(self._timeout_seconds):
            return await (self._in_worker(what) if self._worker else self._here(what, self._threads.run))
        raise _TookTooLong

    async def _in_worker(self, what: Trajectory | list[Trajectory]) -> object:
        """Call the function in the process whose slot is held."""
        many = isinstance(what, list)
        every = [tuple(bytes(f) for f in encode_trajectory(t)) for t in (what if isinstance(what, list) else [what])]
        value = await self._workers.run(call_in_worker, self._path, every, many, self._options)
        return self._raised(PlugInError(self.name, *value)) if isinstance(value, _Raised) else value

    async def _here(self, what: Trajectory | list[Trajectory], in_thread: InThread) -> object:
        """Call the function in this process."""
        what = [_copy(t) for t in what] if isinstance(what, list) else _copy(what)
        if self._async:
            return await self._awaited(what)
        return await in_thread(partial(self._function, what, **self._options))

    async def _awaited(self, what: Trajectory | list[Trajectory]) -> object:
        """Tasks that it leaves running are cancelled."""
        watch_tasks()
        started = TaskOwner()
        try:
            with started.owning():
                return await Steps(self._function(what, **self._options), self._held)
        finally:
            if leaked := started.cancel():
                log.warning("score function %s left %d tasks running; they were cancelled", self.name, leaked)

    def _held(self, seconds: float) -> None:
        """An ``async def`` runs on the stage's own loop, which nothing else can use meanwhile."""
        if seconds > HELD_SECONDS_MAX and not self._warned_held:
            self._warned_held = True
            log.warning(
                "%s blocked the event loop of the replay stage for %.1f s: await slow operations, make it a plain def, "
                "or set worker: true for it", self.name, seconds,
            )  # fmt: skip

    def _leave_threads(self) -> None:
        """Run the function in worker processes from now on, if too many of its calls hang in threads."""
        if not self._worker and self._threads.hung >= HUNG_MAX:
            self._worker = True
            line = self._threads.hung_at()
            log.warning(
                "score function %s: %d calls hang in threads, which cannot be ended%s. From now on it runs in a worker "
                "process, where a call that hangs is ended: give what blocks a time limit of its own, or set worker: "
                "true for it", self.name, self._threads.hung, f" ({line})" if line else "",
            )  # fmt: skip

    def _checked(self, value: object) -> Outcome:
        if isinstance(value, ScoreFailure):
            return value
        if value is None:
            return ScoreFailure(self.name, "missing", "it returned None")
        if not isinstance(value, Real):
            return self._wrong("a number or None", value)
        try:
            number = float(value)
        except Exception:
            return self._wrong("a number or None", value)
        return number if math.isfinite(number) else ScoreFailure(self.name, "nonfinite", f"it returned {number}")

    def _wrong(self, expected: str, came: object) -> ScoreFailure:
        return ScoreFailure(self.name, "type", f"expected {expected}, got {type(came).__name__}: {str(came)[:200]}")

    def _logged(self, outcome: Any, which: str) -> Any:
        """The same, logged if it is a failure."""
        if isinstance(outcome, ScoreFailure):
            log.warning(
                "score function %s, trajectory %s: %s: %s%s%s", self.name, which, outcome.reason, outcome.details,
                "\n" if outcome.traceback else "", outcome.traceback,
            )  # fmt: skip
        return outcome


class _Raised(NamedTuple):
    """Error of a function in a worker process, in the order of :class:`PlugInError`."""

    kind: str
    message: str
    details: str
    line: str


def call_in_worker(path: str, every: list[tuple[bytes, ...]], many: bool, options: Mapping[str, Any]) -> object:
    """Runs in the worker process: what the function gave, or what it raised, safe to send back."""
    try:
        function = _function(path)
        trajectories = [decode_trajectory(frames) for frames in every]
        value = function(trajectories if many else trajectories[0], **options)
        if inspect.iscoroutine(value):
            import asyncio

            value = asyncio.run(value)
        if many and hasattr(value, "tolist"):
            value = value.tolist()
        if many and isinstance(value, Sequence) and not isinstance(value, str | bytes):
            return [_plain(v) for v in value]
        return _plain(value)
    except BaseException as error:
        if not is_failure(error):
            raise
        failure = failure_of(path, error)
        return _Raised(failure.kind, failure.message, failure.details, failure.line)


def _function(path: str) -> UserFunction:
    """A built-in grader by its name, or the user's own."""
    return load_main(BUILT_IN[path].path) if path in BUILT_IN else resolve(path)


def _copy(trajectory: Trajectory) -> Trajectory:
    """Copy that a function may change without changing what is stored: arrays of tokens cannot be written anyway."""
    task = trajectory.task
    if task.payload:
        task = replace(task, payload=copy.deepcopy(dict(task.payload)))
    turns = tuple(replace(turn, signals=dict(turn.signals)) for turn in trajectory.turns)
    return replace(trajectory, task=task, turns=turns, rewards=dict(trajectory.rewards))


def _plain(value: object) -> object:
    return float(value) if isinstance(value, Real) else (None if value is None else repr(value))


def _check_options(name: str, function: UserFunction, options: Mapping[str, Any]) -> None:
    try:
        signature = inspect.signature(function)
    except (ValueError, TypeError):
        return
    try:
        signature.bind(None, **options)
    except TypeError as error:
        takes = ", ".join(list(signature.parameters)[1:]) or "none"
        foreign = {"completions", "solution_str"} & set(signature.parameters)  # of TRL, of verl
        raise ConfigurationError(
            f"score function {name}: expected to call it with a trajectory and options {sorted(options)}, got: "
            f"{error}; its options are {takes}{TRAJECTORY_HINT if foreign else ''}"
        ) from error
