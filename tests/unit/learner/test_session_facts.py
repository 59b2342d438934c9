"""Facts in CONSUMED beside group ids are repeated until they are acknowledged, also by a resumed learner."""

import asyncio

import anyio
import orjson
import pytest

from learner.checkpoints.checkpoint import FORMAT, CheckpointState, read_state, save_checkpoint
from learner.data.rows import Trained
from learner.process.role import load
from learner.process.session import LearnerProgress, LearnerSession
from pipeline.config.stage import GroupsConfig
from pipeline.errors import TrainingError, WireError
from pipeline.runtime.run_directory import RunDirectory
from pipeline.schema import GroupPlan, Task
from pipeline.schema.codec import Limits, encode_trajectory
from pipeline.schema.orders import encode_request
from pipeline.transport.messages import Event, EventKind, Kind, WireMessage
from tests.unit.learner.test_learner_role import config_of

FACTS = Trained(
    {"all": 0.5, "fresh": 0.9, "replay": 0.2},
    {"g": ["p2"]},
    {"f0": 0.4, "p2": 0.3},
    choice_failed=1,
    policy_version=7,
)
TOLD = {
    "replayed": {"g": ["p2"]},
    "ess": {"all": 0.5, "fresh": 0.9, "replay": 0.2},
    "entropy": {"f0": 0.4, "p2": 0.3},
    "choice_failed": 1,
    "policy_version": 7,
}


class Wire:
    """A link whose other end is the test."""

    def __init__(self):
        self.sent, self.reconnections = [], []
        self._queue: asyncio.Queue[Event] = asyncio.Queue(100)

    def describe(self, hello):
        self._hello = hello

    @property
    def hello(self):
        return orjson.loads(orjson.dumps(self._hello()))

    async def receive(self):
        return await self._queue.get()

    async def send(self, message):
        self.sent.append(message)

    def reconnect(self, reason):
        self.reconnections.append(reason)

    def connected(self, number=0, holding=()):
        header = {"updates": 0, "policy_version": -1, "epoch": 1, "number": number, "holding": list(holding)}
        self.happened(Event(EventKind.CONNECTED, "hub", WireMessage(Kind.WELCOME, header)))

    def disconnected(self):
        self.happened(Event(EventKind.DISCONNECTED, "hub", reason="silent"))

    def happened(self, event):
        self._queue.put_nowait(event)

    def came(self, kind, header, frames=()):
        self.happened(Event(EventKind.MESSAGE, "hub", WireMessage(kind, header, frames)))


def session_on(wire, progress=None):
    return LearnerSession(
        wire, GroupsConfig(n_rollout=2, groups_per_step=1), 2, progress or LearnerProgress(), Limits()
    )


def deliver(wire, kit, index, name, reward, **header):
    t = kit.make_trajectory(name, group="g", reward=None)
    header = {"group_id": "g", "index": index, "trajectory_id": name, "reward": reward, "rewards": {}, **header}
    wire.came(Kind.DELIVERY, header, encode_trajectory(t))


async def test_facts_are_repeated_until_acknowledged(kit):
    wire = Wire()
    session = session_on(wire)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(session.run)
        wire.connected()
        plan = GroupPlan("g", Task("t", "toy", 0), 2, 1, ("p1",), ("p1", "p2"))
        wire.came(Kind.PLAN, {**encode_request(plan), "update": 0})
        deliver(wire, kit, 0, "f0", 0.0)
        deliver(wire, kit, 1, "p1", 0.75, replay={"weight": 0.5, "entropy": None, "entropy_age": 3})
        deliver(wire, kit, 2, "p2", 1.0, replay={"weight": 1.0})
        with anyio.fail_after(60):
            (group,) = await session.ready(0)
        assert group.trajectories[1].reward == 0.75
        fact = group.stored_rollout(group.trajectories[1])
        assert (fact.weight, fact.entropy, fact.entropy_age) == (0.5, None, 3)
        await session.consumed(0, FACTS)
        told = WireMessage(Kind.CONSUMED, {"update": 0, "group_ids": ["g"], **TOLD, "number": 1})
        assert wire.sent == [told]
        assert session.unacknowledged() == ({0: ["g"]}, {0: FACTS}) and wire.hello["holding"] == ["g"]
        wire.disconnected()
        wire.connected()
        await anyio.wait_all_tasks_blocked()
        assert wire.sent == [told, told]
        wire.came(Kind.ACK, {"number": 1})
        with anyio.fail_after(60):
            await session.acknowledged()
        assert session.unacknowledged() == ({}, {})
        assert (wire.hello["number"], wire.hello["updates"], wire.hello["holding"]) == (1, 1, [])
        tasks.cancel_scope.cancel()


