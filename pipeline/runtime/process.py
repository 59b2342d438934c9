"""The life of a role process: start, signals, drain, exit code, metrics and health.

``run_role`` is the same for every role:

* uvloop, standard logging on stderr, ``/metrics`` and ``/healthz`` from a thread;
* a watchdog thread writes the stacks of a role without progress to its log, and later ends it (:mod:`.progress`);
* SIGTERM, SIGINT or SIGHUP sets ``ctx.stopping``: the main coroutine finishes what it must and returns. A second
  signal, or a drain longer than ``checkpoint.drain_seconds_max``, ends the process at once. SIGTERM that comes twice
  within ``SAME_SIGNAL_SECONDS`` is one signal: SLURM may tell a step of a preempted job twice;
* the exit code is one of :class:`ExitCode`.
"""

from __future__ import annotations

import asyncio
import faulthandler
import logging
import math
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field
from enum import IntEnum
from functools import partial
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

import anyio
import anyio.to_thread
from anyio.abc import TaskGroup

from pipeline.config import RunConfig
from pipeline.errors import (
    AfterplayError,
    CallsHang,
    ConfigurationError,
    DamagedFiles,
    EnvironmentFailing,
    ForcedExit,
    FormatMismatch,
    leaves,
)
from pipeline.runtime import disk as disk_wait
from pipeline.runtime.logs import configure_logging
from pipeline.runtime.metrics import CollectorRegistry, ProcessMetrics
from pipeline.runtime.plugin_limits import bounded_prints
from pipeline.runtime.progress import Alarm, Progress, RoleState, Watchdog
from pipeline.runtime.run_directory import PathWatch, RunDirectory, read_json, write_json_atomically

if TYPE_CHECKING:
    from pipeline.runtime.metrics_server import MetricsServer

log = logging.getLogger(__name__)

WAIT_BEAT_SECONDS = 1.0
"""Between two signs of life of a role that waits for others."""
WATCH_SECONDS = 1.0
"""Period of the watchdog."""
LOCKED_SECONDS = 60.0
"""Without a look of the watchdog: C code holds the interpreter. The stacks are then dumped by a thread of the C library
(:mod:`faulthandler`)."""
SCRAPED_SECONDS_MAX = 30.0
"""Longest wait of a finished role for a scrape that shows that it has finished."""
READER_SECONDS_MAX = 60.0
"""Without a scrape for longer, nobody reads the metrics."""
GONE_SECONDS_MAX = 5.0
"""For the end of a process whose run directory is gone."""
LOOK_SECONDS = 0.05
END_LOOK_SECONDS = 2.0
"""Interval at which a role that was started alone looks whether the run has finished."""
STDERR = 2
ADDRESS = "AFTERPLAY_ADDRESS"
"""Environment variable: address of this machine for the others of the run, set by a launcher."""
EVERYWHERE = ("0.0.0.0", "::", "")
"""Hosts of a server that listens on all interfaces."""
LAG_PROBE_SECONDS = 0.5
"""Period of the measurements of the event loop's delay."""
SAME_SIGNAL_SECONDS = 2.0
"""Within it, a second SIGTERM or SIGHUP is the first one again."""
BLOCKED_SECONDS_MAX = 1.0
"""Beyond the drain's own limit, before a process with a blocked event loop is ended by force."""

LAST_SECONDS = 4.0
"""End of a drain that is for the replay stage and the engines: they end after actors and learner."""

Main = Callable[["RoleContext"], Awaitable[None]]


def drain_signals() -> tuple[signal.Signals, ...]:
    """Signals that mean drain. SIGHUP comes from a terminal that closes, and is ignored under ``nohup``."""
    closes = (signal.SIGHUP,) if signal.getsignal(signal.SIGHUP) is signal.SIG_DFL else ()
    return (signal.SIGINT, signal.SIGTERM, *closes)


def working_seconds(drain_seconds_max: float) -> float:
    """Part of a drain in which actors and learner finish their work. Most of it is for the last checkpoint.

    >>> [working_seconds(seconds) for seconds in (2.0, 60.0)]
    [1.5, 56.0]
    """
    return drain_seconds_max - min(LAST_SECONDS, drain_seconds_max / 4)


