"""The actor's ``main`` over real ZeroMQ and a real engine: exact tokens, versions, metrics, drain, no order lost."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import anyio
import pytest

from actors.process.role import main
from pipeline.config import RunConfig
from pipeline.errors import CallsHang
from pipeline.runtime import plugin_limits
from pipeline.runtime.process import RoleContext, Status
from pipeline.runtime.progress import RoleState
from pipeline.schema import Order, Task, Trajectory, TrajectoryStatus
from pipeline.schema.codec import decode_trajectory
from pipeline.schema.orders import encode_request
from pipeline.transport.hub import Hub
from pipeline.transport.messages import EventKind, Kind, WireMessage
from pipeline.transport.zeromq import open_hub
from tests.support.running_engine import start_engine, tiny_engine

SECONDS_MAX = 120


@pytest.fixture
async def engine_port(tmp_path: Path) -> AsyncIterator[int]:
    """An embedded engine with a tiny model, stamped as version 3."""
    config = tiny_engine(tmp_path)
    async with start_engine(config) as engine:
        url, body = f"{engine.url}/update_weight_version", {"new_version": "3"}
        async with aiohttp.ClientSession() as session, session.post(url, json=body) as response:
            assert response.status == 200
        yield engine.config.engine.port


def settings(folder: Path, engine_port: int, concurrency: int, **environment: Any) -> dict[str, Any]:
    return {
        "run": {"name": "run", "directory": str(folder)},
        "model": {"source": "tiny", "max_length": 128},
        "engine": {"kind": "embedded", "port": engine_port},
        "sampling": {"max_tokens": 2},
        "environments": {"played": environment},
        "actor": {"concurrency": concurrency},
    }


def orders_of(n: int) -> list[Order]:
    return [Order(f"g{i}.0.0", f"g{i}", Task(f"played/{i}", "played", i), 0, 0, 3, 30.0) for i in range(n)]


async def answers(hub: Hub, orders: list[Order], found: dict[str, Trajectory], stop: anyio.Event) -> None:
    """Issue the orders and take their trajectories; one that was aborted is issued again, to the next process."""
    left = {order.order_id for order in orders}
    while left:
        event = await hub.receive()
        if event.kind is EventKind.PEER_UP:
            await hub.send(event.peer, WireMessage(Kind.WELCOME, {"credit_bytes": 10**6, "policy_version": 3}))
            for order in orders:
                await hub.send(event.peer, WireMessage(Kind.ORDER, encode_request(order)))
        elif event.kind is EventKind.MESSAGE and event.message is not None and event.message.kind is Kind.TRAJECTORY:
            trajectory = decode_trajectory(event.message.frames)
            if trajectory.status is not TrajectoryStatus.ABORTED:
                found[trajectory.trajectory_id] = trajectory
                left.discard(trajectory.trajectory_id)
            ack = {"trajectory_ids": [trajectory.trajectory_id], "refused": {}}
            await hub.send(event.peer, WireMessage(Kind.ACK, ack))
    stop.set()


@pytest.mark.slow
async def test_actor_plays_real_orders_on_a_real_engine_and_drains(tmp_path: Path, engine_port: int) -> None:
    raw = settings(tmp_path, engine_port, 8, name="number_guess", options={"compact": True, "turns": 4})
    found: dict[str, Trajectory] = {}
    async with open_hub(RunConfig.model_validate(raw)) as hub:
        ctx = RoleContext(
            "actor-0", 0, RunConfig.model_validate({**raw, "stage": {"address": hub.address}}), registry=None
        )
        with anyio.fail_after(SECONDS_MAX):
            async with anyio.create_task_group() as group:
                group.start_soon(answers, hub, orders_of(24), found, ctx.stopping)
                await main(ctx)
    assert len(found) == 24
    for trajectory in found.values():
        assert trajectory.status is TrajectoryStatus.COMPLETE, trajectory.failure
        assert trajectory.version_range() == (3, 3) and trajectory.engine.backend == "embedded"
        assert len(list(trajectory.branches())) == 1 and trajectory.turns[-1].signals.keys() == {"solved"}
    labels = {"env": "played", "outcome": "complete"}
    assert ctx.registry.get_sample_value("afterplay_actor_trajectories_total", labels) == 24
    assert ctx.status == Status(RoleState.STOPPING, "", {"playing": 0, "unacknowledged": 0})


HANGS = """
import threading
from dataclasses import dataclass
from actors.environments import Environment, Episode, Reply, Step
from pipeline.schema import Message

class Hangs(Environment):
    blocking = True

    def start(self, task):
        if task.seed % 4 == 3:
            threading.Event().wait()
        return Says(task.seed)

class Says(Episode):
    messages = (Message("user", "1"),)

    def __init__(self, seed):
        self.seed = seed

    def step(self, reply):
        if self.seed % 4 == 1:
            threading.Event().wait()
        return Step(reward=1.0, done=True)
"""


@pytest.mark.slow
async def test_an_actor_whose_environment_hangs_goes_on_is_started_again_and_answers_every_order(
    tmp_path: Path, engine_port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Half of the orders meet a call that never returns: four of them would take all slots for ever."""
    monkeypatch.setattr(plugin_limits, "GRACE_SECONDS", 0.2)
    monkeypatch.setattr("actors.process.role.DRAIN_SECONDS_MAX", 1.0)
    (tmp_path / "hangs.py").write_text(HANGS)
    raw = settings(tmp_path, engine_port, 4, name=f"{tmp_path / 'hangs.py'}:Hangs", step_seconds_max=0.5)
    found: dict[str, Trajectory] = {}
    orders = orders_of(24)
    starts, told = 0, list[str]()
    async with open_hub(RunConfig.model_validate(raw)) as hub:
        config = RunConfig.model_validate({**raw, "stage": {"address": hub.address}})
        with anyio.fail_after(SECONDS_MAX):
            while len(found) < len(orders):
                ctx = RoleContext("actor-0", 0, config)
                starts += 1
                try:
                    async with anyio.create_task_group() as group:
                        left = [order for order in orders if order.order_id not in found]
                        group.start_soon(answers, hub, left, found, ctx.stopping)
                        await main(ctx)
                except* CallsHang as errors:
                    told += [str(error) for error in errors.exceptions]
                    assert "in a thread, which cannot be ended (" in ctx.notices[0]
    for i, order in enumerate(orders):
        trajectory = found[order.order_id]
        if i % 2:
            assert trajectory.failure is not None and trajectory.failure.kind == "TimeoutError"
            assert trajectory.failure.boundary == ("environment step" if i % 4 == 1 else "environment start")
    well = [found[order.order_id].status is TrajectoryStatus.COMPLETE for order in orders[::2]]
    assert all(well), "the time of a call begins when it has a slot"
    assert told and starts == len(told) + 1
    assert all("environments.played: 4 blocking calls hang" in text and "hangs.py, line" in text for text in told)
