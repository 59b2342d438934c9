"""The router's invariants under every order of events, and the pool that drives it."""

from __future__ import annotations

import itertools
import random

import anyio
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from actors.engine.base import EngineReport
from actors.engine.pool import EnginePool, NoEngineFit
from actors.engine.router import Lease, MoveReason, Placement, Router
from actors.metrics import ActorMetrics
from pipeline.errors import ConfigurationError, EngineGone
from tests.support.routing import engine_of, in_flight, sessions_by_engine
from tests.support.stub_engine import StubEngine

ENGINES = ("a", "b", "c")
SESSIONS_MAX = 4


def still() -> float:
    return 0.5


class RouterMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.router = Router(ENGINES, SESSIONS_MAX, random.Random(0).random)
        self.leases: list[Lease] = []
        self.now = 0.0
        self.unprobed = set(ENGINES)
        """Engines that joined, or leave, and were not probed since."""

    @rule(engine=st.sampled_from(ENGINES))
    def join(self, engine: str) -> None:
        if engine not in self.members:
            self.unprobed.add(engine)
        self.router.joined(engine)

    @rule(engine=st.sampled_from(ENGINES))
    def leave(self, engine: str) -> None:
        self.router.left(engine)

    @rule()
    def forget_drained(self) -> None:
        leaving = {e.name for e in self.router.engines.values() if e.leaving}
        busy = {lease.engine for lease in self.leases}
        gone = set(self.router.forget_drained())
        assert gone <= leaving - busy

    @property
    def members(self) -> set[str]:
        return {state.name for state in self.router.members}

    @rule(seconds=st.floats(0, 20))
    def wait(self, seconds: float) -> None:
        self.now += seconds

    @rule(engine=st.sampled_from(ENGINES), healthy=st.booleans(), version=st.integers(-1, 3))
    def probe(self, engine: str, healthy: bool, version: int) -> None:
        if engine not in self.members:
            return
        self.unprobed -= {engine} if healthy else set()
        self.router.probed(engine, self.now, healthy=healthy, version=version, problem="" if healthy else "no")

    @rule(
        engine=st.sampled_from(ENGINES),
        running=st.integers(0, 200),
        waiting=st.sampled_from([0, 0, 50]),
        sampled=st.integers(0, 10**6),
    )
    def report(self, engine: str, running: int, waiting: int, sampled: int) -> None:
        if engine not in self.members:
            return
        own = self.router.engines[engine].in_flight
        self.router.engines[engine].load.reported(EngineReport(running, waiting, sampled=sampled), own, self.now)

    @rule(
        session=st.sampled_from("stuvwxyz"),
        version=st.integers(0, 3),
        avoid=st.sets(st.sampled_from(ENGINES)),
        tokens=st.integers(0, 5000),
    )
    def acquire(self, session: str, version: int, avoid: set[str], tokens: int) -> None:
        before = engine_of(self.router, session)
        busy = any(lease.session.name == session for lease in self.leases)
        fit = {e.name for e in self.router.engines.values() if e.fit(version, self.now)}
        sessions = {name: state.sessions for name, state in self.router.engines.items()}
        closed = {e.name for e in self.router.engines.values() if e.breaker.closed}
        doubted = {e.name for e in self.router.engines.values() if e.breaker.doubted and not e.leaving}
        spreading = self.router.spreading(version, self.now) and before not in fit
        lease = self.router.acquire(session, version, self.now, avoid, tokens)
        assert (lease is None) == (not fit or spreading)
        if lease is None:
            return
        self.leases.append(lease)
        assert lease.engine in fit <= self.members and lease.engine not in self.unprobed
        assert self.router.engines[lease.engine].version >= version
        assert lease.trial == (lease.engine not in closed)
        after = engine_of(self.router, session)
        if before is None:
            assert lease.placement is Placement.FIRST and lease.engine not in (avoid if fit - avoid else ())
        elif before in doubted - fit:
            assert lease.placement is Placement.ELSEWHERE and after == before != lease.engine, "doubt moves nothing"
        elif before not in fit:
            assert lease.placement is Placement.MOVED and after == lease.engine != before
            assert (lease.move is MoveReason.LEFT) == (before not in self.members)
        elif lease.move is MoveReason.RETURNED:
            assert not busy, "a session comes back between two turns"
            assert sessions[lease.engine] < sessions[before], "and only for balance"
        elif lease.move is MoveReason.BUSIER:
            assert not busy, "a session moves between two turns"
            assert before not in avoid and lease.engine in closed - avoid - {before}
        else:
            assert after == before, "what happens to one request moves no session"
            assert lease.placement is (Placement.STICKY if lease.engine == before else Placement.ELSEWHERE)
            assert not (before in avoid and lease.engine == before and fit - avoid)

    @precondition(lambda self: self.leases)
    @rule(
        data=st.data(),
        again=st.booleans(),
        outcome=st.sampled_from(["answered", "failed", "failed", "down", "cancelled"]),
    )
    def release(self, data: st.DataObject, again: bool, outcome: str) -> None:
        lease = self.leases.pop(data.draw(st.integers(0, len(self.leases) - 1)))
        if outcome == "answered":
            self.router.answered(lease, self.now)
        elif outcome != "cancelled":
            self.router.failed(lease, self.now, "HTTP 500", down=outcome == "down")
        self.router.release(lease)
        if again:
            self.router.release(lease)

    @rule(session=st.sampled_from("stuvwxyz"))
    def finish(self, session: str) -> None:
        self.router.finish(session)
        assert engine_of(self.router, session) is None

    @invariant()
    def counts_add_up(self) -> None:
        assert {lease.engine for lease in self.leases} <= self.router.engines.keys(), "a request in flight is forgotten"
        for name, engine in self.router.engines.items():
            assert engine.leaving == (name not in self.members)
            assert engine.in_flight == sum(lease.engine == name for lease in self.leases)
            assert engine.sessions >= 0
        sessions = len(self.router.sessions)
        assert sessions == sum(sessions_by_engine(self.router).values())
        moved = sum(n for reason, n in self.router.moves.items() if reason is not MoveReason.EVICTED)
        assert moved == self.router.placements[Placement.MOVED]
        busy = {lease.session.name for lease in self.leases}
        assert sessions <= max(SESSIONS_MAX, len(busy) + SESSIONS_MAX)
        if not self.leases:
            assert in_flight(self.router) == 0 and sessions <= SESSIONS_MAX