class ExitCode(IntEnum):
    """Exit codes of Afterplay's processes."""

    FINISHED = 0
    """The work is done, or the process was stopped by a signal and drained."""
    FAILED = 1
    """An error; the log has it."""
    CONFIGURATION = 2
    """The run file or an option is wrong, or files are damaged beyond repair; restarting does not help."""
    FORCED = 3
    """Ended without finishing: a second signal, or a drain that took too long."""
    GAVE_UP = 4
    """A process failed too often: see ``supervisor.restarts_max``."""
    BUSY = 5
    """The run directory is in use by a run that is alive."""
    ENVIRONMENT = 6
    """Every rollout of an environment failed."""
    STUCK = 7
    """A role made no progress and ended itself, to be started again."""
    CALLS_HANG = 8
    """Calls of plug-ins hang in threads of a role, which drained and is started again. This is no failure of the role,
    so it does not count for ``supervisor.restarts_max``."""


@dataclass(slots=True)
class Status:
    """Current activity of a role."""

    state: RoleState = RoleState.STARTING
    reason: str = ""
    details: dict[str, Any] = field(default_factory=dict)


class RoleContext:
    """Configuration, metrics, stop event and status of a role; the argument of its main coroutine."""

    def __init__(
        self,
        name: str,
        index: int,
        config: RunConfig,
        directory: RunDirectory | None = None,
        registry: CollectorRegistry | None = None,
    ) -> None:
        self.name = name
        self.index = index
        self.config = config
        self.directory = directory or RunDirectory(config.run.path)
        self.registry = registry or CollectorRegistry()
        self.stopping = anyio.Event()
        """Set when the process should drain and return."""
        self.status = Status()
        self.notices: list[str] = []
        """Sentences that the user should read, in order; ``afterplay run`` prints each once."""
        self.process = ProcessMetrics(
            self.registry, config.run.name, config.advantage.estimator.name, config.model.source
        )
        self.progress = Progress(config.supervisor.progress_seconds_max, time.monotonic())
        self._finished = False
        self._watched: list[PathWatch] = []
        self.server: MetricsServer | None = None
        progress = self.progress
        self.process.follow(lambda: progress.age(time.monotonic()), lambda: progress.limit, RoleState.STARTING)
        self.process.disk_wait_seconds.set_function(disk_wait.shortage_seconds)
        self.process.disk_free_bytes.set_function(lambda: disk_wait.free_bytes(self.directory.path))

    def report(self, state: RoleState, reason: str = "", **details: Any) -> None:
        """Set the status: ``ctx.report(RoleState.WAITING_FOR_ROLLOUTS, "2 of 8 groups of step 3", ready=5)``.

        Entering another state is progress. ``details`` are JSON values. Shown by ``/healthz`` and the progress display.
        """
        before, self.status = self.status, Status(state, reason, details)
        self.progress.enter(state, time.monotonic())
        if state is not before.state:
            self.process.enter(before.state, state)

    def beat(self) -> None:
        """Note progress: the counter of the role's work moved, or its main loop found nothing to do. In any thread.

        Never call it in a task beside the work: then a role that hangs looks healthy.
        """
        self.progress.beat(time.monotonic())

    def watch(self, path: Path) -> None:
        """End this process with an error soon after ``path``, which it has open, was moved, removed or replaced."""
        self._watched.append(PathWatch(path))

    async def watch_paths(self) -> None:
        """Raises :class:`DamagedFiles` when a watched path is gone; until cancelled. A main coroutine that does not
        heed that has ``GONE_SECONDS_MAX``."""
        while True:
            await anyio.sleep(WATCH_SECONDS)
            for path in self._watched:
                if reason := await anyio.to_thread.run_sync(path.gone, abandon_on_cancel=True):
                    forced = threading.Timer(GONE_SECONDS_MAX, os._exit, (ExitCode.CONFIGURATION,))
                    forced.daemon = True
                    forced.start()
                    raise DamagedFiles(reason)

    @asynccontextmanager
    async def waiting(self, state: RoleState, reason: str = "", **details: Any) -> AsyncIterator[None]:
        """Inside, the role waits for others: progress while its event loop runs."""
        self.report(state, reason, **details)
        async with anyio.create_task_group() as group:

            async def beat() -> None:
                while True:
                    self.beat()
                    await anyio.sleep(WAIT_BEAT_SECONDS)

            group.start_soon(beat)
            yield
            group.cancel_scope.cancel()

    def finished(self) -> None:
        """Export that the run has made all its updates, which silences alerts about processes that are gone."""
        if not self._finished:
            self._finished = True
            self.process.run_finished_timestamp_seconds.set(time.time())

    async def until_scraped(self) -> None:
        """Wait until a Prometheus that reads the metrics has read those of all roles: when ours have been read twice,
        each of the others has been read once. Returns at once where none reads them."""
        server = self.server
        if server is None or time.monotonic() - server.scraped_at > READER_SECONDS_MAX:
            return
        enough = server.scrapes + 2
        with anyio.move_on_after(SCRAPED_SECONDS_MAX):
            while server.scrapes < enough and not self.stopping.is_set():
                await anyio.sleep(LOOK_SECONDS)

    def health(self) -> tuple[bool, dict[str, Any]]:
        """False when the role is stuck; and the status as JSON values."""
        now, status, progress = time.monotonic(), self.status, self.progress
        if (shortage := disk_wait.shortage()) is not None:
            status = Status(RoleState.WAITING_FOR_DISK, shortage.text, status.details)
        stuck = progress.stuck(now)
        limit = progress.limit
        return not stuck, {
            "name": self.name,
            "state": f"stuck while {status.state}" if stuck else status.state,
            "reason": status.reason,
            "details": status.details,
            "notices": self.notices,
            "progress_age_seconds": round(progress.age(now), 3),
            "progress_limit_seconds": None if math.isinf(limit) else round(limit, 3),
            "worked": progress.worked,
            "stopping": self.stopping.is_set(),
        }


