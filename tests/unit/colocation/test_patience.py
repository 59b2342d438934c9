"""Time limits stand still while the engines sleep, and only then."""

from __future__ import annotations

import anyio
import pytest

from actors.engine.base import PausableTimeout, Sampling
from actors.engine.client import EngineClient
from actors.engine.pool import EnginePool
from actors.metrics import ActorMetrics
from pipeline.errors import EngineUnavailable
from pipeline.runtime.metrics import CollectorRegistry
from tests.support.stub_engine import StubEngine, StubServer

SHORT = 0.15


async def never() -> None:
    await anyio.sleep_forever()


async def test_a_limit_ends_what_takes_too_long_awake() -> None:
    with anyio.fail_after(60), PausableTimeout().limit(0.01) as scope:
        await never()
    assert scope.cancelled_caught


async def test_a_limit_keeps_what_was_left_when_the_engine_fell_asleep() -> None:
    patience = PausableTimeout()
    with patience.limit(100.0) as scope:
        before = scope.deadline - anyio.current_time()
        patience.fell_asleep()
        patience.fell_asleep()
        assert scope.deadline == float("inf")
        patience.woke()
        patience.woke()
        assert 0 < scope.deadline - anyio.current_time() <= before
        assert scope.deadline - anyio.current_time() > 99.0


async def test_a_limit_set_while_asleep_counts_from_waking() -> None:
    patience = PausableTimeout()
    patience.fell_asleep()
    with patience.limit(0.01) as scope:
        with anyio.move_on_after(0.05):
            await never()
        assert not scope.cancel_called
        patience.woke()
        with anyio.move_on_after(5):
            await never()
    assert scope.cancelled_caught


async def test_code_knows_the_time_that_its_innermost_limit_leaves_it() -> None:
    timeout = PausableTimeout()
    with timeout.limit(100.0), PausableTimeout().limit(1000.0):
        assert 900 < PausableTimeout.around()[1] <= 1000
    timeout.fell_asleep()
    with timeout.limit(10.0):
        assert PausableTimeout.around() == (timeout, 10.0)
    with pytest.raises(LookupError):
        PausableTimeout.around()


async def test_a_request_outlives_its_limit_while_the_engine_sleeps() -> None:
    patience = PausableTimeout()
    async with (
        StubServer() as server,
        EngineClient(server.url, request_seconds_max=SHORT, patience=patience) as client,
        anyio.create_task_group() as group,
    ):
        server.sleeping = True
        patience.fell_asleep()
        answers = []

        async def ask() -> None:
            answers.append(await client.generate([1, 2], Sampling(max_tokens=2)))

        group.start_soon(ask)
        with anyio.move_on_after(2 * SHORT):
            await never()
        assert answers == []
        server.sleeping = False
        server.awake.set()
        patience.woke()
    assert len(answers[0].token_ids) == 2


async def test_a_request_to_an_engine_that_is_only_slow_fails_in_time() -> None:
    async with (
        StubServer() as server,
        EngineClient(server.url, request_seconds_max=SHORT, patience=PausableTimeout()) as client,
    ):
        server.sleeping = True
        with anyio.fail_after(60), pytest.raises(EngineUnavailable, match=r"0\.15 s awake"):
            await client.generate([1, 2], Sampling(max_tokens=2))
        server.awake.set()
        server.sleeping = False


async def test_the_pool_takes_a_sleeping_engine_for_well_and_a_dead_one_not_for_asleep() -> None:
    engine, patience = StubEngine(), PausableTimeout()
    metrics = ActorMetrics(CollectorRegistry(), environments=())
    pool = EnginePool([engine], wait_seconds_max=5.0, metrics=metrics, probe_seconds=0.01, patience=patience)
    async with anyio.create_task_group() as group:
        group.start_soon(pool.watch)
        engine.sleeping = True
        with anyio.fail_after(60):
            while not patience.asleep:
                await anyio.sleep(0.005)
            async with pool.lease("s", 0) as leased:
                assert leased is engine
            engine.alive = False
            while patience.asleep:
                await anyio.sleep(0.005)
        group.cancel_scope.cancel()
