"""Sticky routing of sessions to engines. A pure state machine: no task, no socket; the caller tells the time.

A session (one conversation) stays on the engine where its prefix cache is. It is placed on the fit engine with the
fewest sessions. An engine is *fit* for a request when its :class:`Breaker` admits one and its policy version is at
least the requested one. A session moves only

* when its engine is not fit: it is down, too many of its requests fail, or it has older weights than the session may
  use;
* between two turns, to an engine that came back and has less than its share of the sessions, while its own has more.
  The limit of an engine that came back rises to its share over ``RETURN_SECONDS``, for new sessions too.

A request that failed is made again elsewhere while its session keeps its engine. So does a request that tries a
half-open engine.

Invariants, property-tested: the in-flight count of an engine equals its unreleased leases; a session with a lease in
flight is never forgotten; at most ``sessions_max`` idle sessions are remembered; releasing twice or after ``finish``
changes nothing; without a change of fitness no session moves.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Set
from dataclasses import dataclass, field
from enum import StrEnum

from actors.engine.breaker import Breaker

UNSTAMPED = -1
RETURN_SECONDS = 10.0
"""Time over which an engine that came back gets its share of the sessions."""


class Placement(StrEnum):
    FIRST = "first"
    """A session that had no engine."""
    STICKY = "sticky"
    """The engine it had."""
    MOVED = "moved"
    """Another engine, which it keeps."""
    ELSEWHERE = "elsewhere"
    """Another engine for this request alone."""


class MoveReason(StrEnum):
    DIED = "died"
    """Its engine was down, or too many requests failed there."""
    LAGGING = "lagging"
    """Its engine had older weights than requested."""
    RETURNED = "returned"
    """To an engine that came back and had less than its share."""
    EVICTED = "evicted"
    """Forgotten because the table was full."""


@dataclass(slots=True)
class EngineState:
    """State of one engine, from probes and requests."""

    name: str
    breaker: Breaker
    version: int = UNSTAMPED
    in_flight: int = 0
    sessions: int = 0
    returned_at: float | None = None
    """Time at which it came back, until it has its share of the sessions."""
    was_up: bool = False
    """True once it has been up: the first time is no return, and moves no conversation."""

    @property
    def alive(self) -> bool:
        return not self.breaker.down

    def fit(self, version_min: int, now: float) -> bool:
        return self.version >= version_min and self.breaker.admits(now)

    def describe(self, version_min: int) -> str:
        """``http://… (version 3 < 4)``."""
        if self.breaker.problem:
            return f"{self.name} ({self.breaker.problem})"
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
    trial: bool = False
    """True if it tries a half-open engine."""
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
    """Places sessions on engines (see the module). ``jitter`` draws from ``[0, 1)``."""

    def __init__(self, engines: Iterable[str], sessions_max: int, jitter: Callable[[], float]) -> None:
        self.engines = {name: EngineState(name, Breaker(jitter)) for name in engines}
        self._sessions_max = sessions_max
        self._sessions: OrderedDict[str, _Session] = OrderedDict()
        self._placements: Counter[Placement] = Counter()
        self._moves: Counter[MoveReason] = Counter()
        self._steady = False
        """Every engine takes requests and has its share of the sessions: nothing to try, nobody to move."""

    def acquire(self, session: str, version_min: int, now: float, avoid: Set[str] = frozenset()) -> Lease | None:
        """Assign a request to an engine; None when no engine is fit.

        ``avoid`` names engines that failed this request before: others are preferred, but one of them is better than
        none."""
        entry = self._sessions.get(session)
        own = None if entry is None else self.engines[entry.engine]
        if entry is not None and own is not None and own.fit(version_min, now):
            if self._steady and own.name not in avoid:
                return self._lease(entry, session, own, Placement.STICKY, now)
            return self._sticky(entry, session, own, version_min, now, avoid)
        chosen = self._least_loaded(version_min, now, avoid)
        if chosen is None:
            return None
        if entry is None or own is None:
            entry = self._sessions[session] = _Session(chosen.name)
            chosen.sessions += 1
            lease = self._lease(entry, session, chosen, Placement.FIRST, now)
            self._evict()
            return lease
        reason = MoveReason.LAGGING if own.breaker.closed else MoveReason.DIED
        return self._moved(entry, session, chosen, reason, now)

    def answered(self, lease: Lease, now: float) -> bool:
        """The engine answered. True if requests may be sent there again."""
        state = self.engines[lease.engine]
        closed = state.breaker.closed
        state.breaker.answered(trial=lease.trial)
        return self._noticed(state, closed, now)

    def failed(self, lease: Lease, now: float, problem: str, *, down: bool = False) -> bool:
        """The request failed at the engine. ``down``: no request can succeed there before its health is probed. True if
        the engine is fit for nothing now."""
        state = self.engines[lease.engine]
        closed = state.breaker.closed
        if down:
            state.breaker.went_down(problem)
        else:
            state.breaker.failed(now, problem, trial=lease.trial)
        return self._noticed(state, closed, now)

    def release(self, lease: Lease) -> None:
        """The request has ended, well or not. Idempotent."""
        if lease.released:
            return
        lease.released = True
        state = self.engines[lease.engine]
        state.in_flight -= 1
        if lease.trial:
            state.breaker.ended()
        assert lease.owner is not None
        lease.owner.in_flight -= 1
        self._evict()

    def finish(self, session: str) -> None:
        """The conversation is over. Idempotent; leases still in flight may be released later."""
        entry = self._sessions.pop(session, None)
        if entry is not None:
            self.engines[entry.engine].sessions -= 1

    def probed(self, engine: str, now: float, *, healthy: bool, version: int | None = None, problem: str = "") -> bool:
        """Record the result of a health probe. True if fitness or version changed."""
        state = self.engines[engine]
        closed = state.breaker.closed
        if healthy:
            state.breaker.came_up()
        else:
            state.breaker.went_down(problem)
        changed = version is not None and self.stamped(engine, version)
        return self._noticed(state, closed, now) or changed

    def stamped(self, engine: str, version: int) -> bool:
        """The engine has this policy version. True if it had another."""
        state = self.engines[engine]
        changed, state.version = state.version != version, version
        return changed

    def other_fit(self, version_min: int, now: float, avoid: Set[str]) -> bool:
        """True if an engine that is not in ``avoid`` is fit."""
        return any(e.fit(version_min, now) for e in self.engines.values() if e.name not in avoid)

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

    def _sticky(
        self, entry: _Session, session: str, own: EngineState, version_min: int, now: float, avoid: Set[str]
    ) -> Lease:
        """A request of a session whose engine is fit, while another engine is not or came back."""
        if own.name in avoid:
            other = self._least_loaded(version_min, now, avoid)
            if other is not None and other.name not in avoid:
                return self._lease(entry, session, other, Placement.ELSEWHERE, now)
            return self._lease(entry, session, own, Placement.STICKY, now)
        for state in self.engines.values():
            if state is own or state.name in avoid or not state.fit(version_min, now):
                continue
            if not state.breaker.closed:
                return self._lease(entry, session, state, Placement.ELSEWHERE, now)
            if entry.in_flight == 0 and own.sessions > self._share() and self._takes(state, now):
                return self._moved(entry, session, state, MoveReason.RETURNED, now)
        return self._lease(entry, session, own, Placement.STICKY, now)

    def _moved(self, entry: _Session, session: str, to: EngineState, reason: MoveReason, now: float) -> Lease:
        self._moves[reason] += 1
        self.engines[entry.engine].sessions -= 1
        to.sessions += 1
        entry.engine = to.name
        return self._lease(entry, session, to, Placement.MOVED, now, reason)

    def _lease(
        self,
        entry: _Session,
        session: str,
        engine: EngineState,
        placement: Placement,
        now: float,
        move: MoveReason | None = None,
    ) -> Lease:
        self._sessions.move_to_end(session)
        entry.in_flight += 1
        engine.in_flight += 1
        self._placements[placement] += 1
        return Lease(session, engine.name, placement, move, engine.breaker.sent(now), owner=entry)

    def _least_loaded(self, version_min: int, now: float, avoid: Set[str]) -> EngineState | None:
        """An engine that takes requests, rather than one that is tried or that has come back a moment ago."""
        fit = [e for e in self.engines.values() if e.fit(version_min, now)]
        fit = [e for e in fit if e.name not in avoid] or fit
        fit = [e for e in fit if e.breaker.closed] or fit
        fit = [e for e in fit if e.returned_at is None or self._takes(e, now)] or fit
        return min(fit, key=lambda e: (e.sessions, e.in_flight), default=None)

    def _share(self) -> float:
        """Sessions of each engine that takes requests, were they equal."""
        return len(self._sessions) / max(1, sum(e.breaker.closed for e in self.engines.values()))

    def _takes(self, state: EngineState, now: float) -> bool:
        """True if an engine that came back may have one session more."""
        if state.returned_at is None:
            return False
        share = self._share()
        if state.sessions + 1 > share and now - state.returned_at >= RETURN_SECONDS:
            state.returned_at = None
            self._steady = self._is_steady()
            return False
        return state.sessions + 1 <= share * min(1.0, (now - state.returned_at) / RETURN_SECONDS)

    def _noticed(self, state: EngineState, was_closed: bool, now: float) -> bool:
        """True if the breaker closed, or stopped being closed."""
        if state.breaker.closed == was_closed:
            return False
        state.returned_at = now if state.breaker.closed and state.was_up else None
        state.was_up |= state.breaker.closed
        self._steady = self._is_steady()
        return True

    def _is_steady(self) -> bool:
        return all(e.breaker.closed and e.returned_at is None for e in self.engines.values())

    def _evict(self) -> None:
        """Forget idle sessions, the least recently used first, until the table is within its bound."""
        excess = len(self._sessions) - self._sessions_max
        if excess <= 0:
            return
        idle = [name for name, entry in self._sessions.items() if entry.in_flight == 0][:excess]
        for name in idle:
            self.finish(name)
            self._moves[MoveReason.EVICTED] += 1