def role_name(role: str, index: int) -> str:
    """``actor-0``, ``actor-1`` …; ``learner`` and ``replay`` alone need no number."""
    return f"{role}-{index}" if role in ("actor", "engine") or index else role


def parse_index(text: str, environment: Mapping[str, str] | None = None) -> int:
    """The index of a replica: a number, or the name of an environment variable that ends with it, as ``SLURM_PROCID``
    (``3``) and the ``HOSTNAME`` of a pod of a StatefulSet (``actor-3``). Raises :class:`ConfigurationError`.

    >>> parse_index("3"), parse_index("HOSTNAME", {"HOSTNAME": "run-actor-12"})
    (3, 12)
    """
    if text.isdecimal():
        return int(text)
    value = (os.environ if environment is None else environment).get(text)
    if value is None:
        raise ConfigurationError(f"--index: expected a number from 0, or the name of a variable, got {text!r}")
    digits = value[len(value.rstrip("0123456789")) :]
    if not digits:
        raise ConfigurationError(f"--index {text}: expected a variable that ends with a number, got {text}={value!r}")
    return int(digits)


def metrics_port(name: str, index: int, base: int) -> int:
    """Port of ``/metrics``: replay ``base``, learner ``base + 1``, actor i ``base + 2 + i``; 0 stays 0 (any free)."""
    if base == 0:
        return 0
    offsets = {"replay": 0, "learner": 1}
    port = base + offsets.get(name.split("-")[0], 2 + index)
    if port > 65535:
        raise ConfigurationError(
            f"expected metrics ports up to 65535, got {port} for {name}: set metrics.port lower than {base}"
        )
    return port


def run_role(name: str, index: int, config: RunConfig, main: Main, ends_with_run: bool = False) -> int:
    """Run ``main`` as a process of its own and return its exit code. ``ends_with_run``: nobody ends it when the run has
    finished, so it looks for that itself."""
    configure_logging(name, config.run.name)
    try:
        return anyio.run(_live, name, index, config, main, ends_with_run, backend_options={"use_uvloop": True})
    except BaseException as error:
        return _explain(name, error)


