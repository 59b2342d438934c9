"""The learner towards several replay stages: an update needs all of them, each is told of its own groups only."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator

import anyio
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from learner.consumed import Trained, TrainedGroup
from learner.session import Standing
from learner.sessions import LearnerSessions, divide
from pipeline.codec import encode_plan, encode_trajectory
from pipeline.config.training import GroupsConfig
from pipeline.errors import StoreError
from pipeline.replay.records import group_id
from pipeline.schema import FinishReason, GroupPlan, Task, TokenSpan, Trajectory, TrajectoryStatus, Turn
from pipeline.schema import Message as ChatMessage
from pipeline.transport.base import EventKind, Kind, Limits, Message
from pipeline.transport.memory import MemoryHub, MemoryLink, MemoryNetwork

GROUPS = GroupsConfig(n_rollout=2, groups_per_step=4)


class Stage:
    """A replay stage of one page: stage ``index`` of two."""

    def __init__(self, index: int, recorded: int) -> None:
        self.index, self.recorded = index, recorded
        self.network = MemoryNetwork()
        self.hub = MemoryHub(self.network)
        self.hellos: list[dict] = []
        self.messages: list[Message] = []
        self.acknowledging = True
        self.changed = anyio.Event()

    async def serve(self) -> None:
        while True:
            event = await self.hub.receive()
            if event.kind is EventKind.PEER_UP:
                self.hellos.append(dict(event.message.header))
                welcome = {"updates": 0, "policy_version": self.recorded}
                await self.hub.send("learner", Message(Kind.WELCOME, welcome))
            elif event.message is not None:
                self.messages.append(event.message)
                if event.message.kind is Kind.CONSUMED and self.acknowledging:
                    await self.hub.send("learner", Message(Kind.ACK, {"update": event.message.header["update"]}))
            changed, self.changed = self.changed, anyio.Event()
            changed.set()

    async def give(self, number: int, update: int) -> None:
        """One whole group."""
        name, task = group_id(number), Task(f"toy/{number}", "toy", number)
        plan = GroupPlan(name, task, 2, 2, attempt=0, admitted_update=0)
        await self.hub.send("learner", Message(Kind.PLAN, {**encode_plan(plan), "update": update}))
        for i in range(2):
            turn = Turn(
                TokenSpan.context([1, 2]), TokenSpan.sampled(np.array([3, 4]), np.array([-1.0, -2.0]), 0),
                (ChatMessage("user", "u"),), ChatMessage("assistant", "a"), FinishReason.STOP, 1.0,
            )  # fmt: skip
            t = Trajectory(f"{name}.{i}.0", name, task, (turn,), TrajectoryStatus.COMPLETE)
            header = {"group_id": name, "trajectory_id": t.trajectory_id, "reward": 1.0, "rewards": {}, "index": i}
            await self.hub.send("learner", Message(Kind.DELIVERY, header, encode_trajectory(t)))

    def heard(self, kind: Kind) -> list[dict]:
        return [dict(m.header) for m in self.messages if m.kind is kind]

    async def until(self, condition) -> None:
        while not condition():
            await self.changed.wait()


@contextlib.asynccontextmanager
async def world(standing: Standing | None = None) -> AsyncIterator[tuple[LearnerSessions, Stage, Stage]]:
    stages = Stage(0, recorded=4), Stage(1, recorded=7)
    links = [MemoryLink(stage.network, "learner") for stage in stages]
    with anyio.fail_after(20):
        async with contextlib.AsyncExitStack() as stack:
            for end in (*(s.hub for s in stages), *links):
                await stack.enter_async_context(end)
            async with anyio.create_task_group() as tasks:
                sessions = LearnerSessions(links, GROUPS, 8, standing or Standing(), Limits())
                tasks.start_soon(sessions.run)
                for stage in stages:
                    tasks.start_soon(stage.serve)
                yield sessions, *stages
                tasks.cancel_scope.cancel()


async def test_welcome_is_the_newest_version_that_any_stage_has_recorded() -> None:
    async with world() as (sessions, one, two):
        assert await sessions.welcome() == 7
        assert sessions.connected
        assert [stage.hellos[0]["credit_groups"] for stage in (one, two)] == [4, 4]


async def test_an_update_is_ready_when_every_stage_gave_its_share_in_any_order() -> None:
    async with world() as (sessions, one, two):
        await sessions.welcome()
        for number in (3, 1):
            await two.give(number, 0)
        while sessions.progress(0).complete < 2:
            await sessions.changed()
        p = sessions.progress(0)
        assert (p.complete, p.needed, p.trajectories) == (2, 4, 4)
        with anyio.move_on_after(0.05) as waited:
            await sessions.ready(0)
        assert waited.cancelled_caught
        for number in (2, 0):
            await one.give(number, 0)
        assert [g.group_id for g in await sessions.ready(0)] == [group_id(n) for n in range(4)]


async def test_each_stage_is_told_of_its_own_groups_and_of_every_version_and_checkpoint() -> None:
    async with world() as (sessions, one, two):
        await sessions.welcome()
        for number in range(4):
            await (one, two)[number % 2].give(number, 0)
        groups = await sessions.ready(0)
        facts = {g.group_id: TrainedGroup((f"old-{g.group_id}",), {f"{g.group_id}.0.0": 0.5}) for g in groups}
        one.acknowledging = two.acknowledging = False
        await sessions.consumed(0, Trained({"all": 0.9}, facts))
        assert sessions.standing.unacknowledged == {0: [g.group_id for g in groups]}
        assert sessions.standing.trained[0].groups == facts
        await sessions.announce(8, 1)
        await sessions.checkpointed(1)
        for index, stage in enumerate((one, two)):
            await stage.until(lambda s=stage: s.heard(Kind.CHECKPOINTED))
            own = [group_id(index), group_id(index + 2)]
            (consumed,) = stage.heard(Kind.CONSUMED)
            assert consumed["group_ids"] == own
            assert set(consumed["replayed"]) == set(own) and consumed["ess"] == {"all": 0.9}
            assert set(consumed["entropy"]) == {f"{name}.0.0" for name in own}
            assert stage.heard(Kind.VERSION) == [{"policy_version": 8, "updates": 1}]
        assert (sessions.standing.updates, sessions.standing.policy_version) == (1, 8)


async def test_a_stage_that_comes_back_is_told_again_and_the_other_is_left_alone() -> None:
    async with world() as (sessions, one, two):
        await sessions.welcome()
        for number in range(4):
            await (one, two)[number % 2].give(number, 0)
        await sessions.ready(0)
        two.acknowledging = False
        await sessions.consumed(0)
        await two.until(lambda: two.heard(Kind.CONSUMED))
        while 0 in sessions.standing.unacknowledged and len(sessions.standing.unacknowledged[0]) > 2:
            await sessions.changed()
        assert sessions.standing.unacknowledged == {0: [group_id(1), group_id(3)]}
        two.network.disconnect("learner")
        await two.until(lambda: len(two.hellos) == 2)
        assert two.hellos[1]["consumed"] == [[0, [group_id(1), group_id(3)]]]
        assert two.hellos[1]["session"] == two.hellos[0]["session"] != one.hellos[0]["session"]
        assert len(one.hellos) == 1
        await two.hub.send("learner", Message(Kind.ACK, {"update": 0}))
        await sessions.acknowledged()


async def test_a_resumed_learner_tells_each_stage_what_it_never_acknowledged() -> None:
    standing = Standing(5, 9, 5, {3: [group_id(2)], 4: [group_id(4), group_id(7)]})
    async with world(standing) as (sessions, one, two):
        await sessions.welcome()
        assert one.hellos[0]["consumed"] == [[3, [group_id(2)]], [4, [group_id(4)]]]
        assert two.hellos[0]["consumed"] == [[4, [group_id(7)]]]
        assert {stage.hellos[0]["updates"] for stage in (one, two)} == {5}
        assert sessions.standing.unacknowledged == standing.unacknowledged


@given(
    st.dictionaries(st.integers(0, 9), st.lists(st.integers(0, 99), unique=True, min_size=1), max_size=4),
    st.integers(1, 5),
)
def test_dividing_what_is_unacknowledged_loses_and_doubles_nothing(numbers: dict[int, list[int]], n: int) -> None:
    standing = Standing(10, 12, 8, {u: [group_id(i) for i in ids] for u, ids in numbers.items()})
    parts = divide(standing, n)
    assert all((p.updates, p.policy_version, p.durable_updates) == (10, 12, 8) for p in parts)
    for update, ids in standing.unacknowledged.items():
        assert sorted(i for p in parts for i in p.unacknowledged.get(update, [])) == sorted(ids)
    if n == 1:
        assert parts[0].unacknowledged == standing.unacknowledged


def test_a_group_id_that_is_none_is_refused() -> None:
    with pytest.raises(StoreError, match="no group id"):
        divide(Standing(1, 1, 1, {0: ["x"]}), 2)
