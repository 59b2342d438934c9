"""Environments and tools that raise, hang, return nonsense, shout, leak and meddle: the run goes on, and says so."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any

import anyio
import pytest

from actors.environments import Environment, Episode, Reply, Step
from actors.loop import Rollout, Services
from actors.loop.leaks import watch_tasks
from actors.tools import Tool, ToolResult
from pipeline.schema import Message, Order, Task, TrajectoryStatus
from tests.unit.actors.test_tool_agent import Notes, Office, call, counted, office, play  # noqa: F401 - a fixture

MakeOffice = Callable[..., Services]
MakeOrder = Callable[..., Order]


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
        if how == "exit":
            sys.exit(3)
        if how == "cancelled":
            raise asyncio.CancelledError
        if how == "group":
            raise ExceptionGroup("many", [ValueError("one")])
        if how == "megabytes":
            return ToolResult("é" * 5_000_000)
        if how == "surrogate":
            return ToolResult("\ud800")
        if how == "nan":
            return ToolResult("x", reward=float("nan"))
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
        *((how, "raised") for how in ("raise", "unprintable", "exit", "cancelled", "group")),
        ("hang", "timeout"),
        *((how, "wrong_value") for how in ("none", "text", "number", "nan")),
        *((how, "ok") for how in ("megabytes", "surrogate", "meddle")),
    ],
)
async def test_a_hostile_tool_is_told_counted_kept_and_does_not_stop_the_episode(
    office: MakeOffice,  # noqa: F811
    make_order: MakeOrder,
    how: str,
    outcome: str,
) -> None:
    tool = Hostile()
    calls = [call("hostile", how=how)] * 2
    services = office(Office(tool), *calls, "done", loop_options={"max_tool_response_length": 300})
    trajectory = await play(services, make_order())
    assert trajectory.status is TrajectoryStatus.COMPLETE, trajectory.failure
    assert counted(services, "hostile", outcome) == 2
    assert counted(services, "hostile", "release_failed") == 1 and tool.released == 1
    answer = trajectory.turns[1].context_messages[0].content
    assert answer.encode() and len(answer) < 1000 and answer.startswith("Error") == (outcome != "ok")
    failures = services.loops["game"].failures.newest  # type: ignore[attr-defined]
    if outcome != "ok":
        assert all(f.tool == "hostile" and len(f.details) < 10_000 for f in failures)
        assert failures[0].where == "execute" and failures[-1].where == "release"
    assert "boom" not in answer, "the policy is not told what is inside"


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
        if how == "hang":
            await anyio.sleep_forever()
        if how == "megabytes":
            return Step((Message("user", "x" * 5_000_000),))
        if how == "leak":
            self.rude.leaked += [asyncio.ensure_future(asyncio.sleep(3600)) for _ in range(3)]
        if how == "meddle":
            self.task.payload["rows"].clear()  # type: ignore[attr-defined]
            self.messages[0].extra["note"] = "changed"  # type: ignore[index]
        if how == "wrong":
            return 7
        return Step(reward=1.0, done=True)


@pytest.mark.parametrize("how", ["raise", "unprintable", "hang", "megabytes", "wrong"])
async def test_a_hostile_environment_fails_its_own_episode_with_a_bounded_traceback(
    office: MakeOffice,  # noqa: F811
    make_order: MakeOrder,
    how: str,
) -> None:
    services = office(Rude(how), "a", step_seconds_max=0.1, loop_name="multi_turn", loop={"options": {}})
    trajectory = await play(services, make_order())
    assert trajectory.status is TrajectoryStatus.ERROR and trajectory.reward is None and trajectory.rewards == {}
    assert trajectory.failure is not None and trajectory.failure.boundary == "environment step"
    assert len(trajectory.failure.message) < 5000 and len(trajectory.failure.details) < 25_000


async def test_tasks_that_an_episode_left_running_are_cancelled_and_counted(
    office: MakeOffice,  # noqa: F811
    make_order: MakeOrder,
) -> None:
    watch_tasks()
    rude = Rude("leak")
    services = office(rude, "a", loop_name="multi_turn", loop={"options": {}})
    trajectory = await play(services, make_order())
    assert trajectory.status is TrajectoryStatus.COMPLETE
    with anyio.fail_after(5):
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
    trajectory = await play(services, order)
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
        await Rollout(make_order(seed), services).play()
        ended.append(time.perf_counter() - started)

    async with anyio.create_task_group() as group:
        group.start_soon(services.pool.watch)
        async with anyio.create_task_group() as episodes:
            for seed in range(20):
                episodes.start_soon(one, seed)
        group.cancel_scope.cancel()
    assert sorted(ended)[18] < ended[-1] and notes.events.count("create") == notes.events.count("release") == 20
