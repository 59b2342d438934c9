"""The asynchronous shell over the in-memory transport: orders, acknowledgements, deliveries, restarts."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import pytest

from pipeline.codec import decode_order, decode_trajectory, encode_trajectory
from pipeline.config import RunConfig
from pipeline.errors import ConfigurationError
from pipeline.replay.ledger import read_ledger
from pipeline.replay.role import serve
from pipeline.replay.simulation import rollout
from pipeline.role import RoleContext
from pipeline.rundir import RunDirectory
from pipeline.schema import SCHEMA_VERSION
from pipeline.transport.base import EventKind, Kind, Link, Message
from pipeline.transport.memory import MemoryHub, MemoryLink, MemoryNetwork

PLUGINS = Path(__file__).parents[1] / "scorer" / "plugins_for_scorer.py"


def configuration(folder: Path, **more: Any) -> RunConfig:
    return RunConfig.model_validate(
        {
            "run": {"directory": str(folder), "name": "r", "total_steps": more.pop("total_steps", 4)},
            "groups": {"n_rollout": 3, "groups_per_step": 2},
            "environments": {"a": {}},
            **more,
        }
    )


class Player:
    """An actor that answers at once."""

    def __init__(self) -> None:
        self.held: dict[str, Any] = {}
        self.acknowledged: list[str] = []

    async def run(self, link: Link) -> None:
        self._describe(link)
        async with link:
            while True:
                event = await link.receive()
                if event.kind is EventKind.CONNECTED:
                    for order_id, frames in list(self.held.items()):
                        await link.send(Message(Kind.TRAJECTORY, {"trajectory_id": order_id}, frames))
                elif event.message is not None and event.message.kind is Kind.ORDER:
                    order = decode_order(event.message.header)
                    self.held[order.order_id] = encode_trajectory(rollout(order, order.policy_version))
                    self._describe(link)
                    await link.send(
                        Message(Kind.TRAJECTORY, {"trajectory_id": order.order_id}, self.held[order.order_id])
                    )
                elif event.message is not None and event.message.kind is Kind.ACK:
                    for order_id in event.message.header["trajectory_ids"]:
                        self.held.pop(order_id, None)
                        self.acknowledged.append(order_id)
                    self._describe(link)

    def _describe(self, link: Link) -> None:
        header = {
            "role": "actor",
            "name": "actor-0",
            "schema_version": SCHEMA_VERSION,
            "slots": 4,
            "holding": list(self.held),
        }
        link.describe(header)


class Trainer:
    """A learner that trains at once, ``steps`` updates."""

    def __init__(self, steps: int) -> None:
        self.steps = steps
        self.updates = 0
        self.plans: dict[str, int] = {}
        self.members: dict[str, dict[int, str]] = {}
        self.unacknowledged: dict[int, list[str]] = {}
        self.trained: list[str] = []
        self.rewards: list[float] = []
        self.done = anyio.Event()

    async def run(self, link: Link) -> None:
        self._describe(link)
        async with link:
            while True:
                event = await link.receive()
                if event.kind is EventKind.CONNECTED:
                    await link.send(Message(Kind.VERSION, {"policy_version": self.updates, "updates": self.updates}))
                if event.message is None:
                    continue
                header = event.message.header
                match event.message.kind:
                    case Kind.PLAN:
                        self.plans[header["group_id"]] = header["update"]
                        self.members[header["group_id"]] = {}
                    case Kind.DELIVERY:
                        trajectory = decode_trajectory(event.message.frames)
                        self.members[header["group_id"]][header["index"]] = trajectory.trajectory_id
                        self.rewards.append(header["reward"])
                        await self._train(link)
                    case Kind.ACK:
                        self.unacknowledged.pop(header["update"], None)
                        if self.updates == self.steps and not self.unacknowledged:
                            self.done.set()
                self._describe(link)

    async def _train(self, link: Link) -> None:
        ready = [g for g, u in self.plans.items() if u == self.updates and len(self.members[g]) == 3]
        if len(ready) < 2 or self.updates == self.steps:
            return
        self.trained += [t for g in ready for t in self.members[g].values()]
        self.unacknowledged[self.updates] = ready
        for group in ready:
            del self.plans[group]
        self._describe(link)
        await link.send(Message(Kind.CONSUMED, {"update": self.updates, "group_ids": ready}))
        self.updates += 1
        await link.send(Message(Kind.VERSION, {"policy_version": self.updates, "updates": self.updates}))

    def _describe(self, link: Link) -> None:
        link.describe(
            {
                "role": "learner",
                "name": "learner",
                "schema_version": SCHEMA_VERSION,
                "session": "one",
                "updates": self.updates,
                "policy_version": self.updates,
                "durable_updates": 0,
                "credit_groups": 4,
                "holding": [g for g in self.plans if len(self.members[g]) == 3],
                "consumed": [[u, ids] for u, ids in self.unacknowledged.items()],
            }
        )


@asynccontextmanager
async def stage(config: RunConfig, network: MemoryNetwork) -> AsyncIterator[RoleContext]:
    ctx = RoleContext("replay", 0, config, RunDirectory(config.run.path).create())
    hub = MemoryHub(network, heartbeat_seconds=0.1, silence_seconds_max=1.0)
    async with anyio.create_task_group() as group:
        group.start_soon(serve, ctx, hub)
        yield ctx
        ctx.stopping.set()


def links(network: MemoryNetwork) -> tuple[MemoryLink, MemoryLink]:
    return (
        MemoryLink(network, "actor-0", heartbeat_seconds=0.1, silence_seconds_max=1.0),
        MemoryLink(network, "learner", heartbeat_seconds=0.1, silence_seconds_max=1.0),
    )


@pytest.mark.parametrize("functions", [[], [{"path": f"{PLUGINS}:slowly", "name": "slowly"}]])
async def test_a_run_is_served_to_its_end(tmp_path: Path, functions: list[Any]) -> None:
    config = configuration(tmp_path, scorer={"functions": functions})
    network, trainer, player = MemoryNetwork(), Trainer(4), Player()
    actor, learner = links(network)
    with anyio.fail_after(20):
        async with stage(config, network) as ctx, anyio.create_task_group() as peers:
            peers.start_soon(player.run, actor)
            peers.start_soon(trainer.run, learner)
            await trainer.done.wait()
            peers.cancel_scope.cancel()
        assert ctx.status.state == "stopping"
    assert len(set(trainer.trained)) == len(trainer.trained) == 4 * 2 * 3
    assert set(trainer.trained) <= set(player.acknowledged)
    assert set(trainer.rewards) == ({0.5, 1.5} if functions else {0.0, 1.0})
    ledger = read_ledger(tmp_path / "r" / "replay.sqlite", rows=True)
    assert ledger.audit() == [] and ledger.updates == 4 and ledger.trajectories["trained"] == 24


async def test_the_stage_restarts_and_peers_go_on(tmp_path: Path) -> None:
    config = configuration(tmp_path, total_steps=30)
    network, trainer, player = MemoryNetwork(), Trainer(30), Player()
    actor, learner = links(network)
    with anyio.fail_after(30):
        async with anyio.create_task_group() as peers:
            peers.start_soon(player.run, actor)
            peers.start_soon(trainer.run, learner)
            for until in (5, 15):
                async with stage(config, network):
                    while trainer.updates < until:
                        await anyio.lowlevel.checkpoint()
            async with stage(config, network):
                await trainer.done.wait()
                peers.cancel_scope.cancel()
    assert len(set(trainer.trained)) == len(trainer.trained) == 30 * 2 * 3
    assert read_ledger(tmp_path / "r" / "replay.sqlite", rows=True).audit() == []


async def test_a_bad_score_function_ends_the_stage_before_it_binds(tmp_path: Path) -> None:
    config = configuration(tmp_path, scorer={"functions": [{"path": "no.such:thing"}]})
    ctx = RoleContext("replay", 0, config, RunDirectory(config.run.path).create())
    with pytest.raises(ConfigurationError, match=r"no\.such"):
        await serve(ctx, MemoryHub(MemoryNetwork()))
