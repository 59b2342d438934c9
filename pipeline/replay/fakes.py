"""An actor and a learner that do everything at once: for tests and benchmarks of the stage over a real transport."""

from __future__ import annotations

import uuid

import anyio

from pipeline.codec import decode_order, decode_trajectory, encode_trajectory
from pipeline.replay.simulation import rollout
from pipeline.schema import SCHEMA_VERSION
from pipeline.transport.base import EventKind, Frames, Kind, Link, Message


class InstantActor:
    """Answers every order with a tiny trajectory."""

    def __init__(self, name: str = "actor-0", slots: int = 4) -> None:
        self.name, self.slots = name, slots
        self.held: dict[str, Frames] = {}
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
            "name": self.name,
            "schema_version": SCHEMA_VERSION,
            "slots": self.slots,
            "holding": list(self.held),
        }
        link.describe(header)


class InstantLearner:
    """Trains ``steps`` updates of ``groups`` groups of ``n_rollout`` trajectories as soon as it can."""

    def __init__(self, steps: int, n_rollout: int, groups: int, credit_groups: int = 4) -> None:
        self.steps, self.n_rollout, self.groups, self.credit_groups = steps, n_rollout, groups, credit_groups
        self.session = uuid.uuid4().hex
        self.updates = 0
        self.plans: dict[str, int] = {}
        self.members: dict[str, dict[int, str]] = {}
        self.unacknowledged: dict[int, list[str]] = {}
        self.trained: list[str] = []
        self.rewards: list[float] = []
        self.done = anyio.Event()
        self._moved = anyio.Event()

    async def progress(self) -> None:
        """Wait for the next update."""
        await self._moved.wait()

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
        ready = [g for g, u in self.plans.items() if u == self.updates and len(self.members[g]) == self.n_rollout]
        if len(ready) < self.groups or self.updates == self.steps:
            return
        self.trained += [t for g in ready for t in self.members[g].values()]
        self.unacknowledged[self.updates] = ready
        for group in ready:
            del self.plans[group]
        self._describe(link)
        await link.send(Message(Kind.CONSUMED, {"update": self.updates, "group_ids": ready}))
        self.updates += 1
        self._moved.set()
        self._moved = anyio.Event()
        await link.send(Message(Kind.VERSION, {"policy_version": self.updates, "updates": self.updates}))

    def _describe(self, link: Link) -> None:
        link.describe(
            {
                "role": "learner",
                "name": "learner",
                "schema_version": SCHEMA_VERSION,
                "session": self.session,
                "updates": self.updates,
                "policy_version": self.updates,
                "durable_updates": 0,
                "credit_groups": self.credit_groups,
                "holding": [g for g in self.plans if len(self.members[g]) == self.n_rollout],
                "consumed": [[u, ids] for u, ids in self.unacknowledged.items()],
            }
        )
