"""One order becomes one trajectory, token for token what the engine saw, however it ends."""

from __future__ import annotations

import asyncio
import copy
import dataclasses
import math
import threading
from collections.abc import Callable
from typing import Any

import anyio
import numpy as np
import pytest

from actors.environments import Environment, Episode, Reply, Step
from actors.rollout.rollout import Rollout
from actors.rollout.services import Services
from pipeline.errors import EngineProtocolError
from pipeline.schema import FinishReason, Message, Order, Task, Trajectory, TrajectoryStatus
from tests.support.routing import in_flight
from tests.support.stub_engine import RefusingEngine, StubEngine
from tests.support.tokens import flattened

MakeServices = Callable[..., Services]
MakeOrder = Callable[..., Order]


class Chat(Environment):
    """Talks for ``turns`` turns, 0.5 reward each."""

    def __init__(self, turns: int = 3) -> None:
        self.turns = turns
        self.closed = 0
        self.seen: list[str] = []

    def start(self, task: Task) -> Episode:
        return ChatEpisode(self)


class ChatEpisode(Episode):
    def __init__(self, chat: Chat) -> None:
        self.messages = (Message("user", "say hello"),)
        self.chat = chat
        self.turn = 0

    def step(self, reply: Reply) -> Any:
        self.turn += 1
        self.chat.seen.append(reply)
        return Step((Message("user", "try again"),), 0.5, self.turn >= self.chat.turns, {"turn": float(self.turn)})

    def close(self) -> None:
        self.chat.closed += 1


async def run_order(services: Services, order: Order) -> Trajectory:
    async with anyio.create_task_group() as group:
        group.start_soon(services.pool.watch)
        with anyio.fail_after(60):
            trajectory = await Rollout(order, services).run()
        group.cancel_scope.cancel()
    assert in_flight(services.pool.router) == 0 == len(services.pool.router.sessions)
    return trajectory


def failing(error: BaseException) -> Callable[..., Any]:
    def step(self: Any, reply: Reply) -> Step:
        raise error

    return step


async def test_concatenated_spans_are_exactly_what_the_engine_saw(
    make_services: MakeServices, make_order: MakeOrder, words: Any
) -> None:
    engine = StubEngine(script=lambda ids, s: [10, 11, words.eos_token_id][: s.max_tokens])
    chat = Chat(turns=3)
    trajectory = await run_order(make_services([engine], chat), make_order())
    assert trajectory.status is TrajectoryStatus.COMPLETE and len(trajectory.turns) == 3
    flat = flattened(trajectory).token_ids.tolist()
    for turn, (_, prompt) in enumerate(engine.requests):
        assert flat[: len(prompt)] == list(prompt), turn
    assert flat == [*engine.requests[-1][1], 10, 11, words.eos_token_id]
    text = words.apply_chat_template(
        [m.as_template_input() for t in trajectory.turns for m in (*t.context_messages, t.completion_message)],
        tokenize=False,
    )
    assert words(text, add_special_tokens=False).input_ids == flat
    assert chat.seen == ["4 5"] * 3
    assert trajectory.rewards == {"environment": 1.5} and trajectory.reward is None
    assert [t.signals["turn"] for t in trajectory.turns] == [1.0, 2.0, 3.0]
    assert trajectory.turn_rewards == (0.5, 0.5, 0.5)
    assert trajectory.engine.engine_ids == (engine.name,)
    assert chat.closed == 1


async def test_a_greedy_order_is_played_without_sampling_and_says_so(
    make_services: MakeServices, make_order: MakeOrder, words: Any
) -> None:
    asked = []

    def script(ids: Any, sampling: Any) -> list[int]:
        asked.append(sampling)
        return [10, words.eos_token_id]

    services = make_services([StubEngine(script=script)], Chat(turns=2))
    trajectory = await run_order(services, dataclasses.replace(make_order(), greedy=True))
    assert [(s.temperature, s.top_p, s.top_k) for s in asked] == [(0.0, 1.0, -1)] * 2
    assert [s.stop_token_ids for s in asked] == [services.sampling.stop_token_ids] * 2
    assert [t.temperature for t in trajectory.turns] == [0.0, 0.0]
    assert trajectory.rewards == {"environment": 1.0}


