"""Environments and tools that raise, hang, return nonsense, shout, leak and meddle: the run goes on, and says so."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any

import anyio
import numpy as np
import pytest

from actors.environments import Environment, Episode, Reply, Step
from actors.rollout.agent_loop import AgentEpisode, AgentLoop, Answer, Game, Opening, checked_answer
from actors.rollout.rollout import Rollout
from actors.rollout.services import Services
from actors.tools import Tool, ToolResult
from pipeline.runtime.plugin_limits import bounded_prints, interrupting_blocks, kept_running, watch_tasks
from pipeline.schema import Message, Order, Task, TrajectoryStatus
from tests.unit.actors.test_tool_agent import Notes, Office, call, counted, office, run_order  # noqa: F401 - a fixture

MakeOffice = Callable[..., Services]
MakeOrder = Callable[..., Order]


@pytest.fixture(autouse=True)
async def owned() -> None:
    """Tasks of plug-ins have owners, as in an actor."""
    watch_tasks()


class Panic(BaseException):
    """As some libraries raise it: no ``Exception``."""


LEAVES = ("exit", "cancelled", "interrupt", "generator", "panic", "task", "gathered", "thread")


async def leave(how: str) -> None:
    """Raise what ends more than a plug-in, where it may: here, in a task, or in a thread."""
    raised = {"cancelled": asyncio.CancelledError, "interrupt": KeyboardInterrupt, "generator": GeneratorExit}
    if how in raised:
        raise raised[how]
    if how == "panic":
        raise Panic
    if how == "exit":
        sys.exit(3)
    if how == "task":
        await asyncio.create_task(leave("exit"))
    if how == "gathered":
        await asyncio.gather(leave("interrupt"), asyncio.sleep(0))
    if how == "thread":
        await asyncio.to_thread(sys.exit, 3)


class Unprintable(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no words")


class Hostile(Tool):
    """Does what it is told to."""

    name = "hostile"
    description = "x"
    parameters: Mapping[str, Any] = {"type": "object", "properties": {"how": {"type": "string"}}}

    def __init__(self) -> None:
        self.released = 0

    async def execute(self, episode_key: str, arguments: Mapping[str, Any]) -> Any:
        how = arguments["how"]
        if how == "raise":
            raise ValueError("boom" * 100_000)
        if how == "unprintable":
            raise Unprintable
        if how == "hang":
            await anyio.sleep_forever()
        await leave(how)
        if how == "group":
            raise ExceptionGroup("many", [ValueError("one")])
        if how == "megabytes":
            return ToolResult("é" * 5_000_000)
        if how == "surrogate":
            return ToolResult("\ud800")
        if how == "nan":
            return ToolResult("x", reward=float("nan"))
        if how == "numpy":
            return ToolResult("x", np.float32(0.5), {"n": np.int64(1)})
        if how == "meddle":
            arguments["how"].upper()
            self.parameters["properties"].clear()  # type: ignore[attr-defined]
            self.name = "changed"
            return ToolResult("done")
        return {"none": None, "text": "just text", "number": 3}[how]

    async def release(self, episode_key: str) -> None:
        self.released += 1
        if self.released % 2:
            raise RuntimeError("release failed")


@pytest.mark.parametrize(
    ("how", "outcome"),
    [
        *((how, "raised") for how in ("raise", "unprintable", "group", *LEAVES)),
        ("hang", "timeout"),
        *((how, "wrong_value") for how in ("none", "text", "number", "nan")),
        *((how, "ok") for how in ("megabytes", "surrogate", "meddle", "numpy")),
    ],
)
async def test_a_hostile_tool_is_told_counted_kept_and_does_not_stop_the_episode(
    office: MakeOffice,  # noqa: F811
    make_order: MakeOrder,
    how: str,
    outcome: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    tool = Hostile()
    calls = [call("hostile", how=how)] * 2
    services = office(Office(tool), *calls, "done", loop_options={"max_tool_response_length": 300})
    trajectory = await run_order(services, make_order())
    assert trajectory.status is TrajectoryStatus.COMPLETE, trajectory.failure
    assert counted(services, "hostile", outcome) == 2
    assert counted(services, "hostile", "release_failed") == 1 and tool.released == 1
    answer = trajectory.turns[1].context_messages[0].content
    assert answer.encode() and len(answer) < 1000 and answer.startswith("Error") == (outcome != "ok")
    failures = [line for line in caplog.messages if line.startswith("tool hostile failed")]
    if outcome != "ok":
        assert all(len(line) < 20_000 for line in failures)
        assert "failed in execute" in failures[0] and "failed in release" in failures[-1]
    assert "boom" not in answer, "the policy is not told what is inside"


class Trap(Tool):
    """Blocks where it should wait, or leaves tasks running."""

    name = "trap"
    description = "x"
    parameters: Mapping[str, Any] = {"type": "object", "properties": {"how": {"type": "string"}}}
    leaked: list[asyncio.Task[Any]]

    async def create(self, episode_key: str, task: Task) -> None:
        self.leaked = [asyncio.ensure_future(asyncio.sleep(3600))]
        with kept_running():
            self.kept = asyncio.ensure_future(asyncio.sleep(3600))

    async def execute(self, episode_key: str, arguments: Mapping[str, Any]) -> ToolResult:
        if arguments["how"] == "sleep":
            time.sleep(60)
        if arguments["how"] == "spin":
            while True:
                pass
        self.leaked.append(asyncio.ensure_future(asyncio.sleep(3600)))
        return ToolResult("done")


@pytest.mark.parametrize("how", ["sleep", "spin"])
async def test_a_tool_that_blocks_the_event_loop_is_interrupted_and_told_as_late(
    office: MakeOffice,  # noqa: F811
    make_order: MakeOrder,
    how: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    services = office(Office(Trap()), call("trap", how=how), "done", loop_options={"tool_seconds_max": 20})
    with interrupting_blocks(1.0):
        trajectory = await run_order(services, make_order())
    assert trajectory.status is TrajectoryStatus.COMPLETE, trajectory.failure
    assert counted(services, "trap", "timeout") == 1
    (failure,) = [line for line in caplog.messages if line.startswith("tool trap failed")]
    assert "held the event loop" in failure and "in execute" in failure


async def test_tasks_that_a_tool_left_running_are_ended_but_not_those_that_are_kept(
    office: MakeOffice,  # noqa: F811
    make_order: MakeOrder,
) -> None:
    watch_tasks()
    trap = Trap()
    services = office(Office(trap), call("trap", how="leak"), "done")
    assert (await run_order(services, make_order())).status is TrajectoryStatus.COMPLETE
    with anyio.fail_after(60):
        await asyncio.wait(trap.leaked)
    assert [task.cancelled() for task in trap.leaked] == [True, True] and not trap.kept.done()
    assert services.metrics.leaked_tasks_total.labels(env="game")._value.get() == 2
    trap.kept.cancel()


class Rude(Environment):
    """An environment whose episodes do ``how``."""

    def __init__(self, how: str) -> None:
        self.how = how
        self.leaked: list[asyncio.Task[Any]] = []
        self.shared = {"n": 0}

    def start(self, task: Task) -> Episode:
        return RudeEpisode(self, task)


class RudeEpisode(Episode):
    def __init__(self, rude: Rude, task: Task) -> None:
        self.messages = (Message("user", "hi", {"note": {}}),)
        self.rude, self.task = rude, task

    async def step(self, reply: Reply) -> Any:
        how = self.rude.how
        if how == "raise":
            raise ValueError("boom" * 1_000_000)
        if how == "unprintable":
            raise Unprintable
        await leave(how)
        if how == "hang":
            await anyio.sleep_forever()
        if how == "block":
            time.sleep(60)
        if how == "megabytes":
            return Step((Message("user", "x" * 5_000_000),))
        if how == "leak":
            self.rude.leaked += [asyncio.ensure_future(asyncio.sleep(3600)) for _ in range(3)]
        if how == "meddle":
            self.task.payload["rows"].clear()  # type: ignore[attr-defined]
            self.messages[0].extra["note"] = "changed"  # type: ignore[index]
        if how == "wrong":
            return 7
        if how == "surrogate" and reply == "a":
            return Step((Message("user", "caf\udce9 é"),))
        return Step(reward=1.0, done=True)


@pytest.mark.parametrize("how", ["raise", "unprintable", *LEAVES, "hang", "block", "megabytes", "wrong"])
async def test_a_hostile_environment_fails_its_own_episode_with_a_bounded_traceback(
    office: MakeOffice,  # noqa: F811
    make_order: MakeOrder,
    how: str,
) -> None:
    limit = 0.1 if how in ("hang", "block") else 60.0
    services = office(Rude(how), "a", step_seconds_max=limit, loop_name="multi_turn", loop={"options": {}})
    with interrupting_blocks(1.0):
        trajectory = await run_order(services, make_order())
    assert trajectory.status is TrajectoryStatus.ERROR and trajectory.reward is None and trajectory.rewards == {}
    assert trajectory.failure is not None and trajectory.failure.boundary == "environment step"
    assert "in step" in trajectory.failure.details or how not in ("raise", "exit", "cancelled", "block")
    assert len(trajectory.failure.message) < 5000 and len(trajectory.failure.details) < 25_000


async def test_text_that_is_no_unicode_is_told_with_a_mark(
    office: MakeOffice,  # noqa: F811
    make_order: MakeOrder,
) -> None:
    services = office(Rude("surrogate"), "a", "b", loop_name="multi_turn", loop={"options": {}})
    trajectory = await run_order(services, make_order())
    assert trajectory.status is TrajectoryStatus.COMPLETE, trajectory.failure
    assert [m.content for m in trajectory.turns[1].context_messages] == ["caf? é"]


class RudeLoop(AgentLoop):
    """A user's own loop that does ``how`` at ``where``."""

    def __init__(self, how: str = "", where: str = "answer") -> None:
        self.how, self.where = how, where
        self.closed = 0

    def begin(self, game: Game) -> Any:
        return "an episode" if self.how == "no episode" else RudeAgent(game, self)