async def _live(name: str, index: int, config: RunConfig, main: Main, ends_with_run: bool) -> int:
    from pipeline.runtime.metrics_server import MetricsServer  # aiohttp: a refused run file is refused without it

    directory = RunDirectory(config.run.path)
    disk_wait.wait_for_room(directory.create, directory.path, "the run directory")
    ctx = RoleContext(name, index, config, directory)
    disk_wait.ON_ATTEMPT.append(ctx.beat)

    def watched() -> None:
        ctx.progress.watched = not ctx.stopping.is_set()

    with (
        _signals(ctx),
        MetricsServer(
            ctx.registry, ctx.health, config.metrics.host, metrics_port(name, index, config.metrics.port)
        ) as server,
        watchdog(ctx.name, ctx.progress, config.supervisor.stuck_seconds_max, watched),
        bounded_prints(),
    ):
        ctx.server = server
        log.info("started, /metrics on port %d", server.port)
        ctx.watch(directory.path)
        async with anyio.create_task_group() as background:
            background.start_soon(_measure_lag, ctx)
            background.start_soon(ctx.watch_paths)
            if ends_with_run:
                background.start_soon(_end_with_run, ctx)
            with _process_file(ctx, server.port, background):
                await _run_main(ctx, main, config.checkpoint.drain_seconds_max)
                background.cancel_scope.cancel()
    log.info("finished")
    return ExitCode.FINISHED


async def _end_with_run(ctx: RoleContext) -> None:
    while not await anyio.to_thread.run_sync(ctx.directory.has_finished, ctx.config.run.total_steps):
        await anyio.sleep(END_LOOK_SECONDS)
    log.info("the run has finished")
    ctx.stopping.set()


async def _run_main(ctx: RoleContext, main: Main, drain_seconds_max: float) -> None:
    """Run ``main``; once stopping is set it has ``drain_seconds_max`` to return. Raises :class:`ForcedExit`."""
    overdue = False

    async def limit_drain(scope: anyio.CancelScope) -> None:
        nonlocal overdue
        await ctx.stopping.wait()
        log.info("stopping")
        await anyio.sleep(drain_seconds_max)
        overdue = True
        scope.cancel()

    async with anyio.create_task_group() as group:
        group.start_soon(limit_drain, group.cancel_scope)
        await main(ctx)
        group.cancel_scope.cancel()
    if overdue:
        raise ForcedExit(
            f"{ctx.name} was expected to drain within checkpoint.drain_seconds_max={drain_seconds_max} s, and did not "
            f"(it was {ctx.status.state}{' for ' + ctx.status.reason if ctx.status.reason else ''})"
        )


async def _measure_lag(ctx: RoleContext) -> None:
    while True:
        due = time.perf_counter() + LAG_PROBE_SECONDS
        await anyio.sleep(LAG_PROBE_SECONDS)
        ctx.process.event_loop_lag_seconds.observe(max(0.0, time.perf_counter() - due))


@contextmanager
def watchdog(name: str, progress: Progress, stuck_seconds_max: float, look: Callable[[], None]) -> Iterator[None]:
    """A thread that dumps the stacks of a process without progress to stderr, and ends the process when that lasts.
    ``look`` brings ``progress`` up to date each time."""
    rule = Watchdog(progress, stuck_seconds_max, WATCH_SECONDS, time.monotonic())
    ended = threading.Event()

    def watch() -> None:
        while not ended.wait(WATCH_SECONDS):
            faulthandler.dump_traceback_later(LOCKED_SECONDS, file=STDERR)
            look()
            alarm = rule.look(time.monotonic())
            if alarm is not None:
                now = time.monotonic()
                about = (
                    f"no progress for {progress.age(now):.0f} s while {progress.state} (limit {progress.limit:.0f} s)"
                )
                what = "ending, to be started again" if alarm is Alarm.END else "the stacks of all threads:"
                os.write(STDERR, f"{name}: {about}; {what}\n".encode())
                if alarm is Alarm.END:
                    os._exit(ExitCode.STUCK)
                faulthandler.dump_traceback(STDERR, all_threads=True)

    thread = threading.Thread(target=watch, name="watchdog", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join(timeout=1)
        faulthandler.cancel_dump_traceback_later()


@contextmanager
def _signals(ctx: RoleContext) -> Iterator[None]:
    """First of :func:`drain_signals`: set ``ctx.stopping``. Second: end the process at once.

    A thread ends the process when the event loop is blocked for longer than the drain may take. A process that has
    drained ignores SIGTERM and SIGHUP: only its exit code is left to give.
    """
    loop = asyncio.get_running_loop()
    seconds_max = ctx.config.checkpoint.drain_seconds_max + BLOCKED_SECONDS_MAX
    watchdog: list[threading.Timer] = []
    stopped_at = 0.0

    def force(reason: str) -> None:
        os.write(2, f"{ctx.name}: {reason}, ending at once\n".encode())
        os._exit(ExitCode.FORCED)

    def on_signal(number: int, frame: FrameType | None) -> None:
        nonlocal stopped_at
        if watchdog:
            if number != signal.SIGINT and time.monotonic() - stopped_at < SAME_SIGNAL_SECONDS:
                return
            force("second signal")
        stopped_at = time.monotonic()
        timer = threading.Timer(seconds_max, force, (f"the event loop was blocked for {seconds_max} s of the drain",))
        timer.daemon = True
        watchdog.append(timer)
        timer.start()
        loop.call_soon_threadsafe(ctx.stopping.set)

    previous = {number: signal.signal(number, on_signal) for number in drain_signals()}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, signal.SIG_IGN if watchdog and number != signal.SIGINT else handler)
        for timer in watchdog:
            timer.cancel()