TestRouterMachine = RouterMachine.TestCase
TestRouterMachine.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)


def fit_router(*versions: int, sessions_max: int = 100) -> Router:
    router = Router(ENGINES[: len(versions)], sessions_max, still)
    for name, version in zip(ENGINES, versions, strict=False):
        router.probed(name, 0.0, healthy=True, version=version)
    return router


def turn(router: Router, session: str, now: float = 0.0, outcome: str = "answered", version_min: int = 0) -> Lease:
    """One request from its lease to its end."""
    lease = router.acquire(session, version_min, now)
    assert lease is not None
    if outcome == "answered":
        router.answered(lease, now)
    else:
        router.failed(lease, now, "HTTP 500")
    router.release(lease)
    return lease


def test_turns_of_a_session_reach_one_engine_and_sessions_spread_evenly() -> None:
    router = fit_router(0, 0, 0)
    for number in range(3):
        for session in range(30):
            lease = turn(router, str(session))
            assert lease.placement is (Placement.FIRST if number == 0 else Placement.STICKY)
    assert sessions_by_engine(router) == {"a": 10, "b": 10, "c": 10}


def test_session_moves_when_its_engine_lags_and_stays_moved() -> None:
    router = fit_router(3, 3)
    first = router.acquire("s", 3, 0.0)
    assert first is not None
    router.release(first)
    other = "b" if first.engine == "a" else "a"
    router.stamped(other, 4, -10.0)
    second = router.acquire("s", 4, 0.0)
    assert second is not None and (second.engine, second.move) == (other, MoveReason.LAGGING)
    router.release(second)
    third = router.acquire("s", 3, 0.0)
    assert third is not None and third.engine == other


def test_unstamped_engine_is_fit_for_nothing() -> None:
    assert fit_router(-1).acquire("s", 0, 0.0) is None