class RudeAgent(AgentEpisode):
    def __init__(self, game: Game, loop: RudeLoop) -> None:
        super().__init__(game)
        self.loop = loop

    async def start(self) -> Opening:
        await self.misbehave("start")
        return await super().start()

    async def answer(self, reply: Reply) -> Any:
        return await self.misbehave("answer") or Answer.of(await self.game.step(reply))

    async def close(self) -> None:
        self.loop.closed += 1
        raise SystemExit(4)

    async def misbehave(self, where: str) -> Any:
        how = self.loop.how
        if where != self.loop.where:
            return None
        if how == "raise":
            raise ValueError("boom" * 1_000_000)
        if how == "unprintable":
            raise Unprintable
        await leave(how)
        if how == "block":
            time.sleep(60)
        if how == "hang":
            await anyio.sleep_forever()
        if how == "meddle":
            self.game.task.payload["rows"].clear()  # type: ignore[attr-defined]
        return {"wrong": 7, "nan": Answer(reward=float("nan"), done=True)}.get(how)


@pytest.mark.parametrize(
    ("how", "where"),
    [
        *((how, "start") for how in ("raise", *LEAVES, "block", "hang", "no episode")),
        *((how, "answer") for how in ("raise", "unprintable", *LEAVES, "block", "hang", "wrong", "nan")),
    ],
)
async def test_a_hostile_loop_fails_its_own_episode_and_both_are_closed(
    office: MakeOffice,  # noqa: F811
    make_order: MakeOrder,
    how: str,
    where: str,
) -> None:
    loop = RudeLoop(how, where)
    seconds = 1.0 if how == "hang" else 8.0
    services = office(Rude(""), "a", loop_name="multi_turn", loop={"options": {}}, max_seconds=seconds)
    services.loops["game"] = loop  # type: ignore[index]
    with interrupting_blocks(1.0):
        trajectory = await run_order(services, make_order())
    assert trajectory.status is TrajectoryStatus.ERROR and trajectory.rewards == {} and trajectory.reward is None
    assert trajectory.failure is not None and trajectory.failure.boundary == "agent loop", trajectory.failure
    assert len(trajectory.failure.message) < 5000 and len(trajectory.failure.details) < 25_000
    assert loop.closed == (how != "no episode")