def test_a_resumed_learner_says_again_what_was_not_acknowledged(tmp_path):
    state = CheckpointState(1, 3, {0: ["g"]}, trained={0: FACTS})
    (tmp_path / "state.json").write_bytes(orjson.dumps(state.as_json(), option=orjson.OPT_NON_STR_KEYS))
    again = read_state(tmp_path)
    assert again == state
    wire = Wire()
    session_on(wire, LearnerProgress(1, 3, 1, again.unacknowledged, trained=again.trained))
    assert wire.hello["consumed"] == [[0, ["g"]]]
    assert wire.hello["trained"] == [[0, TOLD]]


async def test_what_the_stage_lacks_is_sent_in_order_after_every_connection():
    wire = Wire()
    session = session_on(wire)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(session.run)
        await session.announce(0, 0)
        await session.checkpointed(0)
        await session.announce(1, 1)
        assert wire.sent == [], "nothing goes out before WELCOME says what is lacking"
        wire.connected()
        wire.disconnected()
        wire.connected(number=1)
        wire.came(Kind.ACK, {"number": 1, "missing": True})
        wire.came(Kind.ACK, {"number": 2})
        await anyio.wait_all_tasks_blocked()
        tasks.cancel_scope.cancel()
    assert [m.header["number"] for m in wire.sent] == [1, 2, 3, 2, 3, 2, 3]
    assert (wire.hello["number"], wire.hello["announced"], wire.hello["durable_updates"]) == (2, [0, 0], 0)


async def test_a_stage_that_went_back_is_told_by_a_new_hello():
    wire = Wire()
    session = session_on(wire)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(session.run)
        wire.connected()
        await session.announce(0, 0)
        wire.came(Kind.ACK, {"number": 1})
        wire.disconnected()
        wire.connected(number=0)
        await anyio.wait_all_tasks_blocked()
        tasks.cancel_scope.cancel()
    assert len(wire.reconnections) == 1 and wire.hello["number"] == 1


async def test_a_learner_whose_message_is_refused_ends():
    wire = Wire()
    session = session_on(wire)
    wire.connected()
    wire.came(Kind.REFUSED, {"reason": "expected updates of 0 to 3, got 4"})
    with pytest.raises(TrainingError, match="expected updates of 0 to 3"), anyio.fail_after(60):
        await session.run()


async def test_a_group_that_the_stage_does_not_count_as_held_is_forgotten(kit):
    """It was cancelled while there was no connection."""
    wire = Wire()
    session = session_on(wire)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(session.run)
        wire.connected()
        wire.came(Kind.PLAN, {**encode_request(GroupPlan("g", Task("t", "toy", 0), 2, 2)), "update": 0})
        deliver(wire, kit, 0, "f0", 0.0)
        deliver(wire, kit, 1, "f1", 0.0)
        await anyio.wait_all_tasks_blocked()
        assert session.assembler.progress(0).complete == 1 and wire.hello["holding"] == ["g"]
        wire.disconnected()
        wire.connected(holding=[])
        await anyio.wait_all_tasks_blocked()
        assert session.assembler.progress(0).complete == 0
        tasks.cancel_scope.cancel()


def test_a_learner_starts_with_what_the_run_had_not_acknowledged_at_its_checkpoint(tmp_path):
    config = config_of(tmp_path, "http://127.0.0.1:9")
    directory = RunDirectory(config.run.path).create()
    state = CheckpointState(2, 5, {1: ["g"]}, trained={1: FACTS})
    save_checkpoint(directory.checkpoints, load(config, directory).trainer, state, directory.model, keep=1)
    assert load(config, directory).progress == LearnerProgress(2, 5, 2, {1: ["g"]}, trained={1: FACTS})


def test_a_checkpoint_without_facts_about_its_updates_is_read(tmp_path):
    old = {"format": FORMAT, "updates": 4, "policy_version": 5, "unacknowledged": {"3": ["g"]}}
    (tmp_path / "state.json").write_bytes(orjson.dumps(old))
    assert read_state(tmp_path) == CheckpointState(4, 5, {3: ["g"]})


async def test_replay_facts_that_are_no_numbers_are_a_wire_error(kit):
    wire = Wire()
    session = session_on(wire)
    wire.came(Kind.PLAN, {**encode_request(GroupPlan("g", Task("t", "toy", 0), 2, 1, ("p1",))), "update": 0})
    deliver(wire, kit, 1, "p1", 1.0, replay={"weight": "much"})
    with pytest.raises(WireError, match=r"is invalid|invalid report"), anyio.fail_after(60):
        await session.run()
