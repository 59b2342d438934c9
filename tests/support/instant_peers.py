"""An actor and a learner that do everything at once: for tests and benchmarks of the stage over a real transport."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from typing import Any

import anyio

from pipeline.schema import SCHEMA_VERSION, GroupPlan, Order, TrajectoryStatus
from pipeline.transport.codec import decode_order, decode_plan, decode_trajectory, encode_trajectory
from pipeline.transport.protocol import EventKind, Frames, Kind, Link, WireMessage
from tests.support.simulated_roles import rollout


class InstantActor:
    """Answers every order with a tiny trajectory; ``reward`` says which succeed (None: odd slots), ``status`` how they
    end."""

    def __init__(
        self,
        name: str = "actor-0",
        slots: int = 4,
        reward: Callable[[Order], float] | None = None,
        status: TrajectoryStatus = TrajectoryStatus.COMPLETE,
    ) -> None:
        self.name, self.slots, self.reward, self.status = name, slots, reward, status
        self.held: dict[str, Frames] = {}
        self.acknowledged: list[str] = []

    async def run(self, link: Link) -> None:
        self._describe(link)
        async with link:
            while True:
                event = await link.receive()
                if event.kind is EventKind.CONNECTED:
                    for order_id, frames in list(self.held.items()):
                        await link.send(WireMessage(Kind.TRAJECTORY, {"trajectory_id": order_id}, frames))
                elif event.message is not None and event.message.kind is Kind.ORDER:
                    order = decode_order(event.message.header)
                    reward = None if self.reward is None else self.reward(order)
                    frames = encode_trajectory(rollout(order, order.policy_version, status=self.status, reward=reward))
                    self.held[order.order_id] = frames
                    self._describe(link)
                    await link.send(WireMessage(Kind.TRAJECTORY, {"trajectory_id": order.order_id}, frames))
                elif event.message is not None and event.message.kind is Kind.ACK:
                    for order_id in event.message.header["trajectory_ids"]:
                        self.held.pop(order_id, None)
                        self.acknowledged.append(order_id)
                    for order_id in event.message.header["refused"]:
                        self.held.pop(order_id, None)
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
    """Trains ``steps`` updates of ``groups`` groups of ``n_rollout`` trajectories as soon as it can; of the candidates
    of a replay group it chooses the last ones."""

    def __init__(
        self, steps: int, n_rollout: int, groups: int, credit_groups: int = 4, checkpoint_every: int = 0
    ) -> None:
        self.checkpoint_every, self.durable = checkpoint_every, 0
        self.steps, self.n_rollout, self.groups, self.credit_groups = steps, n_rollout, groups, credit_groups
        self.session = uuid.uuid4().hex
        self.updates = 0
        self.plans: dict[str, tuple[int, GroupPlan]] = {}
        self.members: dict[str, dict[int, str]] = {}
        self.unacknowledged: dict[int, list[str]] = {}
        self.reports: dict[int, dict[str, Any]] = {}
        self.trained: list[str] = []
        """Fresh ones, in order."""
        self.replayed: list[str] = []
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
                    for group in [g for g in self.plans if not self._complete(g)]:
                        del self.plans[group], self.members[group]
                    await link.send(
                        WireMessage(Kind.VERSION, {"policy_version": self.updates, "updates": self.updates})
                    )
                if event.message is None:
                    continue
                header = event.message.header
                match event.message.kind:
                    case Kind.PLAN:
                        self.plans[header["group_id"]] = (header["update"], decode_plan(header))
                        self.members[header["group_id"]] = {}
                    case Kind.DELIVERY:
                        trajectory = decode_trajectory(event.message.frames)
                        assert trajectory.trajectory_id == header["trajectory_id"]
                        self.members[header["group_id"]][header["index"]] = trajectory.trajectory_id
                        self.rewards.append(header["reward"])
                        await self._train(link)
                    case Kind.CANCEL:
                        for group in header["group_ids"]:
                            self.plans.pop(group, None)
                            self.members.pop(group, None)
                    case Kind.ACK:
                        self.unacknowledged.pop(header["update"], None)
                        if self.updates == self.steps and not self.unacknowledged:
                            self.done.set()
                self._describe(link)

    def _complete(self, group: str) -> bool:
        return len(self.members[group]) == self.plans[group][1].delivered

    async def _train(self, link: Link) -> None:
        ready = [g for g, (u, _) in self.plans.items() if u == self.updates and self._complete(g)]
        if len(ready) < self.groups or self.updates == self.steps:
            return
        replayed: dict[str, list[str]] = {}
        for group in ready:
            plan, members = self.plans.pop(group)[1], [t for _, t in sorted(self.members.pop(group).items())]
            self.trained += members[: plan.n_fresh]
            if plan.replay_ids:
                replayed[group] = members[-len(plan.replay_ids) :]
                self.replayed += replayed[group]
        report = {"replayed": replayed, "ess": {"all": 0.9, "fresh": 0.9, "replay": 0.8}, "entropy": {}}
        self.unacknowledged[self.updates], self.reports[self.updates] = ready, report
        self._describe(link)
        await link.send(WireMessage(Kind.CONSUMED, {"update": self.updates, "group_ids": ready, **report}))
        self.updates += 1
        self._moved.set()
        self._moved = anyio.Event()
        self._describe(link)
        await link.send(WireMessage(Kind.VERSION, {"policy_version": self.updates, "updates": self.updates}))
        if self.checkpoint_every and self.updates % self.checkpoint_every == 0:
            self.durable = self.updates
            await link.send(WireMessage(Kind.CHECKPOINTED, {"updates": self.updates}))

    def _describe(self, link: Link) -> None:
        link.describe(
            {
                "role": "learner",
                "name": "learner",
                "schema_version": SCHEMA_VERSION,
                "session": self.session,
                "updates": self.updates,
                "policy_version": self.updates,
                "durable_updates": self.durable,
                "credit_groups": self.credit_groups,
                "holding": [g for g in self.plans if self._complete(g)],
                "consumed": [[u, ids] for u, ids in self.unacknowledged.items()],
                "trained": [[u, self.reports[u]] for u in self.unacknowledged],
            }
        )
