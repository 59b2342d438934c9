"""The engines of an actor: the async shell around :class:`Router`.

*Consumes* requests for a lease and how they ended; *produces* an engine to send to. *Waits* while no engine is fit, at
most ``wait_seconds_max``; is *unblocked* by the watcher, which probes every engine each ``probe_seconds`` and at once
when a request failed or found only old weights. Another task reads each engine's load every ``report_seconds``.
A third listens: an engine from which nothing has come for too long (:class:`EngineSilence`) hangs or is unreachable. It
gets no requests until it answers, and those under way there fail, to be made again elsewhere.
:meth:`EnginePool.set_engines` says which engines there are: one that joined is probed and gets requests once it serves
the weights that they need; one that left gets none, and its connections close when those under way have ended.

Of the actors of a run one watches the engines for all (:mod:`pipeline.stage.engine_watch`): :meth:`EnginePool.chosen`
makes it that one, and :meth:`EnginePool.seen` is what it tells. The others follow what they hear
(:meth:`EnginePool.told`) in place of probes of their own, except of an engine

* where a request failed, or from which this actor has heard nothing for ``OWN_SECONDS`` with requests under way there;
* about which the watcher and this actor differ: nobody takes an engine for down, or for healthy after a failure, on
  another's word.

An engine of which an actor hears nothing for ``TOLD_SECONDS`` is probed by the actor itself, and so is any engine of
an actor that nobody tells anything.
"""

from __future__ import annotations

import asyncio
import logging
import math
import random
import sys
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence, Set
from contextlib import AbstractAsyncContextManager
from dataclasses import astuple, dataclass, field
from types import TracebackType
from typing import Any

import anyio
import anyio.abc

from actors.engine.base import Engine, EngineReport, PausableTimeout
from actors.engine.router import (
    SESSIONS_MAX,
    STALE_SECONDS,
    UNSTAMPED,
    EngineState,
    Lease,
    MoveReason,
    Placement,
    Router,
)
from actors.metrics import ENGINE_REQUESTS, ActorMetrics
from pipeline.errors import (
    ConfigurationError,
    EngineBusy,
    EngineError,
    EngineGone,
    EngineRefused,
    EngineUnavailable,
    WireError,
)
from pipeline.runtime.progress import TICK_SECONDS, EngineSilence

log = logging.getLogger(__name__)

PROBE_SECONDS = 1.0
PROBE_SECONDS_MAX = 10.0
"""A probe without an answer is given up then, so that one that was lost with a machine is made again."""
PROBES_FAILED_MAX = 4
DOUBT_SECONDS = 0.5
"""An engine is down when so many probes in a row have failed, so long after each other: one refused connection or DNS
error moves no conversation."""
LOAD_SECONDS = 1.0
"""Time between two readings of an engine's load."""
LOAD_SECONDS_MAX = 5.0
"""A load that takes longer to read says nothing of now."""
READ_MAX = 16
"""Readings of loads in a second, of all engines together."""
LOOK_AGAIN_SECONDS = 0.05
"""Time between two probes of engines that may be seen with new weights any moment."""
TOLD_SECONDS = 5.0
"""An engine of which an actor has heard nothing for so long is probed by it."""
OWN_SECONDS = 10.0
"""An engine from which an actor has heard nothing for so long, with requests under way there, is probed by it."""
SAME_SECONDS = 0.5
"""Equal loads of one engine, so close to each other, are one."""
PROBLEM_CHARACTERS_MAX = 200
LATE_SECONDS = 2.0
"""Reports of the watcher are older than that at most. An older version than a reply of this time bore is not taken."""


class NoEngineFit(EngineUnavailable):
    """No engine became fit in time. There is no retry, because the request has already waited."""


