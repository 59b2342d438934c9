"""Sticky routing of sessions to engines. A pure state machine: no task, no socket, no clock.

A session (one conversation) stays on the engine where its prefix cache is. It is placed on the fit engine with the
fewest sessions, and placed again only when its engine is dead or has older weights than the session may use. An
engine is *fit* for a request when it is alive and its policy version is at least the requested one.

Invariants, property-tested: the in-flight count of an engine equals its unreleased leases; a session with a lease in
flight is never forgotten; at most ``sessions_max`` idle sessions are remembered; releasing twice or after ``finish``
changes nothing.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable, Set
from dataclasses import dataclass, field
from enum import StrEnum

UNSTAMPED = -1


class Placement(StrEnum):
    FIRST = "first"
    """A session that had no engine."""
    STICKY = "sticky"
    """The engine it had."""
    MOVED = "moved"
    """Another engine, because its own was not fit."""


class MoveReason(StrEnum):
    DIED = "died"
    LAGGING = "lagging"
    """Its engine had older weights than requested."""
    EVICTED = "evicted"
    """Forgotten because the table was full."""


@dataclass(slots=True)
class EngineState:
    """State of one engine, from probes and failed requests."""

    name: str
    alive: bool = False
    version: int = UNSTAMPED
    problem: str = "not probed yet"
    """Reason why it is not alive, in words."""
    in_flight: int = 0
    sessions: int = 0

    def fit(self, version_min: int) -> bool:
        return self.alive and self.version >= version_min

    def describe(self, version_min: int) -> str:
        """``http://… (version 3 < 4)``."""
        if not self.alive:
            return f"{self.name} ({self.problem})"
        return f"{self.name} (version {self.version if self.version >= 0 else 'unstamped'} < {version_min})"


@dataclass(slots=True)
class _Session:
    engine: str
    in_flight: int = 0


@dataclass(slots=True, eq=False)
class Lease:
    """The right to send one request of a session to an engine, until released."""

    session: str
    engine: str
    placement: Placement
    move: MoveReason | None = None
    """Reason for the move, where it moved."""
    released: bool = False
    owner: _Session | None = field(default=None, repr=False)


@dataclass(frozen=True, slots=True)
class RouterStatistics:
    sessions: int
    in_flight: int
    placements: dict[Placement, int]
    moves: dict[MoveReason, int]
    sessions_by_engine: dict[str, int]


class Router:
    """Places sessions on engines (see the module)."""

    def __init__(self, engines: Iterable[str], sessions_max: int) -> None:
        self.engines = {name: EngineState(name) for name in engines}
        self._sessions_max = sessions_max
        self._sessions: OrderedDict[str, _Session] = OrderedDict()
        self._placements: Counter[Placement] = Counter()
        self._moves: Counter[MoveReason] = Counter()

    def acquire(self, session: str, version_min: int, avoid: Set[str] = frozenset()) -> Lease | None:
        """Assign a request to an engine; None when no engine is fit.

        ``avoid`` names engines that failed this request before: others are preferred, but one of them is better than
        none."""
        entry = self._sessions.get(session)
        if entry is not None:
            own = self.engines[entry.engine]
            others = [e for e in self.engines.values() if e.fit(version_min) and e.name not in avoid and e is not own]
            if own.fit(version_min) and not (own.name in avoid and others):
                return self._lease(session, entry, Placement.STICKY)
        chosen = self._least_loaded(version_min, avoid)
        if chosen is None:
            return None
        if entry is None:
            entry = self._sessions[session] = _Session(chosen.name)
            chosen.sessions += 1
            lease = self._lease(session, entry, Placement.FIRST)
            self._evict()
            return lease
        died = not self.engines[entry.engine].alive or entry.engine in avoid
        reason = MoveReason.DIED if died else MoveReason.LAGGING
        self._moves[reason] += 1
        self.engines[entry.engine].sessions -= 1
        chosen.sessions += 1
        entry.engine = chosen.name
        return self._lease(session, entry, Placement.MOVED, reason)

    def release(self, lease: Lease) -> None:
        """The request has ended, well or not. Idempotent."""
        if lease.released:
            return
        lease.released = True
        self.engines[lease.engine].in_flight -= 1
        assert lease.owner is not None
        lease.owner.in_flight -= 1
        self._evict()

    def finish(self, session: str) -> None:
        """The conversation is over. Idempotent; leases still in flight may be released later."""
        entry = self._sessions.pop(session, None)
        if entry is not None:
            self.engines[entry.engine].sessions -= 1

    def mark(self, engine: str, *, alive: bool, version: int | None = None, problem: str = "") -> bool:
        """Record the result of a probe or a failed request. Returns True if anything changed."""
        state = self.engines[engine]
        version = state.version if version is None else version
        changed = (state.alive, state.version) != (alive, version)
        state.alive, state.version, state.problem = alive, version, problem
        return changed

    def engine_of(self, session: str) -> str | None:
        entry = self._sessions.get(session)
        return entry.engine if entry is not None else None

    @property
    def n_sessions(self) -> int:
        return len(self._sessions)

    @property
    def evicted(self) -> int:
        """Sessions forgotten because the table was full."""
        return self._moves[MoveReason.EVICTED]

    def statistics(self) -> RouterStatistics:
        return RouterStatistics(
            sessions=len(self._sessions),
            in_flight=sum(e.in_flight for e in self.engines.values()),
            placements=dict(self._placements),
            moves=dict(self._moves),
            sessions_by_engine={e.name: e.sessions for e in self.engines.values()},
        )

    def _lease(self, session: str, entry: _Session, placement: Placement, move: MoveReason | None = None) -> Lease:
        self._sessions.move_to_end(session)
        entry.in_flight += 1
        self.engines[entry.engine].in_flight += 1
        self._placements[placement] += 1
        return Lease(session, entry.engine, placement, move, owner=entry)

    def _least_loaded(self, version_min: int, avoid: Set[str]) -> EngineState | None:
        fit = [e for e in self.engines.values() if e.fit(version_min)]
        fit = [e for e in fit if e.name not in avoid] or fit
        return min(fit, key=lambda e: (e.sessions, e.in_flight), default=None)

    def _evict(self) -> None:
        """Forget idle sessions, the least recently used first, until the table is within its bound."""
        excess = len(self._sessions) - self._sessions_max
        if excess <= 0:
            return
        idle = [name for name, entry in self._sessions.items() if entry.in_flight == 0][:excess]
        for name in idle:
            self.finish(name)
            self._moves[MoveReason.EVICTED] += 1