def test_numpys_numbers_are_those_of_an_answer() -> None:
    answer = checked_answer(Answer(reward=np.float32(0.5), done=True, signals={"n": np.int64(2)}))
    assert [type(value) for value in (answer.reward, *answer.signals.values())] == [float, float]


async def test_a_loop_whose_service_fails_is_served_again_and_the_actor_lives(
    office: MakeOffice,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("actors.rollout.services.SERVE_AGAIN_SECONDS", 0.01)
    again = anyio.Event()

    class Failing(RudeLoop):
        served = 0

        async def serve(self) -> None:
            self.served += 1
            if self.served == 3:
                again.set()
            sys.exit(3)

    services = office(Rude(""), "a", loop_name="multi_turn", loop={"options": {}})
    services.loops["game"] = Failing()  # type: ignore[index]
    with anyio.fail_after(60):
        async with anyio.create_task_group() as group:
            group.start_soon(services.serve)
            await again.wait()
            group.cancel_scope.cancel()


async def test_tasks_that_an_episode_left_running_are_cancelled_and_counted(
    office: MakeOffice,  # noqa: F811
    make_order: MakeOrder,
) -> None:
    watch_tasks()
    rude = Rude("leak")
    services = office(rude, "a", loop_name="multi_turn", loop={"options": {}})
    trajectory = await run_order(services, make_order())
    assert trajectory.status is TrajectoryStatus.COMPLETE
    with anyio.fail_after(60):
        await asyncio.wait(rude.leaked)
    assert len(rude.leaked) == 3 and all(task.cancelled() for task in rude.leaked)
    assert services.metrics.leaked_tasks_total.labels(env="game")._value.get() == 3


async def test_an_episode_cannot_change_the_task_that_is_sent_back(
    office: MakeOffice,  # noqa: F811
    make_order: MakeOrder,
) -> None:
    services = office(Rude("meddle"), "a", loop_name="multi_turn", loop={"options": {}})
    order = make_order()
    task = Task("game/1", "game", 1, {"rows": [1, 2]})
    order = Order(order.order_id, order.group_id, task, 0, 0, 0, 30.0)
    trajectory = await run_order(services, order)
    assert trajectory.status is TrajectoryStatus.COMPLETE, trajectory.failure
    assert trajectory.task.payload == {"rows": [1, 2]}
    assert trajectory.turns[0].context_messages[0].extra == {"note": {}}


async def test_one_hanging_and_one_failing_episode_do_not_hold_the_others_up(
    office: MakeOffice,  # noqa: F811
    make_order: MakeOrder,
) -> None:
    slow = call("note", text="x", seconds=30)
    notes = Notes()
    replies = [slow, *["done"] * 20]
    services = office(Office(notes), *replies, loop_options={"tool_seconds_max": 20}, max_seconds=2.0)
    ended: list[float] = []
    started = time.perf_counter()

    async def one(seed: int) -> None:
        await Rollout(make_order(seed), services).run()
        ended.append(time.perf_counter() - started)

    async with anyio.create_task_group() as group:
        group.start_soon(services.pool.watch)
        async with anyio.create_task_group() as episodes:
            for seed in range(20):
                episodes.start_soon(one, seed)
        group.cancel_scope.cancel()
    assert sorted(ended)[18] < ended[-1] and notes.events.count("create") == notes.events.count("release") == 20


def test_what_plug_ins_print_is_bounded_and_the_log_says_so(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with bounded_prints(characters_max=1000):
        print("x" * 900)
        for _ in range(100):
            print("y" * 1_000_000)
            print("z" * 1_000_000, file=sys.stderr)
        assert not sys.stdout.isatty()
    shown, errors = capsys.readouterr()
    assert shown.startswith("x" * 900) and len(shown) < 1200 and len(errors) < 1200
    assert "characters of prints were dropped" in shown and "dropped" in errors
    print("again")
    assert capsys.readouterr().out == "again\n"