def test_least_recently_used_session_is_forgotten_first() -> None:
    router = fit_router(0, sessions_max=2)
    for session in ("old", "new", "old", "newest"):
        lease = router.acquire(session, 0, 0.0)
        assert lease is not None
        router.release(lease)
    assert engine_of(router, "new") is None and engine_of(router, "old") == "a"
    assert router.moves[MoveReason.EVICTED] == 1


def two_engines() -> Router:
    """A hundred conversations on each of two engines."""
    router = fit_router(0, 0, sessions_max=1000)
    for session in range(200):
        turn(router, str(session))
    assert balance(router) == (100, 100)
    return router


def balance(router: Router) -> tuple[int, ...]:
    return tuple(sessions_by_engine(router).values())


def test_failed_request_is_made_elsewhere_and_no_conversation_moves() -> None:
    router = two_engines()
    lease = turn(router, "0", outcome="failed")
    again = router.acquire("0", 0, 0.0, {lease.engine})
    assert again is not None and again.placement is Placement.ELSEWHERE and again.engine != lease.engine
    router.release(again)
    assert balance(router) == (100, 100)
    for session in range(200):
        assert turn(router, str(session)).placement is Placement.STICKY
    assert balance(router) == (100, 100)


def test_engine_that_keeps_failing_loses_its_conversations_and_gets_its_share_back_slowly() -> None:
    router, draw, now = two_engines(), random.Random(3), 0.0

    def turns(seconds: float, failure_rate: float) -> list[tuple[int, ...]]:
        """A turn of a tenth of all conversations every 0.5 s; the balance after each."""
        nonlocal now
        seen, until = [], now + seconds
        while now < until:
            now += 0.5
            for session in draw.sample(range(200), 20):
                lease = router.acquire(str(session), 0, now)
                assert lease is not None
                if lease.engine == "a" and draw.random() < failure_rate:
                    router.failed(lease, now, "HTTP 500")
                else:
                    router.answered(lease, now)
                router.release(lease)
            seen.append(balance(router))
        return seen

    turns(120, 0.3)
    assert not router.engines["a"].breaker.closed or balance(router)[0] < 50
    after = turns(60, 0.0)
    assert after[-1] == (100, 100)
    gains = [b[0] - a[0] for a, b in itertools.pairwise(after)]
    assert max(gains) <= 10, "at most its share in ten seconds"
    settled = dict(router.moves)
    turns(30, 0.0)
    assert router.moves == settled, "no conversation moves once they are balanced"


def test_engine_that_starts_late_gets_new_conversations_alone() -> None:
    router = Router(ENGINES[:2], 1000, still)
    router.probed("a", 0.0, healthy=True, version=0)
    for session in range(50):
        turn(router, str(session))
    router.probed("b", 10.0, healthy=True, version=0)
    for session in range(100):
        turn(router, str(session), 30.0)
    assert balance(router) == (50, 50) and not router.moves


def test_conversations_return_to_a_restarted_engine_between_turns_as_far_as_balance_needs() -> None:
    router = two_engines()
    router.probed("a", 1.0, healthy=False, problem="connection refused")
    for session in range(200):
        turn(router, str(session), 2.0)
    assert balance(router) == (0, 200)
    router.probed("a", 10.0, healthy=True, version=0)
    in_a_turn = router.acquire("0", 0, 10.0)
    assert in_a_turn is not None
    counts = []
    for step in range(30):
        now = 10.0 + 0.5 * step
        for session in range(200):
            turn(router, str(session), now)
        counts.append(balance(router)[0])
        assert engine_of(router, "0") == "b", "a session with a request in flight stays"
    assert counts == sorted(counts) and counts[-1] == 100
    assert counts[1] <= 10 and counts[9] <= 50
    assert router.moves[MoveReason.RETURNED] == 100