@contextmanager
def _process_file(ctx: RoleContext, port: int, background: TaskGroup) -> Iterator[None]:
    """``processes/NAME.json`` is there inside. Where the file system refuses that, it is tried again in
    ``background``.

    A process that a launcher placed ends at once where it finds the file of another. It stood still on a machine that
    counted as lost, and its place was given to the other: whatever it still wrote into the run directory would do harm.
    """
    path, host = ctx.directory.process_file(ctx.name), ctx.config.metrics.host
    if host in EVERYWHERE:
        host = os.environ.get(ADDRESS, host)
    record = {
        "pid": os.getpid(),
        "machine": socket.gethostname(),
        "metrics_host": host,
        "metrics_port": port,
        "started_at": time.time(),
    }
    write = partial(write_json_atomically, path, record, make_folder=False)

    async def keep(written: bool) -> None:
        while not written:
            await anyio.sleep(disk_wait.RETRY_SECONDS)
            written = not await anyio.to_thread.run_sync(disk_wait.left_out, write, path, abandon_on_cancel=True)
        if ADDRESS not in os.environ:  # nobody gave its place away: a second one was started by mistake
            return
        while (found := await anyio.to_thread.run_sync(read_json, path, abandon_on_cancel=True)) in (None, record):
            await anyio.sleep(WATCH_SECONDS)
        other = f"process {found.get('pid')} of {found.get('machine')}" if found else ""
        os.write(STDERR, f"{ctx.name}: {other} took the place of this one ({path}), ending at once\n".encode())
        os._exit(ExitCode.FORCED)

    if reason := disk_wait.left_out(write, path):
        log.warning("others do not find the metrics of this process: %s", reason)
    background.start_soon(keep, not reason)
    try:
        yield
    finally:
        if read_json(path) == record:
            with suppress(OSError):
                path.unlink()


def _explain(name: str, error: BaseException) -> int:
    """Log why a role ended; returns its exit code."""
    found = list(leaves(error))
    for leaf in found:
        if isinstance(leaf, ConfigurationError | FormatMismatch | DamagedFiles):
            _print(f"{name}: {leaf}")
            return ExitCode.CONFIGURATION
        if isinstance(leaf, EnvironmentFailing):
            _print(f"{name}: {leaf}")
            return ExitCode.ENVIRONMENT
        if isinstance(leaf, CallsHang):
            _print(f"{name}: {leaf}")
            return ExitCode.CALLS_HANG
    log.error("%s failed", name, exc_info=error)
    for leaf in found:
        kind = "" if isinstance(leaf, AfterplayError) else f"{type(leaf).__name__}: "
        _print(f"{name}: {kind}{leaf}")
    forced = any(isinstance(leaf, ForcedExit | KeyboardInterrupt) for leaf in found)
    return ExitCode.FORCED if forced else ExitCode.FAILED


def _print(line: str) -> None:
    """To stderr, unless the disk of the log is full."""
    with suppress(OSError):
        print(line, file=sys.stderr, flush=True)