async def test_completion_cut_by_length_gets_the_end_of_turn_token_as_context(
    make_services: MakeServices, make_order: MakeOrder, words: Any
) -> None:
    engine = StubEngine(script=lambda ids, s: [10, 11, 12, 13])
    trajectory = await run_order(make_services([engine], Chat(turns=2)), make_order())
    assert trajectory.turns[0].finish_reason is FinishReason.LENGTH
    assert trajectory.turns[1].context.token_ids[0] == words.eos_token_id
    assert len(trajectory.turns) == 2


async def test_turn_limit_truncates_and_keeps_the_score(make_services: MakeServices, make_order: MakeOrder) -> None:
    trajectory = await run_order(make_services([StubEngine()], Chat(turns=9), max_turns=2), make_order())
    assert trajectory.status is TrajectoryStatus.TRUNCATED
    assert trajectory.rewards == {"environment": 1.0} and len(trajectory.turns) == 2


async def test_token_limit_bounds_every_stored_token(make_services: MakeServices, make_order: MakeOrder) -> None:
    trajectory = await run_order(make_services([StubEngine()], Chat(turns=99), max_tokens=30), make_order())
    assert trajectory.status is TrajectoryStatus.TRUNCATED
    assert 20 < trajectory.n_tokens <= 30


async def test_context_overflow_truncates_and_never_reaches_the_engine(
    make_services: MakeServices, make_order: MakeOrder
) -> None:
    engine = StubEngine()
    trajectory = await run_order(make_services([engine], Chat(turns=99), max_length=24), make_order())
    assert trajectory.status is TrajectoryStatus.TRUNCATED
    assert all(len(prompt) < 24 for _, prompt in engine.requests)
    assert trajectory.n_tokens <= 24


async def test_prompt_longer_than_the_limit_is_an_error_and_not_a_reward(
    make_services: MakeServices, make_order: MakeOrder
) -> None:
    trajectory = await run_order(make_services([StubEngine()], Chat(), max_tokens=3), make_order())
    assert trajectory.status is TrajectoryStatus.ERROR and trajectory.rewards == {}
    assert trajectory.failure is not None
    assert (trajectory.failure.boundary, trajectory.failure.kind) == ("agent loop", "EpisodeLimit")


async def test_time_limit_drops_the_unjudged_turn(make_services: MakeServices, make_order: MakeOrder) -> None:
    class Slow(Chat):
        def start(self, task: Task) -> Episode:
            return SlowEpisode(self)

    class SlowEpisode(ChatEpisode):
        async def step(self, reply: Reply) -> Step:
            if self.turn == 1:
                await anyio.sleep_forever()
            return ChatEpisode.step(self, reply)

    chat = Slow()
    services = make_services([StubEngine()], chat, max_seconds=1.0)
    trajectory = await run_order(services, make_order())
    assert trajectory.status is TrajectoryStatus.TRUNCATED and len(trajectory.turns) == 1
    assert trajectory.rewards == {"environment": 0.5}
    assert chat.closed == 1


async def test_time_limit_while_no_engine_answers_is_an_engine_failure(
    make_services: MakeServices, make_order: MakeOrder
) -> None:
    engine = StubEngine()
    engine.alive = False
    trajectory = await run_order(make_services([engine], Chat(), max_seconds=0.1), make_order())
    assert trajectory.status is TrajectoryStatus.ERROR
    assert trajectory.failure is not None and trajectory.failure.boundary == "engine"