def test_an_engine_that_joins_gets_its_share_slowly_and_gives_it_back_when_it_leaves() -> None:
    router, now = fit_router(0, sessions_max=1000), 0.0
    for session in range(200):
        turn(router, str(session))
    router.joined("b")
    assert all(turn(router, str(session), now).engine == "a" for session in range(200))
    router.probed("b", now, healthy=True, version=0)
    shares = []
    for _ in range(30):
        now += 0.5
        for session in range(200):
            turn(router, str(session), now)
        shares.append(router.engines["b"].sessions)
    assert shares == sorted(shares) and shares[-1] == 100 and shares[1] <= 10
    in_a_turn = next(str(session) for session in range(200) if engine_of(router, str(session)) == "b")
    lease = router.acquire(in_a_turn, 0, now)
    assert lease is not None and lease.engine == "b"
    router.left("b")
    for session in range(200):
        assert turn(router, str(session), now).engine == "a"
    assert router.forget_drained() == (), "a request is under way there"
    router.answered(lease, now)
    router.release(lease)
    assert router.forget_drained() == ("b",)
    assert balance(router) == (200,) and router.moves[MoveReason.LEFT] == 100


def test_an_engine_that_left_and_comes_back_is_probed_before_it_gets_anything() -> None:
    router = fit_router(0, 0)
    lease = router.acquire("s", 0, 0.0)
    assert lease is not None
    router.left(lease.engine)
    router.joined(lease.engine)
    assert turn(router, "t").engine != lease.engine
    router.release(lease)
    assert turn(router, "s").engine != lease.engine
    router.probed(lease.engine, 0.0, healthy=True, version=1)
    assert turn(router, "u", 100.0, version_min=1).engine == lease.engine


async def test_engines_come_and_go_and_no_request_is_lost(metrics: ActorMetrics) -> None:
    engines = {name: StubEngine(f"stub://{name}") for name in "abc"}
    pool = EnginePool(
        connect=lambda url: engines[url[-1]], wait_seconds_max=1000, metrics=metrics,
        probe_seconds=0.01, report_seconds=0.01,
    )  # fmt: skip

    async def leased() -> str:
        async with pool.lease("s", 0) as engine:
            return engine.name

    async with anyio.create_task_group() as group:
        group.start_soon(pool.watch)
        assert pool.reason(0) == "no engine: none has joined (engine.discovery)"
        with anyio.fail_after(60):
            async with anyio.create_task_group() as waiting:
                waiting.start_soon(leased)
                await anyio.lowlevel.checkpoint()
                pool.set_engines(["stub://a"])
            async with pool.lease("s", 0) as engine:
                assert engine.name == "stub://a"
                pool.set_engines(["stub://b"])
                assert await leased() == "stub://b"
                assert not engines["a"].closed, "a request is under way there"
            while not engines["a"].closed:
                await anyio.sleep(0.001)
            assert set(pool.router.engines) == {"stub://b"}
            pool.set_engines(["stub://b", "stub://c"])
            pool.set_engines(["stub://c"])
            assert await leased() == "stub://c"
            seen = {
                label for sample in metrics.engine_requests.collect()[0].samples for label in [sample.labels["engine"]]
            }
            assert "stub://a" not in seen
        group.cancel_scope.cancel()


async def test_lease_is_released_however_the_block_ends(metrics: ActorMetrics) -> None:
    pool = EnginePool([StubEngine()], wait_seconds_max=5, metrics=metrics)
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
    assert in_flight(pool.router) == 0


async def test_wait_for_an_engine_ends_with_what_each_engine_lacks(metrics: ActorMetrics) -> None:
    dead, old = StubEngine("stub://dead"), StubEngine("stub://old", version=2)
    dead.alive = False
    pool = EnginePool([dead, old], wait_seconds_max=0.05, metrics=metrics, probe_seconds=0.01)
    async with anyio.create_task_group() as group:
        group.start_soon(pool.watch)
        with pytest.raises(NoEngineFit, match=r"stub://dead .*is dead.*stub://old \(version 2 < 3\)"):
            async with pool.lease("s", 3):
                pass
        group.cancel_scope.cancel()
    assert pool.waiting_reason() == ""


async def test_engine_that_came_back_is_used_again_without_waiting_for_the_next_probe(metrics: ActorMetrics) -> None:
    engine = StubEngine()
    pool = EnginePool([engine], wait_seconds_max=1000, metrics=metrics, probe_seconds=1000)
    async with anyio.create_task_group() as group:
        group.start_soon(pool.watch)
        with pytest.raises(EngineGone):
            async with pool.lease("s", 0):
                raise EngineGone("gone")
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
            EnginePool(engines, wait_seconds_max=1, metrics=metrics)
