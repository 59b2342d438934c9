"""The engines of an actor: the async shell around :class:`Router`.

*Consumes* requests for a lease and how they ended; *produces* an engine to send to. *Waits* while no engine is fit, at
most ``wait_seconds_max``; is *unblocked* by the watcher, which probes every engine each ``probe_seconds`` and at once
when a request failed or found only old weights.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections import Counter
from collections.abc import AsyncIterator, Mapping, Sequence, Set
from contextlib import asynccontextmanager

import anyio

from actors.engine.base import Engine, PausableTimeout, PrefixCache
from actors.engine.router import UNSTAMPED, Lease, MoveReason, Placement, Router, RouterStatistics
from pipeline.errors import (
    ConfigurationError,
    EngineBusy,
    EngineError,
    EngineGone,
    EngineRefused,
    EngineUnavailable,
)
from pipeline.metrics.actor import ActorMetrics

logger = logging.getLogger(__name__)

PROBE_SECONDS = 1.0
PROBE_SECONDS_MAX = 5.0
"""A probe that takes longer counts as no answer; two in a row mean that the engine is down (one: it was busy)."""
CACHE_PROBE_EVERY = 5
"""Probes between two readings of the prefix-cache counters."""


class NoEngineFit(EngineUnavailable):
    """No engine became fit in time. There is no retry, because the request has already waited."""


class EnginePool:
    """All engines of one actor. Run :meth:`watch` in a task; nothing is fit before its first probes."""

    def __init__(
        self,
        engines: Sequence[Engine],
        *,
        sessions_max: int,
        wait_seconds_max: float,
        metrics: ActorMetrics,
        probe_seconds: float = PROBE_SECONDS,
        patience: PausableTimeout | None = None,
        jitter: random.Random | None = None,
    ) -> None:
        if not engines:
            raise ConfigurationError("expected at least one engine, got none: set engine.replicas or engine.urls")
        self._engines: Mapping[str, Engine] = {engine.name: engine for engine in engines}
        if len(self._engines) != len(engines):
            raise ConfigurationError(f"engine.urls names an engine twice: {[e.name for e in engines]}")
        self.jitter = jitter or random.Random()
        self.router = Router(self._engines, sessions_max, self.jitter.random)
        self.wait_seconds_max = wait_seconds_max
        self._probe_seconds = probe_seconds
        self.patience = patience or PausableTimeout()
        """Timer for limits that stand still while the engines sleep."""
        self._may_sleep = patience is not None
        self._asleep: set[str] = set()
        self._metrics = metrics
        self._placements = {p: metrics.sticky_placements_total.labels(kind=p.value) for p in Placement}
        self._changed = anyio.Event()
        self._poked = {name: anyio.Event() for name in self._engines}
        self._unanswered = dict.fromkeys(self._engines, 0)
        self._caches: dict[str, PrefixCache] = {}
        self._waiting: Counter[int] = Counter()
        self._evicted = 0

    async def watch(self) -> None:
        """Probe all engines until cancelled."""
        async with anyio.create_task_group() as group:
            for engine in self._engines.values():
                group.start_soon(self._watch_one, engine)

    @asynccontextmanager
    async def lease(self, session: str, version_min: int, avoid: Set[str] = frozenset()) -> AsyncIterator[Engine]:
        """An engine for one request of ``session``, released however the block ends. An :class:`EngineError` of the
        block counts against the engine. Raises :class:`NoEngineFit`."""
        lease = await self._acquire(session, version_min, avoid)
        self._metrics.inflight_requests.inc()
        try:
            yield self._engines[lease.engine]
        except EngineError as error:
            self._failed(lease, error)
            raise
        else:
            self._answered(lease)
        finally:
            self._metrics.inflight_requests.dec()
            self.router.release(lease)
            self._count_evictions()

    def other_fit(self, version_min: int, avoid: Set[str]) -> bool:
        """True if an engine that is not in ``avoid`` is fit."""
        return self.router.other_fit(version_min, _now(), avoid)

    def finish(self, session: str) -> None:
        """The conversation is over."""
        self.router.finish(session)
        self._metrics.sticky_sessions.set(self.router.n_sessions)

    def sampled_with(self, engine: str, version: int) -> None:
        """A reply bore this policy version: newer knowledge than the last probe's."""
        if version > self.router.engines[engine].version and self.router.stamped(engine, version):
            self._announce()

    def version_of(self, engine: str) -> int:
        return self.router.engines[engine].version

    def waiting_for(self) -> str:
        """Reason why requests wait for a lease, in words; empty when none does."""
        version_min = max(self._waiting, default=None)
        return "" if version_min is None else self.trouble(version_min)

    def trouble(self, version_min: int) -> str:
        """``engine http://… (version 3 < 4)`` when no engine is fit; empty when one is."""
        if self.other_fit(version_min, frozenset()):
            return ""
        return "engine " + ", ".join(e.describe(version_min) for e in self.router.engines.values())

    def statistics(self) -> RouterStatistics:
        return self.router.statistics()

    async def close(self) -> None:
        for engine in self._engines.values():
            await engine.close()

    def _answered(self, lease: Lease) -> None:
        if self.router.answered(lease, _now()):
            logger.info("engine %s takes requests again", lease.engine)
            self._announce()

    def _failed(self, lease: Lease, error: EngineError) -> None:
        """Count a failed request against its engine. A refusal is an answer; having too much to do is no failure."""
        if isinstance(error, EngineRefused):
            self._answered(lease)
        elif not isinstance(error, EngineBusy):
            down = isinstance(error, EngineGone)
            if self.router.failed(lease, _now(), str(error), down=down):
                logger.warning(
                    "engine %s takes no requests now: %s",
                    lease.engine,
                    self.router.engines[lease.engine].breaker.problem,
                )
                self._announce()
            self._poked[lease.engine].set()

    async def _acquire(self, session: str, version_min: int, avoid: Set[str]) -> Lease:
        lease = self.router.acquire(session, version_min, _now(), avoid)
        if lease is None:
            lease = await self._wait_for_lease(session, version_min, avoid)
        self._placements[lease.placement].inc()
        if lease.move is not None:
            self._metrics.sticky_moves_total.labels(reason=lease.move.value).inc()
        return lease

    async def _wait_for_lease(self, session: str, version_min: int, avoid: Set[str]) -> Lease:
        for poked in self._poked.values():
            poked.set()
        self._waiting[version_min] += 1
        try:
            with self.patience.limit(self.wait_seconds_max):
                while True:
                    await self._changed.wait()
                    lease = self.router.acquire(session, version_min, _now(), avoid)
                    if lease is not None:
                        return lease
        finally:
            self._waiting[version_min] -= 1
            if not self._waiting[version_min]:
                del self._waiting[version_min]
        raise NoEngineFit(
            f"expected an engine with policy version {version_min} or newer within {self.wait_seconds_max:g} s "
            f"(actor.engine_wait_seconds_max), got {self.trouble(version_min)}"
        )

    async def _watch_one(self, engine: Engine) -> None:
        probes = 0
        while True:
            await self._probe(engine)
            if probes % CACHE_PROBE_EVERY == 0:
                await self._read_cache(engine)
            probes += 1
            with anyio.move_on_after(self._probe_seconds):
                await self._poked[engine.name].wait()
            self._poked[engine.name] = anyio.Event()

    async def _probe(self, engine: Engine) -> None:
        state = self.router.engines[engine.name]
        alive, version, problem = False, None, f"no answer within {PROBE_SECONDS_MAX:g} s"
        self._unanswered[engine.name] += 1
        try:
            with anyio.move_on_after(PROBE_SECONDS_MAX):
                await engine.health()
                stamped = await engine.weight_version()
                if self._may_sleep:
                    self._slept(engine.name, sleeping=await engine.is_sleeping())
                alive, version, problem = True, UNSTAMPED if stamped is None else stamped, ""
                self._unanswered[engine.name] = 0
        except EngineError as error:
            self._unanswered[engine.name] = 0
            problem = str(error)
            self._slept(engine.name, sleeping=False)
        if self._unanswered[engine.name] == 1 and state.alive:
            return
        was_alive, now = state.alive, _now()
        changed = self.router.probed(engine.name, now, healthy=alive, version=version, problem=problem)
        if alive != was_alive:
            logger.info("engine %s is %s %s", engine.name, "up" if alive else "down:", problem)
        if changed or (self._waiting and not state.breaker.closed):
            self._announce()
        states = self.router.engines.values()
        fit = sum(e.fit(0, now) for e in states)
        self._metrics.engines.labels(state="fit").set(fit)
        self._metrics.engines.labels(state="unfit").set(len(self._engines) - fit)
        self._metrics.policy_version.set(max((e.version for e in states if e.alive), default=UNSTAMPED))

    async def _read_cache(self, engine: Engine) -> None:
        """Add what the engine's counters rose by since the last reading (they restart with the engine)."""
        now: PrefixCache | None = None
        try:
            with anyio.move_on_after(PROBE_SECONDS_MAX):
                now = await engine.prefix_cache()
        except EngineError:
            return
        if now is None:
            return
        before = self._caches.get(engine.name, PrefixCache(0.0, 0.0))
        self._caches[engine.name] = now
        if now.queries < before.queries or now.hits < before.hits:
            before = PrefixCache(0.0, 0.0)
        queries, hits = now.queries - before.queries, now.hits - before.hits
        self._metrics.prefix_tokens_total.labels(result="hit").inc(max(0.0, hits))
        self._metrics.prefix_tokens_total.labels(result="miss").inc(max(0.0, queries - hits))
        if queries > 0:
            self._metrics.prefix_cache_hit_ratio.set(hits / queries)

    def _slept(self, engine: str, *, sleeping: bool) -> None:
        """Time stands still while all engines sleep."""
        (self._asleep.add if sleeping else self._asleep.discard)(engine)
        if len(self._asleep) == len(self._engines):
            self.patience.fell_asleep()
        else:
            self.patience.woke()

    def _count_evictions(self) -> None:
        evicted = self.router.evicted
        if evicted > self._evicted:
            self._metrics.sticky_moves_total.labels(reason=MoveReason.EVICTED.value).inc(evicted - self._evicted)
            self._evicted = evicted

    def _announce(self) -> None:
        self._changed.set()
        self._changed = anyio.Event()


def _now() -> float:
    """Time of the event loop; anyio's own has none inside a timer's callback."""
    return asyncio.get_running_loop().time()
