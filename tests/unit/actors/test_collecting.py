"""Cyclic garbage: an actor's set-up is set aside, and its episodes leave none."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import anyio

from actors.environments import Environment, Episode, Reply, Step
from actors.rollout.rollout import Rollout
from actors.rollout.services import Services
from pipeline.runtime.garbage_collection import YOUNG_OBJECTS_MAX, gc_policy
from pipeline.schema import Message, Order, Task, TrajectoryStatus
from tests.support.stub_engine import StubEngine

EPISODES = 20


class Chat(Environment):
    def start(self, task: Task) -> Episode:
        return ChatEpisode()


class ChatEpisode(Episode):
    def __init__(self) -> None:
        self.messages = (Message("user", "say hello"),)
        self.turns = 0

    def step(self, reply: Reply) -> Step:
        self.turns += 1
        return Step((Message("user", "try again"),), 0.5, self.turns == 3)


def test_what_exists_is_set_aside_inside_the_block_and_visited_again_after_it() -> None:
    gc.unfreeze()  # Python 3.12 begins with some frozen objects
    before = gc.get_threshold(), gc.get_freeze_count()
    with gc_policy():
        assert gc.get_threshold() == (YOUNG_OBJECTS_MAX, *before[0][1:])
        assert gc.get_freeze_count() > 1_000
        assert gc.isenabled()
    assert (gc.get_threshold(), gc.get_freeze_count()) == before


def test_garbage_of_a_plug_in_is_still_collected_inside_the_block() -> None:
    class Cyclic:
        gone = 0

        def __init__(self) -> None:
            self.me = self

        def __del__(self) -> None:
            Cyclic.gone += 1

    with gc_policy():
        made = [Cyclic() for _ in range(3 * YOUNG_OBJECTS_MAX)]
        del made
        assert gc.collect() > 0 and Cyclic.gone == 3 * YOUNG_OBJECTS_MAX


async def test_an_episode_leaves_no_cyclic_garbage(
    make_services: Callable[..., Services], make_order: Callable[..., Order], words: Any
) -> None:
    services = make_services([StubEngine(script=lambda ids, s: [10, 11, words.eos_token_id])], Chat())

    async def roll_out() -> None:
        trajectory = await Rollout(make_order(), services).run()
        assert trajectory.status is TrajectoryStatus.COMPLETE, trajectory.failure

    async with anyio.create_task_group() as group:
        group.start_soon(services.pool.watch)
        await roll_out()
        gc.collect()
        gc.disable()
        try:
            for _ in range(EPISODES):
                await roll_out()
            assert gc.collect() < EPISODES
        finally:
            gc.enable()
        group.cancel_scope.cancel()
