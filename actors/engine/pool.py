"""The engines of an actor: the async shell around :class:`Router`.

*Consumes* requests for a lease and how they ended; *produces* an engine to send to. *Waits* while no engine is fit, at
most ``wait_seconds_max``; is *unblocked* by the watcher, which probes every engine each ``probe_seconds`` and at once
when a request failed or found only old weights. Another task reads each engine's load every ``report_seconds``.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections import Counter
from collections.abc import AsyncIterator, Mapping, Sequence, Set
from contextlib import asynccontextmanager

import anyio

from actors.engine.base import Engine, EngineReport, PausableTimeout
from actors.engine.router import (
    STALE_SECONDS,
    UNSTAMPED,
    Lease,
    MoveReason,
    Placement,
    Router,
    RouterStatistics,
)
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
LOAD_SECONDS = 1.0
"""Time between two readings of an engine's load."""
LOOK_AGAIN_SECONDS = 0.05
"""Time between two probes of engines that may be seen with new weights any moment."""


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
        report_seconds: float = LOAD_SECONDS,
        patience: PausableTimeout | None = None,
        jitter: random.Random | None = None,
    ) -> None:
        if not engines:
            raise ConfigurationError("expected at least one engine, got none: set engine.replicas or engine.urls")
        self._engines: Mapping[str, Engine] = {engine.name: engine for engine in engines}
        if len(self._engines) != len(engines):
            raise ConfigurationError(f"engine.urls names an engine twice: {[e.name for e in engines]}")
        self.jitter = jitter or random.Random()
        stale_seconds = max(STALE_SECONDS, 3 * report_seconds)
        self.router = Router(self._engines, sessions_max, self.jitter.random, stale_seconds)
        self.wait_seconds_max = wait_seconds_max
        self._probe_seconds, self._report_seconds = probe_seconds, report_seconds
        self.patience = patience or PausableTimeout()
        """Timer for limits that stand still while the engines sleep."""
        self._may_sleep = patience is not None
        self._asleep: set[str] = set()
        self._metrics = metrics
        self._placements = {p: metrics.sticky_placements_total.labels(kind=p.value) for p in Placement}
        self._changed = anyio.Event()
        self._poked = {name: anyio.Event() for name in self._engines}
        self._unanswered = dict.fromkeys(self._engines, 0)
        self._reading: set[str] = set()
        """Engines that are being asked for their load."""
        self._waiting: Counter[int] = Counter()
        self._evicted = 0

    async def watch(self) -> None:
        """Probe all engines and read their load until cancelled."""
        async with anyio.create_task_group() as group:
            for engine in self._engines.values():
                group.start_soon(self._watch_one, engine)
            group.start_soon(self._read_loads)

    @asynccontextmanager
    async def lease(
        self, session: str, version_min: int, avoid: Set[str] = frozenset(), tokens: int = 0
    ) -> AsyncIterator[Engine]:
        """An engine for one request of ``session``, with a prompt of so many ``tokens``, released however the block
        ends. An :class:`EngineError` of the block counts against the engine. Raises :class:`NoEngineFit`."""
        lease = await self._acquire(session, version_min, avoid, tokens)
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

    def sampled_with(self, engine: str, version: int, tokens: int = 0) -> None:
        """A reply of so many ``tokens`` bore this policy version: newer knowledge than the last probe's."""
        if tokens:
            self.router.sampled(tokens)
        if version > self.router.engines[engine].version and self.router.stamped(engine, version, _now()):
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

    def reports(self) -> list[EngineReport]:
        """The reports of engines that take requests and have reported lately."""
        return self.router.reports(_now())

    async def _acquire(self, session: str, version_min: int, avoid: Set[str], tokens: int) -> Lease:
        lease = self.router.acquire(session, version_min, _now(), avoid, tokens)
        if lease is None:
            lease = await self._wait_for_lease(session, version_min, avoid, tokens)
        self._placements[lease.placement].inc()
        if lease.move is not None:
            self._metrics.sticky_moves_total.labels(reason=lease.move.value).inc()
        return lease

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
            f"expected an engine with policy version {version_min} or newer within {self.wait_seconds_max:g} s "
            f"(actor.engine_wait_seconds_max), got {self.trouble(version_min)}"
        )

    def _poke(self, version_min: int) -> None:
        """Probe the engines that are not fit at once."""
        for state in self.router.engines.values():
            if not state.breaker.closed or state.version < version_min:
                self._poked[state.name].set()

    async def _watch_one(self, engine: Engine) -> None:
        while True:
            await self._probe(engine)
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

    async def _read_loads(self) -> None:
        """Ask one engine after another, each once in ``report_seconds``, without waiting for the answers."""
        async with anyio.create_task_group() as group:
            while True:
                for engine in list(self._engines.values()):
                    if self.router.engines[engine.name].alive and engine.name not in self._reading:
                        group.start_soon(self._read_load, engine)
                    await anyio.sleep(self._report_seconds / len(self._engines))

    async def _read_load(self, engine: Engine) -> None:
        self._reading.add(engine.name)
        state, asked_at, report = self.router.engines[engine.name], _now(), None
        in_flight = state.in_flight
        try:
            with anyio.move_on_after(PROBE_SECONDS_MAX):
                report = await engine.report()
        except EngineError:
            return
        finally:
            self._reading.discard(engine.name)
        if report is None:
            return
        self._count_prefixes(state.load.report, report)
        self.router.reported(engine.name, report, in_flight, asked_at)
        for kind, requests in (("running", report.running), ("waiting", report.waiting)):
            self._metrics.engine_requests.labels(engine=engine.name, state=kind).set(requests)
        self._metrics.engine_kv_used_ratio.labels(engine=engine.name).set(report.kv_used)

    def _count_prefixes(self, before: EngineReport | None, now: EngineReport) -> None:
        """Add what an engine's counters rose by since its last report (they restart with the engine)."""
        if before is None or now.prefix_queries < before.prefix_queries or now.prefix_hits < before.prefix_hits:
            before = EngineReport()
        queries, hits = now.prefix_queries - before.prefix_queries, now.prefix_hits - before.prefix_hits
        self._metrics.prefix_tokens_total.labels(result="hit").inc(hits)
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