@dataclass(slots=True, eq=False)
class _Member:
    """An engine that the pool knows."""

    engine: Engine
    watching: anyio.CancelScope | None = None
    """Scope of the task that probes it."""
    poked: anyio.Event = field(default_factory=anyio.Event)
    """Set: probe it at once."""
    failed_probes: int = 0
    """In a row."""
    reading: bool = False
    """True while it is asked for its load."""
    silence: EngineSilence = field(default_factory=EngineSilence)
    requests: set[anyio.CancelScope] = field(default_factory=set)
    """Scopes of the requests that are under way there."""
    probed_at: float = -math.inf
    """Time of the last probe that ended."""
    answered_after: float = 0.0
    """Seconds that it took to answer the last probe that succeeded."""
    slept: bool = False
    """True if it was asleep then."""
    probing: bool = False
    told_at: float = -math.inf
    """Time at which the watcher last spoke of it, or it joined."""
    told_alive: bool | None = None
    """Word of the watcher; None: none so far."""
    replied_at: float = -math.inf
    """Time at which a reply bore a version that was new."""
    unheard_seconds: float = 0.0
    """Time for which it has answered nothing of this actor, with requests under way."""


class EnginePool:
    """All engines of one actor. Run :meth:`watch` in a task; nothing is fit before its first probes. ``connect`` makes
    the engine of a base URL, for :meth:`set_engines`; without it ``engines`` are all there are."""

    def __init__(
        self,
        engines: Sequence[Engine] = (),
        *,
        connect: Callable[[str], Engine] | None = None,
        wait_seconds_max: float,
        metrics: ActorMetrics,
        probe_seconds: float = PROBE_SECONDS,
        report_seconds: float = LOAD_SECONDS,
        patience: PausableTimeout | None = None,
        jitter: random.Random | None = None,
        told: bool = False,
    ) -> None:
        """``told``: another actor may watch the engines. Then nothing is probed before :meth:`connected`."""
        if not engines and connect is None:
            raise ConfigurationError("expected at least one engine, got none: set engine.replicas or engine.urls")
        self._members = {engine.name: _Member(engine) for engine in engines}
        """Also those that have left, until they are drained."""
        if len(self._members) != len(engines):
            raise ConfigurationError(f"engine.urls names an engine twice: {[e.name for e in engines]}")
        self._connect = connect
        self._watchers: anyio.abc.TaskGroup | None = None
        self.jitter = jitter or random.Random()
        self.router = Router(self._members, SESSIONS_MAX, self.jitter.random, shared=told)
        self.wait_seconds_max = wait_seconds_max
        self._probe_seconds, self._report_seconds = probe_seconds, report_seconds
        self.patience = patience or PausableTimeout()
        """Timer for limits that stand still while the engines sleep."""
        self._may_sleep = patience is not None
        self._asleep: set[str] = set()
        self._metrics = metrics
        metrics.sticky_sessions.set_function(lambda: len(self.router.sessions))
        self._placements = {p: metrics.sticky_placements_total.labels(kind=p.value) for p in Placement}
        self._changed = anyio.Event()
        self._waiting: Counter[int] = Counter()
        self._evicted = 0
        self.watches = False
        """True while this actor watches the engines for all."""
        self._news = anyio.Event()
        """Set: the others shall hear of a change."""
        self._connected_at = math.inf if told else -math.inf

    async def watch(self) -> None:
        """Probe all engines and read their load until cancelled."""
        async with anyio.create_task_group() as group:
            self._watchers = group
            for member in self._members.values():
                self._watch(group, member)
            group.start_soon(self._read_loads)
            group.start_soon(self._listen)

    def set_engines(self, urls: Iterable[str]) -> None:
        """These are the engines from now on. One that left and comes back is a new one."""
        wanted, members = tuple(urls), [state.name for state in self.router.members]
        for url in wanted:
            if url not in members:
                self._join(url)
        for url in members:
            if url not in wanted:
                log.info("engine %s has left", url)
                self.router.left(url)
                if (scope := self._members[url].watching) is not None:
                    scope.cancel()
        self._announce()
        self._count_fit()

    def _join(self, url: str) -> None:
        assert self._connect is not None
        before = self._members.get(url)
        member = _Member(self._connect(url)) if before is None else _Member(before.engine, requests=before.requests)
        member.told_at = _now()
        self._members[url] = member
        self.router.joined(url)
        if self._watchers is not None:
            log.info("engine %s has joined", url)
            self._watch(self._watchers, member)

    def _watch(self, group: anyio.abc.TaskGroup, member: _Member) -> None:
        member.watching = anyio.CancelScope()
        group.start_soon(self._watch_one, member, member.watching)

    def connected(self) -> None:
        """The replay stage can be heard: it will say who watches the engines."""
        self.watches = False
        if self._connected_at > -math.inf:
            self._connected_at = _now()

    def chosen(self) -> None:
        """This actor watches the engines for all, and probes each at once."""
        self.watches = True
        for state in self.router.members:
            self._members[state.name].told_alive = None
            self.poke(state.name)

    def seen(self) -> dict[str, Any]:
        """States of the engines for the other actors, by URL; those that were not probed yet are left out."""
        now, found = _now(), {}
        for state in self.router.members:
            member, report = self._members[state.name], state.load.report
            if member.probed_at == -math.inf:
                continue
            found[state.name] = {
                "alive": state.alive,
                "version": state.version,
                "asleep": member.slept,
                "problem": state.breaker.problem[:PROBLEM_CHARACTERS_MAX],
                "silent": member.silence.seconds,
                "answered_after": member.answered_after,
                "report": None if report is None else [now - state.load.at, *astuple(report)],
            }
        return found

    async def tell(self, send: Callable[[dict[str, Any]], Awaitable[None]]) -> None:
        """While this actor watches the engines for all, send what it sees: each ``LOAD_SECONDS``, and at once what has
        changed. Until cancelled."""
        while True:
            with anyio.move_on_after(LOAD_SECONDS):
                await self._news.wait()
            self._news = anyio.Event()
            if self.watches:
                await send(self.seen())
                await anyio.sleep(LOOK_AGAIN_SECONDS)

    def told(self, engines: Mapping[str, Mapping[str, Any]]) -> None:
        """Another actor watches the engines, and saw this (:meth:`seen`). Raises :class:`WireError` for what is not
        understood."""
        self.watches = False
        try:
            for url, seen in engines.items():
                state = self.router.engines.get(url)
                if state is not None and not state.leaving:
                    self._told(state, self._members[url], seen)
        except (AttributeError, KeyError, TypeError, ValueError, OverflowError) as error:
            raise WireError(f"expected states of engines, got {str(engines)[:200]}: {error!r}") from error
        finally:
            self._count_fit()

    def _told(self, state: EngineState, member: _Member, seen: Mapping[str, Any]) -> None:
        now, alive, version = _now(), bool(seen["alive"]), int(seen["version"])
        silent, answered_after = float(seen["silent"]), float(seen["answered_after"])
        if seen["report"] is not None:
            age, *numbers = map(float, seen["report"])
            self._loaded(state, EngineReport(*numbers), state.in_flight, now - age)
        member.told_at, member.told_alive = now, alive
        if member.failed_probes or member.probing or state.breaker.doubted:
            if not alive and not state.alive:
                member.failed_probes = 0  # both say so
            return
        member.silence.told(silent, answered_after)
        if alive:
            late = version < state.version and now - member.replied_at < LATE_SECONDS
            changed = self.router.probed(state.name, now, healthy=True, version=None if late else version)
            self._slept(state.name, sleeping=bool(seen["asleep"]))
            if changed or (self._waiting and not state.breaker.closed):
                self._announce()
        elif state.alive:
            self.poke(state.name)
        else:
            self.router.probed(state.name, now, healthy=False, problem=str(seen["problem"]))

    def _is_told(self, member: _Member) -> bool:
        """True while another actor watches the engine, or may be about to."""
        if self.watches or self._connected_at == -math.inf:
            return False
        return _now() - max(self._connected_at, member.told_at) < TOLD_SECONDS

    def lease(
        self, session: str, version_min: int, avoid: Set[str] = frozenset(), tokens: int = 0
    ) -> AbstractAsyncContextManager[Engine]:
        """An engine for one request of ``session``, with a prompt of so many ``tokens``, released however the block
        ends. An :class:`EngineError` of the block counts against the engine. Raises :class:`NoEngineFit`, and
        :class:`EngineGone` where the engine hangs: the block is cancelled."""
        return _Request(self, (session, version_min, avoid, tokens))

    def other_fit(self, version_min: int, avoid: Set[str]) -> bool:
        """True if an engine that is not in ``avoid`` is fit."""
        return self.router.other_fit(version_min, _now(), avoid)

    def finish(self, session: str) -> None:
        """The conversation is over."""
        self.router.finish(session)

    def sampled_with(self, engine: str, version: int, tokens: int = 0) -> None:
        """A reply of so many ``tokens`` bore this policy version: newer knowledge than the last probe's."""
        if tokens:
            self.router.sampled(tokens)
        if version > self.version_of(engine) and self.router.stamped(engine, version, _now()):
            self._members[engine].replied_at = _now()
            self._announce()

    def version_of(self, engine: str) -> int:
        """Newest version seen there; that of any reply where the engine has left."""
        state = self.router.engines.get(engine)
        return sys.maxsize if state is None else state.version

    def waiting_reason(self) -> str:
        """Reason why requests wait for a lease, in words; empty when none does."""
        version_min = max(self._waiting, default=None)
        return "" if version_min is None else self.reason(version_min)

    def reason(self, version_min: int) -> str:
        """``engine http://… (version 3 < 4)`` when no engine is fit; empty when one is."""
        if self.other_fit(version_min, frozenset()):
            return ""
        if not self.router.members:
            return "no engine: none has joined (engine.discovery)"
        return "engine " + ", ".join(e.describe(version_min) for e in self.router.members)

    async def close(self) -> None:
        for member in self._members.values():
            await member.engine.close()

    def _ended(self, lease: Lease, error: BaseException | None) -> None:
        """Count a request for or against its engine. A refusal is an answer; having too much to do is no failure."""
        name, now = lease.engine, _now()
        if error is None or isinstance(error, EngineRefused):
            self._heard(self._members[name])
            if self.router.answered(lease, now):
                log.info("engine %s takes requests again", name)
                self._announce()
        elif isinstance(error, EngineError) and not isinstance(error, EngineBusy):
            if self.router.failed(lease, now, str(error), down=isinstance(error, EngineGone)):
                log.warning("engine %s takes no requests now: %s", name, self.router.engines[name].breaker.problem)
                self._announce()
            self.poke(name)

    def poke(self, engine: str) -> None:
        """Probe it at once."""
        self._members[engine].poked.set()

    def reports(self) -> list[EngineReport]:
        """The reports of engines that take requests and have reported lately."""
        return self.router.reports(_now())

    async def begin(self, session: str, version_min: int, avoid: Set[str], tokens: int) -> tuple[Lease, _Member]:
        """For :class:`_Request`."""
        lease = self.router.acquire(session, version_min, _now(), avoid, tokens)
        if lease is None:
            lease = await self._wait_for_lease(session, version_min, avoid, tokens)
        self._placements[lease.placement].inc()
        if lease.move is not None:
            self._metrics.sticky_moves_total.labels(reason=lease.move.value).inc()
        self._metrics.inflight_requests.inc()
        return lease, self._members[lease.engine]

    def end(self, lease: Lease, error: BaseException | None) -> None:
        """For :class:`_Request`."""
        try:
            self._ended(lease, error)
        finally:
            self._metrics.inflight_requests.dec()
            self.router.release(lease)
            evicted = self.router.moves[MoveReason.EVICTED]
            if evicted > self._evicted:
                self._metrics.sticky_moves_total.labels(reason=MoveReason.EVICTED.value).inc(evicted - self._evicted)
                self._evicted = evicted

    async def _wait_for_lease(self, session: str, version_min: int, avoid: Set[str], tokens: int) -> Lease:
        self._waiting[version_min] += 1
        try:
            with self.patience.limit(self.wait_seconds_max):
                self._poke(version_min)
                while True:
                    spreading = self.router.spreading(version_min, _now())
                    with anyio.move_on_after(LOOK_AGAIN_SECONDS if spreading else float("inf")) as scope:
                        await self._changed.wait()
                    if scope.cancelled_caught:
                        self._poke(version_min)
                    lease = self.router.acquire(session, version_min, _now(), avoid, tokens)
                    if lease is not None:
                        return lease
        finally:
            self._waiting[version_min] -= 1
            if not self._waiting[version_min]:
                del self._waiting[version_min]
        raise NoEngineFit(
            f"expected an engine with policy version {version_min} or newer within {self.wait_seconds_max:g} s, "
            f"got {self.reason(version_min)}"
        )

    def _heard(self, member: _Member, answered_after: float | None = None) -> None:
        member.silence.heard(answered_after)
        member.unheard_seconds = 0.0

    def _poke(self, version_min: int) -> None:
        """Probe the engines that are not fit at once. Of those that another actor watches this one hears at once."""
        for state in self.router.members:
            unfit = not state.breaker.closed or state.version < version_min
            if unfit and not self._is_told(self._members[state.name]):
                self.poke(state.name)

    async def _watch_one(self, member: _Member, scope: anyio.CancelScope) -> None:
        poked = False
        with scope:
            while True:
                state = self.router.engines[member.engine.name]
                differs = member.told_alive is not None and member.told_alive is not state.alive
                if poked or differs or member.failed_probes or state.breaker.doubted or not self._is_told(member):
                    await self._probe(member)
                with anyio.move_on_after(self._pause(state)):
                    await member.poked.wait()
                poked = member.poked.is_set()
                member.poked = anyio.Event()

    def _pause(self, state: EngineState) -> float:
        """Seconds until the next probe, if nothing asks for one before."""
        if state.breaker.doubted:
            return min(DOUBT_SECONDS, self._probe_seconds)
        if self.watches and self.router.spreading_to(state, _now()):
            return LOOK_AGAIN_SECONDS
        return self._probe_seconds

    async def _probe(self, member: _Member) -> None:
        engine = member.engine
        state = self.router.engines[engine.name]
        was_alive, alive, version, problem = state.alive, False, None, f"no answer within {PROBE_SECONDS_MAX:g} s"
        member.probing = True
        try:
            with anyio.move_on_after(PROBE_SECONDS_MAX):
                asked_at = _now()
                await engine.health()
                member.answered_after = _now() - asked_at
                self._heard(member, member.answered_after)
                stamped = await engine.weight_version()
                if self._may_sleep:
                    member.slept = await engine.is_sleeping()
                    self._slept(engine.name, sleeping=member.slept)
                alive, version, problem = True, UNSTAMPED if stamped is None else stamped, ""
        except EngineError as error:
            problem = str(error)
            member.slept = False
            self._slept(engine.name, sleeping=False)
        finally:
            member.probing = False
        member.probed_at = _now()
        member.failed_probes = 0 if alive else member.failed_probes + 1
        if alive or member.failed_probes >= PROBES_FAILED_MAX or not state.alive:
            changed = self.router.probed(engine.name, _now(), healthy=alive, version=version, problem=problem)
        else:
            changed = self.router.doubted(engine.name, _now(), problem)
        if not alive and not state.alive and member.told_alive is False:
            member.failed_probes = 0  # both say so: what is told counts again
        if changed or not alive:
            self._news.set()
        if alive != was_alive and state.alive != was_alive:
            log.info("engine %s is %s %s", engine.name, "up" if alive else "down:", problem)
        if changed or (self._waiting and not state.breaker.closed):
            self._announce()
        self._count_fit()

    async def _listen(self) -> None:
        """Notice engines that hang, and give up the requests that are under way there."""
        while True:
            await anyio.sleep(TICK_SECONDS)
            for state in self.router.members:
                member = self._members[state.name]
                if member.probing or member.failed_probes or not self._is_told(member):
                    member.silence.tick()
                elif member.requests:
                    member.unheard_seconds += TICK_SECONDS
                    if member.unheard_seconds >= OWN_SECONDS:
                        self.poke(state.name)
                if not member.silence.too_long:
                    continue
                if state.alive:
                    problem = f"it hangs, or cannot be reached: nothing came from it for {member.silence.seconds:g} s"
                    log.warning("engine %s is down: %s", state.name, problem)
                    self.router.probed(state.name, _now(), healthy=False, problem=problem)
                    self._slept(state.name, sleeping=False)
                    self._count_fit()
                    self._news.set()
                for scope in tuple(member.requests):
                    scope.cancel()

    def _count_fit(self) -> None:
        states, now = self.router.members, _now()
        fit = sum(e.fit(0, now) for e in states)
        self._metrics.engines.labels(state="fit").set(fit)
        self._metrics.engines.labels(state="unfit").set(len(states) - fit)
        known = [e.version for e in states if e.alive and e.version != UNSTAMPED]
        self._metrics.policy_version.set(max(known, default=math.nan))
        for engine in self.router.engines.values():
            if engine.leaving or not engine.alive:  # nobody knows its load
                self._metrics.engine_kv_used_ratio.remove(engine.name)
                for kind in ENGINE_REQUESTS:
                    self._metrics.engine_requests.remove(engine.name, kind)

    async def _read_loads(self) -> None:
        """Ask one engine after another, each once in ``report_seconds``, without waiting for the answers. Close the
        connections of those that have left and are drained."""
        async with anyio.create_task_group() as group:
            while True:
                states = tuple(self.router.members)
                told = [self._is_told(self._members[state.name]) for state in states]
                alone = not self.watches and not any(told)
                seconds = max(self._report_seconds if alone else LOAD_SECONDS, len(states) / READ_MAX)
                self.router.stale_seconds = max(STALE_SECONDS, 3 * seconds)
                for state, by_other in zip(states, told, strict=True):
                    if not by_other and state.alive and not state.leaving and not self._members[state.name].reading:
                        group.start_soon(self._read_load, state, self._members[state.name])
                    await anyio.sleep(seconds / len(states))
                if not states:
                    await anyio.sleep(seconds)
                for name in self.router.forget_drained():
                    await self._members.pop(name).engine.close()

    async def _read_load(self, state: EngineState, member: _Member) -> None:
        member.reading, asked_at, report = True, _now(), None
        in_flight = state.in_flight
        try:
            with anyio.move_on_after(LOAD_SECONDS_MAX):
                report = await member.engine.report()
        except EngineError:
            return
        finally:
            member.reading = False
        if report is None or state.leaving:
            return
        self._loaded(state, report, in_flight, asked_at)

    def _loaded(self, state: EngineState, report: EngineReport, in_flight: int, asked_at: float) -> None:
        """The engine reported this load at ``asked_at``, with so many requests of this actor in flight. One that comes
        again, or behind a newer one, changes nothing."""
        if asked_at < state.load.at or (asked_at - state.load.at < SAME_SECONDS and report == state.load.report):
            return
        self._count_prefixes(state.load.report, report)
        state.load.reported(report, in_flight, asked_at)
        for kind, requests in zip(ENGINE_REQUESTS, (report.running, report.waiting), strict=True):
            self._metrics.engine_requests.labels(engine=state.name, state=kind).set(requests)
        self._metrics.engine_kv_used_ratio.labels(engine=state.name).set(report.kv_used)

    def _count_prefixes(self, before: EngineReport | None, now: EngineReport) -> None:
        """Add what an engine's counters rose by since its last report (they restart with the engine)."""
        if before is None:
            return  # it has served others before this actor came
        if now.prefix_queries < before.prefix_queries or now.prefix_hits < before.prefix_hits:
            before = EngineReport()
        queries, hits = now.prefix_queries - before.prefix_queries, now.prefix_hits - before.prefix_hits
        self._metrics.prefix_tokens_total.labels(result="hit").inc(hits)
        self._metrics.prefix_tokens_total.labels(result="miss").inc(max(0.0, queries - hits))
        if queries > 0:
            self._metrics.prefix_cache_hit_ratio.set(hits / queries)

    def _slept(self, engine: str, *, sleeping: bool) -> None:
        """Time stands still while all engines sleep."""
        if sleeping is not (engine in self._asleep):
            self._news.set()
        (self._asleep.add if sleeping else self._asleep.discard)(engine)
        if len(self._asleep) == len(self.router.members):
            self.patience.fell_asleep()
        else:
            self.patience.woke()

    def _announce(self) -> None:
        self._changed.set()
        self._changed = anyio.Event()


class _Request(AbstractAsyncContextManager[Engine]):
    """One lease. A class, because a generator would cost 1 % of a turn."""

    __slots__ = ("_asked", "_lease", "_member", "_pool", "_scope")

    def __init__(self, pool: EnginePool, asked: tuple[str, int, Set[str], int]) -> None:
        self._pool, self._asked = pool, asked

    async def __aenter__(self) -> Engine:
        self._lease, self._member = await self._pool.begin(*self._asked)
        self._scope = anyio.CancelScope()
        self._scope.__enter__()
        self._member.requests.add(self._scope)
        return self._member.engine

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        self._member.requests.discard(self._scope)
        try:
            self._pool.end(self._lease, error)
        finally:
            swallowed = self._scope.__exit__(kind, error, trace)
        if self._scope.cancelled_caught:
            raise EngineGone(f"engine {self._lease.engine} hangs, or cannot be reached: the request was given up")
        return bool(swallowed)


def _now() -> float:
    """Time of the event loop; anyio's own has none inside a timer's callback."""
    return asyncio.get_running_loop().time()
