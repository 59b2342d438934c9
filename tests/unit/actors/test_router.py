"""The router's invariants under every order of events, and the pool that drives it."""

from __future__ import annotations

import anyio
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from actors.engine.pool import EnginePool, NoEngineFit
from actors.engine.router import Lease, MoveReason, Placement, Router
from pipeline.errors import ConfigurationError, EngineUnavailable
from pipeline.metrics.actor import ActorMetrics
from tests.support.stub_engine import StubEngine

ENGINES = ("a", "b", "c")
SESSIONS_MAX = 4


class RouterMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.router = Router(ENGINES, SESSIONS_MAX)
        self.leases: list[Lease] = []
        self.placed: dict[str, str] = {}

    @rule(engine=st.sampled_from(ENGINES), alive=st.booleans(), version=st.integers(-1, 3))
    def mark(self, engine: str, alive: bool, version: int) -> None:
        self.router.mark(engine, alive=alive, version=version)

    @rule(session=st.sampled_from("stuvwxyz"), version=st.integers(0, 3), avoid=st.sets(st.sampled_from(ENGINES)))
    def acquire(self, session: str, version: int, avoid: set[str]) -> None:
        before = self.router.engine_of(session)
        fit = {e.name for e in self.router.engines.values() if e.fit(version)}
        loads = {name: self.router.engines[name].sessions for name in fit}
        lease = self.router.acquire(session, version, avoid)
        assert (lease is None) == (not fit)
        if lease is None:
            return
        self.leases.append(lease)
        assert lease.engine in fit
        if before in fit and before not in avoid:
            assert lease.engine == before and lease.placement is Placement.STICKY
        if before is None:
            candidates = (fit - avoid) or fit
            assert loads[lease.engine] == min(loads[e] for e in candidates)
            assert lease.placement is Placement.FIRST

    @precondition(lambda self: self.leases)
    @rule(data=st.data(), again=st.booleans())
    def release(self, data: st.DataObject, again: bool) -> None:
        lease = self.leases.pop(data.draw(st.integers(0, len(self.leases) - 1)))
        self.router.release(lease)
        if again:
            self.router.release(lease)

    @rule(session=st.sampled_from("stuvwxyz"))
    def finish(self, session: str) -> None:
        self.router.finish(session)
        assert self.router.engine_of(session) is None

    @invariant()
    def counts_add_up(self) -> None:
        statistics = self.router.statistics()
        for name, engine in self.router.engines.items():
            assert engine.in_flight == sum(lease.engine == name for lease in self.leases)
            assert engine.sessions >= 0
        assert statistics.sessions == sum(statistics.sessions_by_engine.values())
        assert statistics.moves.get(MoveReason.DIED, 0) + statistics.moves.get(
            MoveReason.LAGGING, 0
        ) == statistics.placements.get(Placement.MOVED, 0)
        busy = {lease.session for lease in self.leases}
        assert statistics.sessions <= max(SESSIONS_MAX, len(busy) + SESSIONS_MAX)
        if not self.leases:
            assert statistics.in_flight == 0 and statistics.sessions <= SESSIONS_MAX


TestRouterMachine = RouterMachine.TestCase
TestRouterMachine.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)


def fit_router(*versions: int, sessions_max: int = 100) -> Router:
    router = Router(ENGINES[: len(versions)], sessions_max)
    for name, version in zip(ENGINES, versions, strict=False):
        router.mark(name, alive=True, version=version)
    return router


def test_turns_of_a_session_reach_one_engine_and_sessions_spread_evenly() -> None:
    router = fit_router(0, 0, 0)
    for turn in range(3):
        for session in range(30):
            lease = router.acquire(str(session), 0)
            assert lease is not None and lease.placement is (Placement.FIRST if turn == 0 else Placement.STICKY)
            router.release(lease)
    assert router.statistics().sessions_by_engine == {"a": 10, "b": 10, "c": 10}


def test_session_moves_when_its_engine_lags_and_stays_moved() -> None:
    router = fit_router(3, 3)
    first = router.acquire("s", 3)
    assert first is not None
    router.release(first)
    other = "b" if first.engine == "a" else "a"
    router.mark(other, alive=True, version=4)
    second = router.acquire("s", 4)
    assert second is not None and (second.engine, second.move) == (other, MoveReason.LAGGING)
    router.release(second)
    third = router.acquire("s", 3)
    assert third is not None and third.engine == other


def test_unstamped_engine_is_fit_for_nothing() -> None:
    assert fit_router(-1).acquire("s", 0) is None


def test_least_recently_used_session_is_forgotten_first() -> None:
    router = fit_router(0, sessions_max=2)
    for session in ("old", "new", "old", "newest"):
        lease = router.acquire(session, 0)
        assert lease is not None
        router.release(lease)
    assert router.engine_of("new") is None and router.engine_of("old") == "a"
    assert router.evicted == 1


async def test_lease_is_released_however_the_block_ends(metrics: ActorMetrics) -> None:
    pool = EnginePool([StubEngine()], sessions_max=9, wait_seconds_max=5, metrics=metrics)
    async with anyio.create_task_group() as group:
        group.start_soon(pool.watch)
        with pytest.raises(ValueError):
            async with pool.lease("s", 0):
                raise ValueError
        with anyio.CancelScope() as scope:
            async with pool.lease("s", 0):
                scope.cancel()
                await anyio.sleep_forever()
        group.cancel_scope.cancel()
    assert pool.statistics().in_flight == 0


async def test_wait_for_an_engine_ends_with_what_each_engine_lacks(metrics: ActorMetrics) -> None:
    dead, old = StubEngine("stub://dead"), StubEngine("stub://old", version=2)
    dead.alive = False
    pool = EnginePool([dead, old], sessions_max=9, wait_seconds_max=0.05, metrics=metrics, probe_seconds=0.01)
    async with anyio.create_task_group() as group:
        group.start_soon(pool.watch)
        with pytest.raises(NoEngineFit, match=r"stub://dead .*is dead.*stub://old \(version 2 < 3\)"):
            async with pool.lease("s", 3):
                pass
        group.cancel_scope.cancel()
    assert pool.waiting_for() == ""


async def test_engine_that_came_back_is_used_again_without_waiting_for_the_next_probe(metrics: ActorMetrics) -> None:
    engine = StubEngine()
    pool = EnginePool([engine], sessions_max=9, wait_seconds_max=1000, metrics=metrics, probe_seconds=1000)
    async with anyio.create_task_group() as group:
        group.start_soon(pool.watch)
        async with pool.lease("s", 0) as leased:
            pool.failed(leased.name, EngineUnavailable("gone"))
        with anyio.fail_after(60):
            async with pool.lease("s", 0):
                pass
        engine.version = 1
        with anyio.fail_after(60):
            async with pool.lease("s", 1):
                pass
        group.cancel_scope.cancel()


def test_no_engine_or_one_twice_is_a_configuration_error(metrics: ActorMetrics) -> None:
    for engines in ([], [StubEngine("x"), StubEngine("x")]):
        with pytest.raises(ConfigurationError, match=r"engine\.urls"):
            EnginePool(engines, sessions_max=9, wait_seconds_max=1, metrics=metrics)
