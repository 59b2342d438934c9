"""Every order is answered exactly once, or cancelled, over connections that break and processes that stop."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import anyio
import pytest

from actors.engine.base import EngineReport
from actors.process.actor import OVERDUE_SECONDS, Actor
from actors.rollout.services import Services
from pipeline.runtime.progress import RoleState
from pipeline.schema import Order, TrajectoryStatus
from pipeline.schema.codec import Limits
from pipeline.transport.messages import Kind, WireMessage
from tests.support.memory_transport import MemoryLink, MemoryNetwork
from tests.support.routing import in_flight
from tests.support.stub_engine import StubEngine
from tests.support.virtual_time import run_virtually
from tests.unit.actors.stage import Stage

MakeServices = Callable[..., Services]
MakeOrder = Callable[..., Order]


@asynccontextmanager
async def running_actor(
    services: Services,
    *,
    slots: int = 8,
    slots_min: int | None = None,
    credit_bytes: int = 10**6,
    limits: Limits | None = None,
    outbox: int = 10**7,
) -> AsyncIterator[tuple[Stage, Actor, MemoryNetwork]]:
    stage = Stage(credit_bytes=credit_bytes)
    network = stage.network
    async with stage.hub, MemoryLink(network, "actor-0") as link, anyio.create_task_group() as group:
        group.start_soon(stage.serve)
        limits = limits or Limits()
        actor = Actor(services, link, slots=slots, slots_min=slots_min, outbox_bytes_max=outbox, limits=limits)
        group.start_soon(services.pool.watch)
        group.start_soon(actor.run)
        await stage.until(lambda: bool(stage.hellos))
        yield stage, actor, network
        group.cancel_scope.cancel()


async def until(condition: Callable[[], bool]) -> None:
    with anyio.fail_after(60):
        while not condition():
            await anyio.lowlevel.checkpoint()


async def test_each_order_is_answered_by_one_trajectory_of_its_id(
    make_services: MakeServices, make_order: MakeOrder
) -> None:
    engine = StubEngine(latency_seconds=0.001)
    orders = [make_order(seed) for seed in range(50)]
    async with running_actor(make_services([engine]), slots=8) as (stage, actor, _):
        await stage.order(*orders, orders[0])
        await stage.until(lambda: len(stage.received) == 50)
        await until(lambda: actor.unacknowledged == 0)
        assert actor.holding == []
    assert set(stage.received.values()) == {1}
    assert engine.in_flight_max <= 8
    assert stage.hellos[0]["slots"] == 8 and stage.hellos[0]["role"] == "actor"


async def test_unacknowledged_trajectories_are_sent_again_after_a_reconnection(
    make_services: MakeServices, make_order: MakeOrder
) -> None:
    async with running_actor(make_services([StubEngine()])) as (stage, actor, network):
        stage.acknowledging = False
        await stage.order(make_order(1), make_order(2))
        await stage.until(lambda: len(stage.received) == 2)
        stage.acknowledging = True
        network.disconnect("actor-0")
        await stage.until(lambda: all(n == 2 for n in stage.received.values()))
        assert sorted(stage.hellos[1]["holding"]) == sorted(stage.received)
        await until(lambda: actor.unacknowledged == 0)


async def test_full_outbox_takes_no_new_order_and_credit_is_never_exceeded(
    make_services: MakeServices, make_order: MakeOrder
) -> None:
    engine = StubEngine()
    async with running_actor(make_services([engine]), slots=1, credit_bytes=1, outbox=1) as (stage, actor, _):
        stage.acknowledging = False
        await stage.order(*(make_order(seed) for seed in range(5)))
        await stage.until(lambda: len(stage.received) == 1)
        await until(lambda: actor.unacknowledged == 1 and actor.in_flight == 0)
        assert "outbox" in actor.doing()[1]
        for n in range(1, 5):
            await stage.acknowledge(*stage.received)
            await stage.until(lambda n=n: len(stage.received) == n + 1)


async def test_the_time_that_an_actor_is_blocked_is_counted_while_it_is_blocked(
    make_services: MakeServices, make_order: MakeOrder
) -> None:
    services = make_services([StubEngine()])
    async with running_actor(services, slots=2, credit_bytes=1) as (stage, actor, _):
        stage.acknowledging = False
        await stage.order(make_order(0), make_order(1))
        await until(lambda: len(stage.received) == 1 and actor.unacknowledged == 2)
        counted = []
        for _ in range(2):
            actor.count_blocked()
            counted.append(services.metrics.send_blocked_seconds_total._value.get())
        assert 0 < counted[0] < counted[1]


def test_rollouts_in_flight_follow_the_load_of_the_engines_and_the_stage_is_told(
    make_services: MakeServices, make_order: MakeOrder
) -> None:
    async def main() -> None:
        engine = StubEngine(latency_seconds=2.0)
        engine.reported = EngineReport(running=4)
        services = make_services([engine])
        async with running_actor(services, slots=16, slots_min=4) as (stage, actor, network):
            assert stage.hellos[0]["slots"] == 4
            await stage.order(*(make_order(seed) for seed in range(160)))
            await stage.until(lambda: stage.slots[-2:] == [8, 16])
            assert engine.in_flight_max <= 16
            network.disconnect("actor-0")
            await stage.until(lambda: len(stage.hellos) == 2)
            assert stage.hellos[1]["slots"] == 16, "and told again after a reconnection"
            engine.reported = EngineReport(running=16, waiting=20)
            await stage.until(lambda: stage.slots[-1] == 12)
            engine.reported = None
            await stage.until(lambda: actor.in_flight <= 12)
            engine.in_flight_max = 0
            answered = len(stage.received)
            await stage.until(lambda: len(stage.received) >= answered + 24)
            assert engine.in_flight_max == 12

    run_virtually(main)


async def test_cancelled_orders_send_nothing(make_services: MakeServices, make_order: MakeOrder) -> None:
    engine = StubEngine(latency_seconds=30)
    orders = [make_order(seed) for seed in range(4)]
    async with running_actor(make_services([engine]), slots=2) as (stage, actor, _):
        await stage.order(*orders)
        await until(lambda: engine.in_flight == 2)
        await stage.hub.send(
            "actor-0", WireMessage(Kind.CANCEL, {"order_ids": [o.order_id for o in orders], "reason": "x"})
        )
        await until(lambda: actor.holding == [])
        await stage.order(make_order(9))
        await until(lambda: engine.in_flight == 1)
    assert not stage.received


async def test_a_rollout_that_does_not_end_long_after_its_time_limit_is_noticed(
    make_services: MakeServices, make_order: MakeOrder
) -> None:
    async with running_actor(make_services([StubEngine(latency_seconds=30.0)]), slots=2) as (stage, actor, _):
        await until(lambda: actor.connected)
        assert actor.doing() == (RoleState.WAITING_FOR_ORDERS, "")
        order = make_order(1)
        await stage.order(order)
        await until(lambda: actor.in_flight == 1)
        assert actor.doing() == (RoleState.PLAYING, "")
        now = time.monotonic()
        assert not actor.overdue(now + 2 * order.seconds_max)
        assert actor.overdue(now + 2 * order.seconds_max + OVERDUE_SECONDS + 1)
        header = {"order_ids": [order.order_id], "reason": "x"}
        await stage.hub.send("actor-0", WireMessage(Kind.CANCEL, header))
        await until(lambda: actor.in_flight == 0)
        assert not actor.overdue(now + 1e9)


async def test_gauges_follow_what_is_played(make_services: MakeServices, make_order: MakeOrder) -> None:
    services = make_services([StubEngine(latency_seconds=30.0)])
    async with running_actor(services, slots=4) as (stage, actor, _):
        await stage.order(*(make_order(seed) for seed in range(3)))
        await until(lambda: actor.in_flight == 3)
        assert services.metrics.inflight_episodes._value.get() == 3
        await actor.drain(0.0)
        assert services.metrics.inflight_episodes._value.get() == actor.in_flight == 0


async def test_drain_lets_short_episodes_finish_and_aborts_the_rest(
    make_services: MakeServices, make_order: MakeOrder
) -> None:
    engine = StubEngine(latency_seconds=0.05)
    stuck = StubEngine("stub://stuck", latency_seconds=30)
    services = make_services([engine, stuck])
    async with running_actor(services, slots=2) as (stage, actor, network):
        await stage.order(*(make_order(seed) for seed in range(3)))
        await until(lambda: engine.in_flight == 1 and stuck.in_flight == 1)
        assert await actor.drain(2.0)
        assert stage.slots == [0], "so that the stage sends no more"
        network.disconnect("actor-0")
        await stage.until(lambda: len(stage.hellos) == 2)
        assert stage.hellos[1]["slots"] == 0, "nor after a reconnection"
    outcomes = Counter(t.status for t in stage.trajectories.values())
    assert outcomes == {TrajectoryStatus.COMPLETE: 1, TrajectoryStatus.ABORTED: 2}
    assert in_flight(services.pool.router) == 0


async def test_drain_without_a_stage_ends_in_time(make_services: MakeServices, make_order: MakeOrder) -> None:
    async with running_actor(make_services([StubEngine()])) as (stage, actor, _network):
        stage.acknowledging = False
        await stage.order(make_order())
        await stage.until(lambda: len(stage.received) == 1)
        with anyio.fail_after(60):
            assert not await actor.drain(0.1, flush_seconds_max=0.1)


async def test_trajectory_over_the_limit_is_answered_as_an_error_that_names_the_limit(
    make_services: MakeServices, make_order: MakeOrder
) -> None:
    async with running_actor(make_services([StubEngine()]), limits=Limits(tokens_max=3)) as (stage, _actor, _):
        await stage.order(make_order())
        await stage.until(lambda: len(stage.received) == 1)
    trajectory = next(iter(stage.trajectories.values()))
    assert trajectory.status is TrajectoryStatus.ERROR and trajectory.failure is not None
    assert "stage.tokens_max" in trajectory.failure.message


@pytest.mark.parametrize(
    "message",
    [
        WireMessage(Kind.ORDER, {"order_id": "x"}),
        WireMessage(Kind.ORDER, {"slot": "one"}),
        WireMessage(Kind.CANCEL, {}),
        WireMessage(Kind.ACK, {"refused": []}),
        WireMessage(Kind.PLAN, {}),
    ],
)
async def test_messages_that_are_not_understood_do_not_stop_the_actor(
    make_services: MakeServices, make_order: MakeOrder, message: WireMessage
) -> None:
    async with running_actor(make_services([StubEngine()])) as (stage, _actor, _):
        await stage.hub.send("actor-0", message)
        await stage.order(make_order())
        await stage.until(lambda: len(stage.received) == 1)