@pytest.mark.parametrize(
    ("step", "kind"),
    [
        (failing(ValueError("boom")), "ValueError"),
        (failing(StopIteration()), "StopIteration"),
        (failing(SystemExit(1)), "SystemExit"),
        (failing(asyncio.CancelledError()), "CancelledError"),
        (lambda self, reply: None, "WrongValue"),
        (lambda self, reply: Step((), 0.0, False), "WrongValue"),
        (lambda self, reply: Step((Message("user", "hello"),), math.nan), "WrongValue"),
        (lambda self, reply: Step((Message("user", "hello"),), "much"), "WrongValue"),
        (lambda self, reply: Step(("hello",), 0.0), "WrongValue"),
        (lambda self, reply: Step((Message("user", "hello"),), 0.0, 1), "WrongValue"),
        (lambda self, reply: Step((Message("user", "hello"),), 0.0, False, {"x": math.inf}), "WrongValue"),
        (lambda self, reply: Step((Message("user", "hello"),), 0.0, False, None), "WrongValue"),
    ],
)
async def test_hostile_step_fails_the_episode_at_the_environment_boundary(
    make_services: MakeServices, make_order: MakeOrder, step: Callable[..., Any], kind: str
) -> None:
    class Hostile(Chat):
        def start(self, task: Task) -> Episode:
            return type("HostileEpisode", (ChatEpisode,), {"step": step})(self)

    chat = Hostile()
    trajectory = await run_order(make_services([StubEngine()], chat), make_order())
    assert trajectory.status is TrajectoryStatus.ERROR and trajectory.reward is None and trajectory.rewards == {}
    assert trajectory.failure is not None
    assert (trajectory.failure.boundary, trajectory.failure.kind) == ("environment step", kind)
    assert len(trajectory.turns) == 1 and chat.closed == 1


@pytest.mark.parametrize("blocking", [False, True])
async def test_hanging_step_times_out_and_leaves_the_loop_free(
    make_services: MakeServices, make_order: MakeOrder, blocking: bool
) -> None:
    release = threading.Event()

    class Hanging(Chat):
        def start(self, task: Task) -> Episode:
            return HangingEpisode(self) if blocking else AsyncHangingEpisode(self)

    class HangingEpisode(ChatEpisode):
        def step(self, reply: Reply) -> Step:
            release.wait(20)
            return Step(done=True)

    class AsyncHangingEpisode(ChatEpisode):
        async def step(self, reply: Reply) -> Step:
            await anyio.sleep_forever()
            return Step(done=True)

    services = make_services([StubEngine()], Hanging(), blocking=blocking, step_seconds_max=0.05)
    trajectory = await run_order(services, make_order())
    release.set()
    assert trajectory.failure is not None
    assert (trajectory.failure.boundary, trajectory.failure.kind) == ("environment step", "TimeoutError")


async def test_environment_that_cannot_start_fails_before_any_token(
    make_services: MakeServices, make_order: MakeOrder
) -> None:
    class Broken(Chat):
        def start(self, task: Task) -> Episode:
            raise OSError("no disk")

    engine = StubEngine()
    trajectory = await run_order(make_services([engine], Broken()), make_order())
    assert trajectory.failure is not None and trajectory.failure.boundary == "environment start"
    assert engine.n_requests == 0 and trajectory.turns == ()


async def test_task_of_an_unknown_environment_names_those_that_exist(
    make_services: MakeServices, make_order: MakeOrder
) -> None:
    trajectory = await run_order(make_services([StubEngine()], Chat()), make_order(environment="other"))
    assert trajectory.failure is not None and "['game']" in trajectory.failure.message


async def test_engine_that_dies_in_mid_request_costs_nothing_but_a_retry(
    make_services: MakeServices, make_order: MakeOrder
) -> None:
    first, second = StubEngine("stub://a", latency_seconds=0.05), StubEngine("stub://b")
    second.alive = False
    services = make_services([first, second], Chat())
    trajectories: list[Trajectory] = []
    async with anyio.create_task_group() as group:
        group.start_soon(services.pool.watch)

        async def one() -> None:
            trajectories.append(await Rollout(make_order(), services).run())
            group.cancel_scope.cancel()

        group.start_soon(one)
        while first.in_flight == 0:
            await anyio.lowlevel.checkpoint()
        first.alive, second.alive = False, True
    assert trajectories[0].status is TrajectoryStatus.COMPLETE
    assert trajectories[0].engine.engine_ids == ("stub://b",)
    assert services.pool.router.moves == {"died": 1}


