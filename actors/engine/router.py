"""Sticky routing of sessions to engines. A pure state machine: no task, no socket; the caller tells the time.

A session (one conversation) stays on the engine where its prefix cache is. It is placed where a turn takes least time,
by the :class:`EngineLoad` of each engine, or of two drawn at random where most requests are of other actors: none goes
to an engine that is slower than the others are busy, unless their caches are full. Where an engine has not reported
lately, it is placed on the one with the fewest sessions.
An engine is *fit* for a request when its :class:`Breaker` admits one and its policy version is at least the requested
one. A session moves only

* when its engine is not fit: it is down, too many of its requests fail, it has older weights than the session may
  use, or it has left (while it is only doubted, its sessions make single requests elsewhere);
* between two turns, to an engine that came back or joined and has less than its share of the sessions, while its own
  has more. The limit of such an engine rises to its share over ``RETURN_SECONDS``, for new sessions too;
* between two turns, to an engine that is less busy, if its next turn, or the tokens of ``HORIZON_SECONDS``, take less
  time there although that engine first has to read the prefix, by more than chance. One other engine is looked at each
  time, drawn at random: an engine that has become idle is found by a share of the turns of all actors, and not by all
  of them at once.

Engines are seen with new weights one after the other. A session whose engine lags, and a new one, wait
``SPREAD_SECONDS`` at most for the others, so that not all of them go to the first.

Engines join and leave at any time. One that joined is fit once its health and its version were seen. One that left gets
no new requests; it is known until it has no sessions and its requests have ended.

A request that failed is made again elsewhere while its session keeps its engine. So does a request that tries a
half-open engine.

Invariants, property-tested: no request is sent to an engine that has left, or that joined and was not probed since; the
in-flight count of an engine equals its unreleased leases; a session with a lease in
flight is never forgotten; at most ``sessions_max`` idle sessions are remembered; releasing twice or after ``finish``
changes nothing; while fitness and load do not change no session moves.
"""

from __future__ import annotations

import math
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Sequence, Set
from dataclasses import dataclass, field
from enum import StrEnum

from actors.engine.base import EngineReport
from actors.engine.engine_state import FREE_BATCH, PREFILL_COST, Breaker, EngineLoad

SESSIONS_MAX = 100_000
"""Conversations whose engine is remembered, so that the next turn finds its prefix cache."""
UNSTAMPED = -1
RETURN_SECONDS = 10.0
"""Time over which an engine that came back gets its share of the sessions."""
SPREAD_SECONDS = 0.5
"""Time that requests for a new policy version wait for further engines, once the first was seen with it."""
STALE_SECONDS = 5.0
"""Older reports of engines do not count."""
MARGIN, MARGIN_MIN = 1.0, 2.0
"""Requests that another engine must have less, beside what the prefix is worth, in standard deviations of the
difference of two Poisson counts, and at least: smaller differences are chance."""
CACHE_FULL = 0.8
"""Share of an engine's KV cache that its conversations would take, beyond which prefixes are lost."""
HORIZON_SECONDS = 10.0
"""Time for which a difference of load is expected to last; at least one turn. A move is paid for in this time."""
OWN_SHARE = 0.125
"""Share of an actor's own requests at the engines, below which it looks at two engines, drawn at random, for a new
session: between two reports all actors would take the same one for the least busy (Mitzenmacher, 2000: How useful is
old information?)."""
KV_BLOCK = 128
"""Tokens of a block at most; a cache keeps whole blocks."""
TURN_TOKENS, TURNS_AVERAGED = 256.0, 64
"""Tokens of a turn before the first was seen; turns that the average is over."""


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
    LEFT = "left"
    """Its engine has left the run."""
    RETURNED = "returned"
    """To an engine that came back or joined and had less than its share."""
    BUSIER = "busier"
    """Its engine was busier than another, by more than its prefix is worth."""
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
    load: EngineLoad = field(default_factory=EngineLoad)
    was_up: bool = False
    """True once it has been up: the first time is no return, and moves no conversation. True from the start for an
    engine that joins others which were up."""
    leaving: bool = False
    """True once it has left the run; requests and sessions may still be there."""

    @property
    def cache_full(self) -> bool:
        """True if its KV cache does not hold the prefixes of its conversations: those of which no request is in flight
        are taken to be as long as the others, and as many in number as of this actor's."""
        used = self.load.report.kv_used if self.load.report is not None else 0.0
        return used * self.sessions > CACHE_FULL * max(1, self.in_flight)

    @property
    def alive(self) -> bool:
        return not self.breaker.down

    def fit(self, version_min: int, now: float) -> bool:
        return self.version >= version_min and not self.leaving and self.breaker.admits(now)

    def describe(self, version_min: int) -> str:
        """``http://… (version 3 < 4)``."""
        if self.breaker.problem:
            return f"{self.name} ({self.breaker.problem})"
        return f"{self.name} (version {self.version if self.version >= 0 else 'unstamped'} < {version_min})"


