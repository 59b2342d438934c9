"""Supervision as a pure state machine: decides what to start, restart and signal, without clock, process or async.

Each method is an event; it returns the actions to carry out. Times are seconds of any monotonic clock.

::

    WAITING ──► STARTING ──► RUNNING          dependencies ready · first healthy answer
                   ▲  │         │
                   │  └────┬────┘ exit
                   └─ BACKOFF   (waits longer each time)        any ──► STOPPING ──► DONE   while draining

The drain goes stage by stage (actors and learner, replay, engines): a stage gets SIGTERM when the one before it has
ended or used up its share of ``drain_seconds_max``, that of the first being most (:func:`working_seconds`); at the end
of that time the remaining processes are killed.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from pipeline.runtime.children import describe_exit
from pipeline.runtime.process import ExitCode, working_seconds

STEADY_SECONDS = 60.0
"""A process that ran for so long has recovered: its next back-off begins small again."""
SILENT_SECONDS_MIN = 30.0
"""A stateless process that gives no answer at all is killed after as long as its start took, and this at least: waiting
longer would cost more than starting it again."""
BUDGET_SECONDS = 3600.0
"""Window in which ``restarts_max`` restarts of one process are allowed."""


class Phase(StrEnum):
    WAITING = "waiting"
    STARTING = "starting"
    RUNNING = "running"
    BACKOFF = "backoff"
    STOPPING = "stopping"
    DONE = "done"


@dataclass(frozen=True, slots=True)
class Rule:
    """Configuration of one process: dependencies, drain stage, time limits."""

    name: str
    stage: int
    """Drain order: lower ends first."""
    depends: tuple[str, ...] = ()
    """Started when each of these has been ready once."""
    awaits: tuple[str, ...] = ()
    """Started at once, but not ready before each of these is: ``start_seconds_max`` counts from then."""
    once: bool = False
    """A preparation: exit 0 is success, anything else ends the run."""
    only_refuses: bool = False
    """With ``once``: only its refusal of the run file ends the run; any other end counts as success."""
    ends_run: bool = False
    """The run is finished when this process has finished its work."""
    stateless: bool = False
    """Killing it loses nothing: in the drain, which still counts as clean, and when it gives no answer at all."""
    optional: bool = False
    """The run continues without it, where another process would end the run by failing."""
    gang: str = ""
    """Name of the first of the processes that fail together: when one fails, the others are killed, and all start again
    once all have ended. Where one of them ``ends_run``, another that ends with 0 has done its part, and starts again
    only with the others; elsewhere each end is a failure."""
    start_seconds_max: float = 300.0
    stuck_seconds_max: float = 300.0
    """Longest time without a healthy answer, once it was healthy."""


@dataclass(frozen=True, slots=True)
class Start:
    name: str


@dataclass(frozen=True, slots=True)
class SendSignal:
    """SIGTERM to ``name``, or with ``kill`` SIGKILL to its whole process group."""

    name: str
    kill: bool = False


Action = Start | SendSignal


@dataclass(slots=True)
class Process:
    """State of one process; read-only outside the machine."""

    rule: Rule
    phase: Phase = Phase.WAITING
    restarts: int = 0
    restarted_at: deque[float] = field(default_factory=deque)
    """Times of the restarts within the last :data:`BUDGET_SECONDS`."""
    worked: bool = False
    """True if it has done work since it was started."""
    idle_starts: int = 0
    """Starts in a row that ended before it did any work."""
    exit_code: int | None = None
    started_at: float = 0.0
    running_since: float | None = None
    failures: int = 0
    """In a row."""
    wake_at: float = math.inf
    unhealthy_since: float | None = None
    silent_since: float | None = None
    """Since when it has given no answer at all."""
    start_seconds: float = 0.0
    """Duration of its last start."""
    killed: bool = False
    killed_with: str = ""
    """The member of its gang whose failure it was killed for."""

    @property
    def alive(self) -> bool:
        return self.phase in (Phase.STARTING, Phase.RUNNING, Phase.STOPPING)


@dataclass(frozen=True, slots=True)
class RestartLimits:
    restarts_max: int = 20
    backoff_seconds: float = 0.5
    """Before the first restart; doubles with each failure."""
    backoff_seconds_max: float = 30.0
    drain_seconds_max: float = 60.0


@dataclass(slots=True)
class Machine:
    """``rules`` in any order; dependencies must not form a cycle."""

    rules: Sequence[Rule]
    limits: RestartLimits = field(default_factory=RestartLimits)
    processes: dict[str, Process] = field(init=False)
    draining_since: float | None = field(init=False, default=None)
    code: ExitCode = field(init=False, default=ExitCode.FINISHED)
    reason: str = field(init=False, default="")
    culprit: str | None = field(init=False, default=None)
    """The process that ended the run by failing; its log says why."""
    _ready: dict[str, float] = field(init=False, default_factory=dict)
    """Time at which each process was ready first."""
    _next_stage_at: float = field(init=False, default=math.inf)

    def __post_init__(self) -> None:
        self.processes = {rule.name: Process(rule) for rule in self.rules}
        missing = {d for rule in self.rules for d in (*rule.depends, *rule.awaits)} - set(self.processes)
        if missing:
            raise ValueError(f"expected dependencies among {sorted(self.processes)}, got {sorted(missing)}")

    @property
    def over(self) -> bool:
        """Everything has ended; ``code`` and ``reason`` are final."""
        return self.draining_since is not None and not any(p.alive for p in self.processes.values())

    def begin(self, now: float) -> list[Action]:
        return self._start_ready(now)

    def healthy(self, name: str, now: float, worked: bool = True) -> list[Action]:
        """``name`` answered that it is healthy, and whether it has done any work."""
        process = self.processes[name]
        process.unhealthy_since = process.silent_since = None
        process.worked |= worked
        if process.phase is not Phase.STARTING:
            return []
        process.phase, process.running_since = Phase.RUNNING, now
        process.start_seconds = max(0.0, now - self._begun(process)) if process.rule.stateless else 0.0
        self._ready.setdefault(name, now)
        return self._start_ready(now)

    def placed(self, name: str, at: float) -> None:
        """``start_seconds_max`` of ``name`` counts from ``at``; infinity while it waits for a node."""
        self.processes[name].started_at = at

    def unhealthy(self, name: str, now: float, *, silent_since: float | None = None) -> list[Action]:
        """``name`` answered that it is stuck; or it was asked at ``silent_since``, and did not answer."""
        process = self.processes[name]
        if process.phase is Phase.RUNNING and process.unhealthy_since is None:
            process.unhealthy_since = now
        if silent_since is None:
            process.silent_since = None
        elif process.phase is Phase.RUNNING and process.silent_since is None:
            process.silent_since = silent_since
        return []

    def exited(self, name: str, code: int, now: float, finished: bool = False) -> list[Action]:
        """``name`` has ended. ``finished``: its work is done (matters for ``ends_run``)."""
        process = self.processes[name]
        rule = process.rule
        process.exit_code = code
        if self.draining_since is not None:
            process.phase = Phase.DONE
            if process.killed and not rule.stateless and not rule.once and self.code is ExitCode.FINISHED:
                self.code, self.reason = ExitCode.FORCED, f"{name} had to be killed: it did not drain in time"
            return self._advance(now)
        succeeded = code == 0 or (rule.only_refuses and code != ExitCode.CONFIGURATION)
        if succeeded and (rule.once or (rule.ends_run and finished)):
            process.phase = Phase.DONE
            self._ready.setdefault(name, now)
            return self._drain(ExitCode.FINISHED, "finished", now) if rule.ends_run else self._start_ready(now)
        finishes = code == 0 and any(p.rule.ends_run for p in (process, *self._others(process)))
        if finishes and not rule.ends_run:
            process.phase = Phase.DONE
            return []
        others = [] if finishes or process.killed else self._gang(process)
        actions = self._restart(process, code, now)
        return actions or self._kill(others, name)

    def stop(self, now: float, reason: str) -> list[Action]:
        """Drain. Does nothing when draining already."""
        return self._drain(ExitCode.FINISHED, reason, now)

    def force(self, now: float, reason: str, code: ExitCode = ExitCode.FORCED) -> list[Action]:
        """Kill everything now."""
        self._drain(code, reason, now)
        self.code, self.reason, self.culprit = code, reason, None
        return self._kill(p for p in self.processes.values() if p.alive)

    def tick(self, now: float) -> list[Action]:
        """Act on elapsed time; call it at :meth:`next_wake` at the latest."""
        if self.draining_since is not None:
            return self._advance(now)
        late = [p for p in self.processes.values() if p.alive and not p.killed and now >= self._deadline(p)]
        actions = self._kill(late)
        for process in late:
            actions += self._kill(self._gang(process), process.rule.name)
        for process in self.processes.values():
            if now >= self._restart_at(process):
                actions += self._start(process, now)
        return actions

    def next_wake(self) -> float:
        """Time of the next :meth:`tick`; infinity when only events can change anything."""
        if self.draining_since is not None:
            if all(p.killed for p in self.processes.values() if p.alive):
                return math.inf
            return min(self._next_stage_at, self.draining_since + self.limits.drain_seconds_max)
        times = [self._restart_at(p) for p in self.processes.values()]
        times += [self._deadline(p) for p in self.processes.values() if p.alive and not p.killed]
        return min(times, default=math.inf)

    def _others(self, process: Process) -> list[Process]:
        """The others of its gang."""
        gang = process.rule.gang
        return [p for p in self.processes.values() if gang and p.rule.gang == gang and p is not process]

    def _gang(self, process: Process) -> list[Process]:
        """The others of its gang that live and are not killed yet."""
        return [p for p in self._others(process) if p.alive and not p.killed]

    def _restart_at(self, process: Process) -> float:
        """Time at which it starts again; infinity where it does not, or a killed one of its gang has not ended."""
        waits = process.phase is Phase.BACKOFF and not any(p.alive and p.killed for p in self._others(process))
        return process.wake_at if waits else math.inf

    def _deadline(self, process: Process) -> float:
        """Time at which a live process that is not healthy is killed."""
        if process.phase is Phase.STARTING:
            return self._begun(process) + process.rule.start_seconds_max
        if process.unhealthy_since is None:
            return math.inf
        deadline = process.unhealthy_since + process.rule.stuck_seconds_max
        if process.rule.stateless and process.silent_since is not None:
            deadline = min(deadline, process.silent_since + max(SILENT_SECONDS_MIN, process.start_seconds))
        return deadline

    def _begun(self, process: Process) -> float:
        """Time at which it could begin to start."""
        return max(process.started_at, *(self._ready.get(name, math.inf) for name in process.rule.awaits), -math.inf)

    def _start_ready(self, now: float) -> list[Action]:
        if self.draining_since is not None:
            return []
        actions: list[Action] = []
        for process in self.processes.values():
            if process.phase is Phase.WAITING and self._ready.keys() >= set(process.rule.depends):
                actions += self._start(process, now)
        return actions

    def _start(self, process: Process, now: float) -> list[Action]:
        process.phase, process.started_at, process.running_since = Phase.STARTING, now, None
        process.wake_at, process.unhealthy_since, process.silent_since = math.inf, None, None
        process.killed = process.worked = False
        process.killed_with = ""
        return [Start(process.rule.name)]

    def _restart(self, process: Process, code: int, now: float) -> list[Action]:
        """Back off and restart, or end the run."""
        name = process.rule.name
        if process.rule.once or code == ExitCode.CONFIGURATION:
            if code == ExitCode.CONFIGURATION:
                return self._give_up(process, ExitCode.CONFIGURATION, f"{name} stopped the run", now)
            return self._give_up(process, ExitCode.FAILED, f"{name} failed ({describe_exit(code)})", now)
        if code == ExitCode.ENVIRONMENT:
            return self._give_up(process, ExitCode.ENVIRONMENT, "every rollout of an environment failed", now)
        while process.restarted_at and process.restarted_at[0] <= now - BUDGET_SECONDS:
            process.restarted_at.popleft()
        process.idle_starts = 0 if process.worked else process.idle_starts + 1
        most = self.limits.restarts_max
        why = ""
        if len(process.restarted_at) >= most:
            why = f"after {len(process.restarted_at)} restarts within an hour"
        elif process.idle_starts > most:
            why = f"{process.idle_starts} times in a row before it did any work"
        if why and not (process.rule.optional and process.restarted_at):
            reason = f"{name} failed ({describe_exit(code)}) {why} (supervisor.restarts_max={most})"
            return self._give_up(process, ExitCode.GAVE_UP, reason, now)
        steady = process.running_since is not None and now - process.running_since >= STEADY_SECONDS
        process.failures = 1 if steady else process.failures + 1
        process.restarts += 1
        if code != ExitCode.CALLS_HANG:
            process.restarted_at.append(now)
        doubled = self.limits.backoff_seconds * 2.0 ** min(process.failures - 1, 60)
        process.phase, process.wake_at = Phase.BACKOFF, now + min(self.limits.backoff_seconds_max, doubled)
        if why:  # optional: the server of a tracker may be away for hours
            process.wake_at = max(process.wake_at, process.restarted_at[0] + BUDGET_SECONDS)
        actions: list[Action] = []
        for other in self._others(process):
            if other.phase is Phase.DONE and self.draining_since is None:
                actions += self._restart(other, 0, now)
        return actions

    def _give_up(self, process: Process, code: ExitCode, reason: str, now: float) -> list[Action]:
        """End the run, unless ``process`` is optional."""
        process.phase = Phase.DONE
        if process.rule.optional:
            return []
        self.culprit = process.rule.name
        return self._drain(code, reason, now)

    def _drain(self, code: ExitCode, reason: str, now: float) -> list[Action]:
        if self.draining_since is not None:
            return []
        self.draining_since, self.code, self.reason = now, code, reason
        for process in self.processes.values():
            if not process.alive:
                process.phase = Phase.DONE
        return self._advance(now)

    def _advance(self, now: float) -> list[Action]:
        """Signal the next stage; kill the remaining processes at the end of the drain time."""
        assert self.draining_since is not None
        alive = [p for p in self.processes.values() if p.alive]
        if now >= self.draining_since + self.limits.drain_seconds_max:
            return self._kill(p for p in alive if not p.killed)
        actions: list[Action] = []
        self._next_stage_at = math.inf
        for stage in sorted({p.rule.stage for p in alive}):
            members = [p for p in alive if p.rule.stage == stage]
            for process in members:
                if process.phase is not Phase.STOPPING:
                    process.phase = Phase.STOPPING
                    actions.append(SendSignal(process.rule.name))
            if now < self._stage_end(stage):
                self._next_stage_at = self._stage_end(stage)
                break
        return actions

    def _stage_end(self, stage: int) -> float:
        """Time at which the next stage no longer waits for this one."""
        assert self.draining_since is not None
        first, *later = sorted({rule.stage for rule in self.rules})
        total = self.limits.drain_seconds_max
        working = working_seconds(total) if later else total
        share = 0.0 if stage == first else (later.index(stage) + 1) / len(later)
        return self.draining_since + working + (total - working) * share

    def _kill(self, processes: Iterable[Process], cause: str = "") -> list[Action]:
        """``cause``: the member of their gang that failed."""
        actions: list[Action] = []
        for process in processes:
            process.killed, process.killed_with = True, cause
            actions.append(SendSignal(process.rule.name, kill=True))
        return actions