@pytest.mark.parametrize(
    ("engine", "kind"), [(RefusingEngine(), "EngineRefused"), (StubEngine(), "EngineProtocolError")]
)
async def test_engine_fault_ends_the_episode_at_the_engine_boundary(
    make_services: MakeServices, make_order: MakeOrder, engine: StubEngine, kind: str
) -> None:
    engine.fault = EngineProtocolError("garbage")
    trajectory = await run_order(make_services([engine], Chat(), retries=1), make_order())
    assert trajectory.status is TrajectoryStatus.ERROR and trajectory.failure is not None
    assert (trajectory.failure.boundary, trajectory.failure.kind) == ("engine", kind)
    assert engine.n_requests == (2 if kind == "EngineProtocolError" else 0)


async def test_weights_that_change_under_a_request_leave_two_spans(
    make_services: MakeServices, make_order: MakeOrder
) -> None:
    engine = StubEngine(latency_seconds=0.02, version=3)
    services = make_services([engine], Chat(turns=1))
    async with anyio.create_task_group() as group:
        group.start_soon(services.pool.watch)

        async def publish() -> None:
            while engine.in_flight == 0:
                await anyio.lowlevel.checkpoint()
            engine.version = 4

        group.start_soon(publish)
        trajectory = await Rollout(make_order(policy_version=3), services).run()
        group.cancel_scope.cancel()
    assert trajectory.version_range() == (3, 4)
    assert np.array_equal(trajectory.turns[0].completion.versions(), [3, 3, 4, 4])


async def test_order_waits_for_an_engine_with_its_policy_version(
    make_services: MakeServices, make_order: MakeOrder
) -> None:
    engine = StubEngine(version=3)
    services = make_services([engine], Chat(turns=1))
    async with anyio.create_task_group() as group:
        group.start_soon(services.pool.watch)

        async def publish() -> None:
            while "version 3 < 4" not in services.pool.waiting_reason():
                await anyio.lowlevel.checkpoint()
            assert engine.n_requests == 0
            engine.version = 4

        group.start_soon(publish)
        trajectory = await Rollout(make_order(policy_version=4), services).run()
        group.cancel_scope.cancel()
    assert trajectory.version_range() == (4, 4)


async def test_cancelled_rollout_closes_the_episode_and_can_tell_how_far_it_got(
    make_services: MakeServices, make_order: MakeOrder
) -> None:
    engine, chat = StubEngine(), Chat(turns=10**6)
    services = make_services([engine], chat, max_turns=10**6, max_tokens=10**6, max_length=10**6)
    rollout = Rollout(make_order(), services)
    async with anyio.create_task_group() as group:
        group.start_soon(services.pool.watch)
        with anyio.CancelScope() as scope:
            async with anyio.create_task_group() as inner:
                inner.start_soon(rollout.run)
                while engine.n_requests < 3:
                    await anyio.lowlevel.checkpoint()
                scope.cancel()
        group.cancel_scope.cancel()
    trajectory = rollout.aborted("drain")
    assert trajectory.status is TrajectoryStatus.ABORTED and trajectory.failure is not None
    assert chat.closed == 1 and in_flight(services.pool.router) == 0
    assert len(services.pool.router.sessions) == 0


async def test_template_that_rewrites_earlier_turns_forks_into_branches_that_match_what_the_engine_saw(
    make_services: MakeServices, make_order: MakeOrder, words: Any
) -> None:
    template = (
        "{% for m in messages %}<|{{ m['role'] }}|>"
        "{{ m['content'] if m['role'] != 'assistant' else 'think' }}<|end|>{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>{% endif %}"
    )
    tokenizer = copy.deepcopy(words)
    tokenizer.chat_template = template
    engine = StubEngine(script=lambda ids, s: [10, 11, tokenizer.eos_token_id])
    trajectory = await run_order(make_services([engine], Chat(turns=3), tokenizer=tokenizer), make_order())
    assert [t.branch for t in trajectory.turns] == [0, 1, 2]
    for branch, (_, prompt) in zip(trajectory.branches(), engine.requests, strict=True):
        assert branch.token_ids.tolist() == [*prompt, 10, 11, tokenizer.eos_token_id]
