"""Progress of a role: what it does, since when nothing has moved, and when that is too long. Pure.

:class:`Progress` keeps the state of a role and the time of its last progress: the counter of its work moved, it
entered another state, or its main loop looked and found that there is nothing to do. Silence is measured against a
limit that follows the run: :class:`AdaptiveLimit` of the pauses that the role has had in that state before.

:class:`Watchdog` turns that into actions, for the thread that carries them out. :class:`EngineSilence` is the same rule
for an engine that is watched from outside, by actors and the learner.

States of roles, as health answers and metrics name them.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from enum import StrEnum


class RoleState(StrEnum):
    """Activity of a role. The values are shown to people and are label values of a metric."""

    STARTING = "starting"
    LOADING = "loading"
    WAITING_FOR_REPLAY = "waiting for the replay stage"
    WAITING_FOR_ENGINES = "waiting for engines"
    WAITING_FOR_ORDERS = "waiting for orders"
    WAITING_FOR_REQUESTS = "waiting for requests"
    WAITING_FOR_ACTORS = "waiting for actors"
    WAITING_FOR_LEARNER = "waiting for the learner"
    WAITING_FOR_WEIGHTS = "waiting for weights"
    WAITING_FOR_ROLLOUTS = "waiting for rollouts"
    WAITING_FOR_DISK = "waiting for disk"
    FAILING = "failing"
    """The newest rollouts failed."""
    PLAYING = "playing"
    SERVING = "serving"
    TRAINING = "training"
    PUBLISHING = "publishing"
    SAVING = "saving"
    EVALUATING = "evaluating"
    FINISHING = "finishing"
    STOPPING = "stopping"
    FINISHED = "finished"


PATIENCE: Mapping[RoleState, float] = {
    RoleState.STARTING: 30.0,
    RoleState.LOADING: 30.0,
    RoleState.PUBLISHING: 6.0,
    RoleState.SAVING: 6.0,
}
"""Limits of states without visible steps inside, as multiples of ``supervisor.progress_seconds_max``: large models on
slow disks take that long."""

FIRST_PATIENCE = 6.0
"""The first training of a process is allowed this multiple: it compiles kernels and allocates memory."""

PAUSES = 32
"""Newest pauses from which a limit is derived."""

FACTOR = 5.0
"""A limit is this multiple of the longest of these pauses."""


class AdaptiveLimit:
    """A limit on a duration that follows the durations of the same work: ``factor`` times the longest of the newest,
    at least ``floor``. ``first`` holds until one is known."""

    def __init__(self, floor: float, first: float, factor: float = FACTOR) -> None:
        self._floor = floor
        self._factor = factor
        self._durations: deque[float] = deque(maxlen=PAUSES)
        self.seconds = max(floor, first)

    def allow(self, seconds: float) -> None:
        """Raise the floor to ``seconds``, if that is more."""
        self._floor = max(self._floor, seconds)
        self.seconds = max(self.seconds, seconds)

    def record(self, seconds: float) -> None:
        """A duration that ended well. One beyond the limit counts as the limit: a single outlier raises it by
        ``factor`` at most."""
        self._durations.append(min(seconds, self.seconds))
        self.seconds = max(self._floor, self._factor * max(self._durations))


SILENCE_SECONDS, SILENCE_SECONDS_MAX = 5.0, 30.0
"""Shortest and longest silence after which an engine counts as hung."""

TICK_SECONDS = 0.5
"""Time between two calls of :meth:`EngineSilence.tick`."""


ANSWER_SECONDS = 2.0
"""Time that an engine which is silent for another process has for an answer."""


class EngineSilence:
    """Time for which an engine has said nothing, and its limit. It counts as hung after five times the longest of its
    newest answers to probes, at least ``SILENCE_SECONDS`` and at most ``SILENCE_SECONDS_MAX``, without any answer. So
    one that is slow (a slow core, a long prefill that holds the interpreter) sets its own limit, and what is stopped or
    unreachable is noticed in any case.

    The caller ticks while it listens. A tick counts ``TICK_SECONDS`` however late it comes, so that time in which the
    caller itself stood still is not held against the engine.
    """

    def __init__(self) -> None:
        self.seconds = 0.0
        """Time since it was heard last."""
        self._limit = AdaptiveLimit(SILENCE_SECONDS, SILENCE_SECONDS_MAX)

    @property
    def limit(self) -> float:
        return min(SILENCE_SECONDS_MAX, self._limit.seconds)

    @property
    def too_long(self) -> bool:
        """True if the engine counts as hung."""
        return self.seconds >= self.limit

    def tick(self) -> None:
        self.seconds += TICK_SECONDS

    def heard(self, answered_after: float | None = None) -> None:
        """Anything came from it, or listening begins; ``answered_after``: seconds that it took to answer a probe."""
        self.seconds = 0.0
        if answered_after is not None:
            self._limit.record(answered_after)

    def told(self, seconds: float, answered_after: float) -> None:
        """Another process heard it so many ``seconds`` ago; ``answered_after``: seconds that it took then. A probe of
        this process has ``ANSWER_SECONDS`` in any case."""
        self._limit.record(answered_after)
        self.seconds = min(seconds, max(0.0, self.limit - ANSWER_SECONDS))


_WORK = (RoleState.PLAYING, RoleState.SERVING, RoleState.EVALUATING)


class Progress:
    """State and last progress of one role. ``now`` is any monotonic clock. :meth:`beat` may be called in any thread."""

    def __init__(self, seconds_max: float, now: float) -> None:
        """``seconds_max``: the shortest limit."""
        self.state = RoleState.STARTING
        self.worked = False
        """True once it has done work, not only started."""
        self.watched = True
        """False while the process drains, which has a limit of its own."""
        self._limits = {}
        for state in RoleState:
            floor = seconds_max * PATIENCE.get(state, 1.0)
            first = floor * (FIRST_PATIENCE if state is RoleState.TRAINING else 1.0)
            self._limits[state] = AdaptiveLimit(floor, first)
        self._progressed_at = now
        self._longest = 0.0
        """Longest pause since the state was entered."""

    def enter(self, state: RoleState, now: float) -> None:
        """The role does this from now on. Progress, unless it did so already."""
        if state is self.state:
            return
        self.beat(now)
        self._limits[self.state].record(self._longest)
        self.worked |= self.state is RoleState.TRAINING or state in _WORK
        self.state, self._longest = state, 0.0

    def allow(self, state: RoleState, seconds: float) -> None:
        """Set the shortest limit of ``state``: something in it has a time limit of its own, which is as long."""
        self._limits[state].allow(seconds)

    def beat(self, now: float) -> None:
        """The counter of its work moved, or its main loop has nothing to do."""
        self._longest = max(self._longest, now - self._progressed_at)
        self._progressed_at = now

    def excuse(self, seconds: float) -> None:
        """The whole process stood still for so long (stopped, suspended), which is not the role's fault."""
        self._progressed_at += seconds

    def age(self, now: float) -> float:
        """Seconds without progress."""
        return max(0.0, now - self._progressed_at)

    @property
    def limit(self) -> float:
        """Seconds that it may spend in this state without progress."""
        return self._limits[self.state].seconds if self.watched else math.inf

    def stuck(self, now: float) -> bool:
        """True if it makes no progress for longer than that."""
        return self.age(now) > self.limit


class Alarm(StrEnum):
    """Measures against a role that makes no progress."""

    DUMP = "dump"
    """Write the stacks of all threads to its log."""
    END = "end"
    """End the process, so that it is started again."""


class Watchdog:
    """Decides what to do about a role without progress: the stacks are dumped once when it is over its limit, and the
    process ends ``stuck_seconds_max`` later. To be asked every ``period`` seconds."""

    def __init__(self, progress: Progress, stuck_seconds_max: float, period: float, now: float) -> None:
        self._progress = progress
        self._stuck_seconds_max = stuck_seconds_max
        self._period = period
        self._looked_at = now
        self._dumped = False

    def look(self, now: float) -> Alarm | None:
        """The action that is due. If the watchdog itself was late, the process was stopped, and the role is excused."""
        lost = now - self._looked_at - self._period
        self._looked_at = now
        if lost > self._period:
            self._progress.excuse(lost)
        if not self._progress.stuck(now):
            self._dumped = False
            return None
        if not self._dumped:
            self._dumped = True
            return Alarm.DUMP
        overdue = self._progress.age(now) - self._progress.limit
        return Alarm.END if overdue > self._stuck_seconds_max else None