@dataclass(slots=True)
class _Session:
    """One conversation."""

    name: str
    engine: str
    in_flight: int = 0
    prefix: int = 0
    """Prompt tokens of its last request, which its engine keeps in its cache while its version is ``version``."""
    version: int = UNSTAMPED


@dataclass(slots=True, eq=False)
class Lease:
    """The right to send one request of a session to an engine, until released."""

    session: _Session
    engine: str
    placement: Placement
    trial: bool
    """True if it tries a half-open engine."""
    move: MoveReason | None = None
    """Reason for the move, where it moved."""
    released: bool = False


class Router:
    """Places sessions on engines (see the module). ``jitter`` draws from ``[0, 1)``. Reports of engines that are older
    than ``stale_seconds`` do not count."""

    def __init__(
        self,
        engines: Iterable[str],
        sessions_max: int,
        jitter: Callable[[], float],
        shared: bool = False,
    ) -> None:
        """``shared``: many actors may see the same loads at the same time."""
        self.engines: dict[str, EngineState] = {}
        """All engines that are known, also those that leave."""
        self.members: list[EngineState] = []
        """Engines that have not left."""
        self._jitter = jitter
        self.stale_seconds = STALE_SECONDS
        self._shared = shared
        self._turn_tokens = TURN_TOKENS
        self.prompt_tokens = 0
        """Prompt tokens of all requests."""
        self.known_tokens = 0
        """Prompt tokens that the engine was given with the turn before, in whole blocks of its KV cache."""
        self._newest, self._newest_at = UNSTAMPED, float("-inf")
        self._sessions_max = sessions_max
        self.sessions: OrderedDict[str, _Session] = OrderedDict()
        self.placements: Counter[Placement] = Counter()
        self.moves: Counter[MoveReason] = Counter()
        self._steady = False
        """Every engine takes requests and has its share of the sessions: nothing to try, nobody to move."""
        for name in engines:
            self.joined(name)

    def joined(self, engine: str) -> None:
        """The engine is part of the run, maybe again. It is fit for nothing until it was probed. Harmless when it is a
        member."""
        state = self.engines.get(engine)
        if state is None:
            others_up = any(e.was_up for e in self.members)
            state = self.engines[engine] = EngineState(engine, Breaker(self._jitter), was_up=others_up)
        elif state.leaving:
            state.leaving, state.version, state.load = False, UNSTAMPED, EngineLoad()
            state.breaker.went_down("not probed yet")
        else:
            return
        self.members.append(state)
        self._steady = self._is_steady()

    def left(self, engine: str) -> None:
        """The engine has left the run: no new requests. Harmless when it is no member."""
        state = self.engines.get(engine)
        if state is not None and not state.leaving:
            state.leaving = True
            self.members.remove(state)
            self._steady = self._is_steady()

    def forget_drained(self) -> tuple[str, ...]:
        """Forget the engines that have left and have neither sessions nor requests; their names."""
        drained = [e.name for e in self.engines.values() if e.leaving and not e.sessions and not e.in_flight]
        for name in drained:
            del self.engines[name]
        return tuple(drained)

    def acquire(
        self, session: str, version_min: int, now: float, avoid: Set[str] = frozenset(), tokens: int = 0
    ) -> Lease | None:
        """Assign a request with a prompt of ``tokens`` to an engine; None when no engine is fit, or while others may
        become fit at once (:meth:`spreading`).

        ``avoid`` names engines that failed this request before: others are preferred, but one of them is better than
        none."""
        entry = self.sessions.get(session)
        own = None if entry is None else self.engines[entry.engine]
        if entry is not None and own is not None and own.fit(version_min, now):
            if self._steady and own.name not in avoid:
                other = self._less_busy(entry, own, version_min, now)
                if other is not None:
                    return self._moved(entry, other, MoveReason.BUSIER, now, tokens)
                return self._lease(entry, own, Placement.STICKY, now, tokens)
            return self._sticky(entry, own, version_min, now, avoid, tokens)
        if self.spreading(version_min, now):
            return None
        chosen = self._least_loaded(version_min, now, avoid)
        if chosen is None:
            return None
        if entry is not None and own is not None and own.breaker.doubted and not own.leaving:
            return self._lease(entry, chosen, Placement.ELSEWHERE, now, tokens)
        if entry is None or own is None:
            entry = self.sessions[session] = _Session(session, chosen.name)
            chosen.sessions += 1
            lease = self._lease(entry, chosen, Placement.FIRST, now, tokens)
            self._evict()
            return lease
        reason = MoveReason.LAGGING if own.breaker.closed else MoveReason.DIED
        reason = MoveReason.LEFT if own.leaving else reason
        return self._moved(entry, chosen, reason, now, tokens)

    def spreading(self, version_min: int, now: float) -> bool:
        """True while an engine that takes requests may be seen with ``version_min`` any moment, as another was."""
        if not (version_min <= self._newest and now - self._newest_at < SPREAD_SECONDS):
            return False
        return any(e.breaker.closed and e.version < version_min for e in self.members)

    def spreading_to(self, state: EngineState, now: float) -> bool:
        """True if this engine may be seen any moment with a version that another was seen with."""
        return state.version < self._newest and now - self._newest_at < SPREAD_SECONDS

    def reports(self, now: float) -> list[EngineReport]:
        """The reports of engines that take requests and have reported lately."""
        since = now - self.stale_seconds
        loads = [state.load for state in self.members if state.breaker.closed]
        return [load.report for load in loads if load.report is not None and load.fresh(since)]

    def sampled(self, tokens: int) -> None:
        """A request has sampled so many tokens."""
        self._turn_tokens += (tokens - self._turn_tokens) / TURNS_AVERAGED

    def answered(self, lease: Lease, now: float) -> bool:
        """The engine answered. True if requests may be sent there again."""
        state = self.engines[lease.engine]
        if not lease.trial:
            state.breaker.answered()
            return False
        before = _standing(state)
        state.breaker.answered(trial=True)
        return self._noticed(state, before, now)

    def failed(self, lease: Lease, now: float, problem: str, *, down: bool = False) -> bool:
        """The request failed at the engine. ``down``: no request can succeed there before its health is probed. True if
        the engine is fit for nothing now."""
        state = self.engines[lease.engine]
        before = _standing(state)
        state.breaker.failed(now, problem, trial=lease.trial)
        if down:
            state.breaker.doubt(problem)
        return self._noticed(state, before, now)

    def doubted(self, engine: str, now: float, problem: str) -> bool:
        """A probe failed: nobody knows whether the engine answers. True if that is new."""
        state = self.engines[engine]
        before = _standing(state)
        state.breaker.doubt(problem)
        return self._noticed(state, before, now)

    def release(self, lease: Lease) -> None:
        """The request has ended, well or not. Idempotent."""
        if lease.released:
            return
        lease.released = True
        state = self.engines[lease.engine]
        state.in_flight -= 1
        if lease.trial:
            state.breaker.ended()
        lease.session.in_flight -= 1
        self._evict()

    def finish(self, session: str) -> None:
        """The conversation is over. Idempotent; leases still in flight may be released later."""
        entry = self.sessions.pop(session, None)
        if entry is not None:
            self.engines[entry.engine].sessions -= 1

    def probed(self, engine: str, now: float, *, healthy: bool, version: int | None = None, problem: str = "") -> bool:
        """Record the result of a health probe. True if fitness or version changed."""
        state = self.engines[engine]
        before = _standing(state)
        if healthy:
            state.breaker.came_up()
        else:
            state.breaker.went_down(problem)
        changed = version is not None and self.stamped(engine, version, now)
        return self._noticed(state, before, now) or changed

    def stamped(self, engine: str, version: int, now: float = float("-inf")) -> bool:
        """The engine has this policy version. True if it had another."""
        state = self.engines[engine]
        changed, state.version = state.version != version, version
        if version > self._newest:
            self._newest, self._newest_at = version, now
        return changed

    def other_fit(self, version_min: int, now: float, avoid: Set[str]) -> bool:
        """True if an engine that is not in ``avoid`` is fit."""
        return any(e.fit(version_min, now) for e in self.members if e.name not in avoid)

    def _sticky(
        self, entry: _Session, own: EngineState, version_min: int, now: float, avoid: Set[str], tokens: int
    ) -> Lease:
        """A request of a session whose engine is fit, while another engine is not or came back."""
        if own.name in avoid:
            other = self._least_loaded(version_min, now, avoid)
            if other is not None and other.name not in avoid:
                return self._lease(entry, other, Placement.ELSEWHERE, now, tokens)
            return self._lease(entry, own, Placement.STICKY, now, tokens)
        for state in self.members:
            if state is own or state.name in avoid or not state.fit(version_min, now):
                continue
            if not state.breaker.closed:
                return self._lease(entry, state, Placement.ELSEWHERE, now, tokens)
            if entry.in_flight == 0 and own.sessions > self._share() and self._takes(state, now):
                return self._moved(entry, state, MoveReason.RETURNED, now, tokens)
        less_busy = self._less_busy(entry, own, version_min, now, avoid)
        if less_busy is not None:
            return self._moved(entry, less_busy, MoveReason.BUSIER, now, tokens)
        return self._lease(entry, own, Placement.STICKY, now, tokens)

    def _less_busy(
        self, entry: _Session, own: EngineState, version_min: int, now: float, avoid: Set[str] = frozenset()
    ) -> EngineState | None:
        """Another engine, drawn at random, where the next turn of a session takes less time than at its own."""
        if entry.in_flight or len(self.members) == 1:
            return None
        other = self.members[int(self._jitter() * len(self.members))]
        if other is own or other.name in avoid or other.returned_at is not None:
            return None
        if not (other.breaker.closed and other.version >= version_min):
            return None
        (here, own_requests), (there, requests) = self._loads((own, other), now) or (
            (None, own.in_flight),
            (None, other.in_flight),
        )
        unread = entry.prefix if own.version == entry.version else 0
        tokens, slower = self._turn_tokens, 1.0
        if here is not None and there is not None:
            tokens = max(tokens, HORIZON_SECONDS / (here * (FREE_BATCH + own_requests)))
            slower = math.sqrt(here / there)
            if not own.cache_full:
                slower = min(slower, here / there)
        margin = max(MARGIN_MIN, MARGIN * math.sqrt(own_requests + requests))
        stays = slower * tokens * (FREE_BATCH + own_requests)
        goes = tokens * (FREE_BATCH + requests + margin) + PREFILL_COST * unread
        return other if goes < stays else None

    def _loads(self, states: Sequence[EngineState], now: float) -> list[tuple[float | None, float]] | None:
        """(Pace, requests) of each engine; None where one has not reported lately."""
        since = now - self.stale_seconds
        if not all(state.load.fresh(since) for state in states):
            return None
        return [(state.load.pace(now), state.load.requests(state.in_flight)) for state in states]

    def _moved(self, entry: _Session, to: EngineState, reason: MoveReason, now: float, tokens: int) -> Lease:
        self.moves[reason] += 1
        self.engines[entry.engine].sessions -= 1
        to.sessions += 1
        entry.engine = to.name
        lease = self._lease(entry, to, Placement.MOVED, now, tokens)
        lease.move = reason
        return lease

    def _lease(self, entry: _Session, engine: EngineState, placement: Placement, now: float, tokens: int) -> Lease:
        self.sessions.move_to_end(entry.name)
        entry.in_flight += 1
        if engine.name == entry.engine:
            self.prompt_tokens += tokens
            if placement is Placement.STICKY and entry.version == engine.version:
                self.known_tokens += max(0, min(entry.prefix, tokens) - KV_BLOCK)
            entry.prefix, entry.version = tokens, engine.version
        engine.in_flight += 1
        self.placements[placement] += 1
        return Lease(entry, engine.name, placement, engine.breaker.sent(now))

    def _least_loaded(self, version_min: int, now: float, avoid: Set[str]) -> EngineState | None:
        """An engine that takes requests, rather than one that is tried or that has come back a moment ago."""
        fit = [e for e in self.members if e.fit(version_min, now)]
        fit = [e for e in fit if e.name not in avoid] or fit
        fit = [e for e in fit if e.breaker.closed] or fit
        fit = [e for e in fit if e.returned_at is None or self._takes(e, now)] or fit
        if len(fit) < 2:
            return fit[0] if fit else None
        loads = self._loads(fit, now)
        if loads is None:
            return min(fit, key=lambda e: (e.sessions, e.in_flight, self._tie()))
        known = [pace for pace, _ in loads if pace is not None]
        usual = sum(known) / len(known) if known else 1.0
        power = 0.5 if any(e.cache_full for e in fit) else 1.0
        times = [(pace or usual) ** power * (FREE_BATCH + requests) for pace, requests in loads]
        found = list(zip(times, fit, strict=True))
        if self._shared and sum(e.in_flight for e in fit) < OWN_SHARE * sum(requests for _, requests in loads):
            first = int(self._jitter() * len(found))
            other = (first + 1 + int(self._jitter() * (len(found) - 1))) % len(found)
            found = [found[first], found[other]]
        return min(found, key=lambda pair: (pair[0], pair[1].sessions, self._tie()))[1]

    def _tie(self) -> float:
        return self._jitter() if self._shared else 0.0

    def _share(self) -> float:
        """Sessions of each engine that takes requests, were they equal."""
        return len(self.sessions) / max(1, sum(e.breaker.closed for e in self.members))

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

    def _noticed(self, state: EngineState, before: tuple[bool, bool], now: float) -> bool:
        """True if the breaker closed, or stopped being closed. One that was only doubted has not come back."""
        closed, trusted = now_standing = _standing(state)
        if now_standing == before:
            return False
        if trusted != before[1]:
            state.returned_at = now if trusted and state.was_up else None
            state.was_up |= trusted
        self._steady = self._is_steady()
        return closed != before[0]

    def _is_steady(self) -> bool:
        return all(e.breaker.closed and e.returned_at is None for e in self.members)

    def _evict(self) -> None:
        """Forget idle sessions, the least recently used first, until the table is within its bound."""
        excess = len(self.sessions) - self._sessions_max
        if excess <= 0:
            return
        idle = [name for name, entry in self.sessions.items() if entry.in_flight == 0][:excess]
        for name in idle:
            self.finish(name)
            self.moves[MoveReason.EVICTED] += 1


def _standing(state: EngineState) -> tuple[bool, bool]:
    return state.breaker.closed, state.breaker.trusted
