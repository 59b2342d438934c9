"""An actor of several stages: places are divided, answers go home, a lost stage stops no other."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import anyio
import pytest
from hypothesis import given
from hypothesis import strategies as st

from actors.engine.stub import StubEngine
from actors.loop import Services
from actors.sharded import ShardedActor, shares
from pipeline.schema import Order
from pipeline.transport.base import Limits
from pipeline.transport.memory import MemoryLink
from tests.unit.actors.stage import Stage

MakeServices = Callable[..., Services]
MakeOrder = Callable[..., Order]


@given(st.integers(1, 500), st.integers(1, 8), st.integers(0, 9))
def test_places_are_divided_evenly_and_none_is_lost(places: int, n: int, index: int) -> None:
    parts = shares(places, n, index)
    assert sum(parts) == places and max(parts) - min(parts) <= 1
    together = [sum(column) for column in zip(*(shares(places, n, index + i) for i in range(n)), strict=True)]
    assert set(together) == {places}


@asynccontextmanager
async def playing(services: Services, places: int) -> AsyncIterator[tuple[ShardedActor, Stage, Stage]]:
    one, two = Stage(), Stage()
    async with (
        one.hub, two.hub, MemoryLink(one.network, "actor-0") as a, MemoryLink(two.network, "actor-0") as b,
        anyio.create_task_group() as group,
    ):  # fmt: skip
        actor = ShardedActor(services, [a, b], places=places, outbox_bytes_max=10**7, limits=Limits())
        for task in (one.serve, two.serve, services.pool.watch, actor.run):
            group.start_soon(task)
        for stage in (one, two):
            await stage.until(lambda s=stage: bool(s.hellos))
        yield actor, one, two
        group.cancel_scope.cancel()


async def test_each_stage_gets_the_answers_to_its_own_orders(
    make_services: MakeServices, make_order: MakeOrder
) -> None:
    engine = StubEngine(latency_seconds=0.001)
    services = make_services([engine])
    orders = [make_order(seed) for seed in range(40)]
    async with playing(services, places=5) as (actor, one, two):
        assert [[hello["slots"] for hello in stage.hellos] for stage in (one, two)] == [[3], [2]]
        await one.order(*orders[:20])
        await two.order(*orders[20:])
        for stage, part in ((one, orders[:20]), (two, orders[20:])):
            await stage.until(lambda s=stage: len(s.received) == 20)
            assert stage.received == dict.fromkeys((order.order_id for order in part), 1)
        assert engine.in_flight_max <= 5
        assert await actor.drain(1.0)
    assert (actor.playing, actor.unacknowledged) == (0, 0)


async def test_a_lost_stage_does_not_stop_the_other_and_is_served_again(
    make_services: MakeServices, make_order: MakeOrder
) -> None:
    async with playing(make_services([StubEngine()]), places=4) as (_, one, two):
        two.network.disconnect("actor-0")
        await one.order(*(make_order(seed) for seed in range(10)))
        await one.until(lambda: len(one.received) == 10)
        await two.until(lambda: len(two.hellos) == 2)
        await two.order(make_order(99))
        await two.until(lambda: len(two.received) == 1)


async def test_gauges_are_sums_over_the_stages(make_services: MakeServices, make_order: MakeOrder) -> None:
    services = make_services([StubEngine(latency_seconds=30.0)])
    async with playing(services, places=4) as (actor, one, two):
        await one.order(make_order(1), make_order(2))
        await two.order(make_order(3))
        with anyio.fail_after(60):
            while actor.playing < 3:
                await anyio.lowlevel.checkpoint()
        assert services.metrics.inflight_episodes._value.get() == 3
        await actor.drain(0.0)
        assert services.metrics.inflight_episodes._value.get() == actor.playing == 0


@pytest.mark.parametrize("places", [2, 7])
async def test_waiting_names_the_stage_only_where_they_differ(make_services: MakeServices, places: int) -> None:
    async with playing(make_services([StubEngine()]), places=places) as (actor, _, _two):
        with anyio.fail_after(60):
            while "replay stage" in actor.waiting_for():
                await anyio.lowlevel.checkpoint()
        assert actor.waiting_for() == "orders"
