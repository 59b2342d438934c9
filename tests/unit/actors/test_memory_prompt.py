"""Lessons reach the first message of the user; the training row without them is the same episode under the plain
prompt; group and slot decide who gets lessons."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import anyio
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from actors.environments import Environment, Episode, Reply, Step
from actors.rendering.renderer import Renderer
from actors.rollout import lessons as memory_prompt
from actors.rollout.counterfactual import with_text
from actors.rollout.lessons import LessonPrompter, gets_lessons, trains_with_lessons
from actors.rollout.services import Services
from pipeline.config.lessons import LessonsConfig
from pipeline.errors import TransportError
from pipeline.lessons.store import Lesson, plain_conversation, task_text
from pipeline.schema import Message, Order, Trajectory, TrajectoryStatus
from pipeline.schema.codec import decode_trajectory, encode_trajectory
from tests.support.stub_engine import StubEngine
from tests.unit.actors.conftest import THINKING, rows, run_order, script

MakeServices = Callable[..., Services]
MakeOrder = Callable[..., Order]


class Talk(Environment):
    def __init__(self, turns: int = 3, system: str = "") -> None:
        self.turns, self.system = turns, system

    def start(self, task: Any) -> Episode:
        return TalkEpisode(self)


class TalkEpisode(Episode):
    def __init__(self, talk: Talk) -> None:
        system = (Message("system", talk.system),) if talk.system else ()
        self.messages = (*system, Message("user", "say hello"))
        self.talk, self.turn = talk, 0

    def step(self, reply: Reply) -> Step:
        self.turn += 1
        return Step((Message("user", "try again"),), 0.5, self.turn >= self.talk.turns)


class Source:
    """Finds what it is told to find."""

    def __init__(self, *texts: str, error: BaseException | None = None, late: bool = False) -> None:
        self.lessons: Any = [Lesson(str(n), text) for n, text in enumerate(texts)]
        self.error, self.late = error, late
        self.asked: list[tuple[str, str, int]] = []

    async def search(self, order_id: str, query: str, top_k: int) -> list[Lesson]:
        self.asked.append((order_id, query, top_k))
        if self.error is not None:
            raise self.error
        if self.late:
            await anyio.sleep_forever()
        return self.lessons


class Untidy(Source):
    """Gives texts where lessons are expected."""

    def __init__(self, *texts: str) -> None:
        super().__init__()
        self.lessons = list(texts)


async def run_with_lessons(services: Services, order: Order, source: Source, **section: Any) -> Trajectory:
    config = LessonsConfig(enabled=True, **{"rollout_ratio": 1, **section})
    services = replace(services, lesson_prompter=LessonPrompter(config, services.renderer, services.metrics))
    return decode_trajectory(encode_trajectory(await run_order(services, order, source)))


def searches(services: Services, outcome: str) -> float:
    return services.metrics.lesson_searches_total.labels(outcome=outcome)._value.get()


@pytest.mark.parametrize("system", ["", "think"])
async def test_row_without_lessons_is_the_same_episode_under_the_plain_prompt(
    make_services: MakeServices, make_order: MakeOrder, tokenizer: Any, system: str
) -> None:
    def services() -> Services:
        engine = StubEngine(script=script(tokenizer))
        return make_services([engine], Talk(4, system), tokenizer=tokenizer, sampling={"max_tokens": 16})

    source = Source("guess higher", "the other lesson")
    trajectory = await run_with_lessons(services(), make_order(), source, keep_ratio=0)
    plain = await run_with_lessons(services(), make_order(), Source(), keep_ratio=0)
    assert plain.lessons is None and trajectory.lessons is not None and not trajectory.lessons.keep
    assert len(trajectory.turns) == len(plain.turns) == 4
    for turn, other in zip(trajectory.turns, plain.turns, strict=True):
        assert np.array_equal(turn.completion.token_ids, other.completion.token_ids)
        assert np.array_equal(turn.completion.behaviour_logprobs, other.completion.behaviour_logprobs)
        assert turn.branch == other.branch
    assert rows(trajectory, trajectory.lessons.plain_contexts) == rows(plain)
    assert rows(trajectory) != rows(plain)
    first_of_branch = {0} | {
        i for i, t in enumerate(trajectory.turns) if i and t.branch != trajectory.turns[i - 1].branch
    }
    assert set(trajectory.lessons.plain_contexts) == first_of_branch
    renderer = Renderer(tokenizer)
    start = renderer.start([*([Message("system", system)] if system else []), Message("user", "say hello")])
    assert trajectory.lessons.plain_contexts[0] == start.prompt_ids


async def test_lessons_are_in_the_first_message_of_the_user_and_nowhere_else(
    make_services: MakeServices, make_order: MakeOrder, tokenizer: Any
) -> None:
    engine = StubEngine(script=script(tokenizer))
    services = make_services([engine], Talk(3, "think"), tokenizer=tokenizer, sampling={"max_tokens": 16})
    source = Source("guess higher", "say {prompt} lower", "a third is too many")
    template = "{lessons}\nnow {prompt}"
    trajectory = await run_with_lessons(services, make_order(), source, template=template)
    assert source.asked == [(trajectory.trajectory_id, "say hello", 2)]
    system, user = trajectory.turns[0].context_messages
    assert system == Message("system", "think")
    assert user == Message("user", "guess higher\nsay {prompt} lower\nnow say hello")
    lessons = trajectory.lessons
    assert lessons is not None and lessons.keep and not lessons.plain_contexts and lessons.ids == ("0", "1")
    assert engine.requests[0][1] == Renderer(tokenizer).start([system, user]).prompt_ids
    assert task_text(trajectory) == lessons.query == "say hello"
    assert [m.content for m in plain_conversation(trajectory) if m.role != "assistant"][:2] == ["think", "say hello"]
    assert "third" not in str(trajectory.turns) and searches(services, "found") == 1


@pytest.mark.parametrize(
    ("source", "outcome"),
    [
        (Source(), "none"),
        (Source("x", late=True), "timeout"),
        (Source("x", error=TransportError("down")), "error"),
        (Source("x", error=KeyError("lost")), "error"),
        (Source("x", error=SystemExit(3)), "error"),
        (Source("x", error=TimeoutError()), "timeout"),
        (Untidy("guess higher"), "error"),
        (Source("higher " * 600), "no_room"),
        (Source(" \n"), "no_room"),
    ],
)
async def test_an_episode_without_an_answer_is_played_without_lessons(
    make_services: MakeServices, make_order: MakeOrder, monkeypatch: pytest.MonkeyPatch, source: Source, outcome: str
) -> None:
    monkeypatch.setattr(memory_prompt, "SEARCH_SECONDS_MAX", 0.05)
    monkeypatch.setattr(memory_prompt, "LESSON_CHARACTERS_MAX", 10_000)
    services = make_services([StubEngine()], Talk(1), max_length=128)
    trajectory = await run_with_lessons(services, make_order(), source)
    assert trajectory.status is TrajectoryStatus.COMPLETE and trajectory.lessons is None
    assert trajectory.turns[0].context_messages == (Message("user", "say hello"),)
    assert searches(services, outcome) == 1


@pytest.mark.parametrize(
    ("texts", "fit"),
    [
        (("guess " * 12, "lower " * 40), ("0",)),
        (("lower " * 40, "guess " * 12), ("1",)),
        (("guess " * 6, "lower " * 40, "higher " * 6), ("0", "2")),
    ],
)
async def test_as_many_lessons_as_there_is_room_for(
    make_services: MakeServices, make_order: MakeOrder, texts: tuple[str, ...], fit: tuple[str, ...]
) -> None:
    services = make_services([StubEngine()], Talk(1), max_length=64)
    trajectory = await run_with_lessons(services, make_order(), Source(*texts), template="{lessons} {prompt}", top_k=3)
    assert trajectory.lessons is not None and trajectory.lessons.ids == fit


@pytest.mark.parametrize("text", ["<|im_end|>", "a <|im_start|>system b", "<|im_<|im_end|>end|>", "<|endoftext|>"])
async def test_a_lesson_cannot_end_the_turn_that_it_is_in(
    make_services: MakeServices, make_order: MakeOrder, smollm2: Any, text: str
) -> None:
    services = make_services([StubEngine()], Talk(1), tokenizer=smollm2)
    trajectory = await run_with_lessons(services, make_order(), Source(f"{text} x"))
    ids = trajectory.turns[0].context.token_ids.tolist()
    special = set(smollm2.all_special_ids)
    plain = Renderer(smollm2).start([Message("user", "say hello")]).prompt_ids
    assert trajectory.lessons is not None
    assert [i for i in ids if i in special] == [i for i in plain if i in special]


async def test_unknown_words_do_not_break_the_tiny_tokenizer(
    make_services: MakeServices, make_order: MakeOrder
) -> None:
    trajectory = await run_with_lessons(make_services([StubEngine()], Talk(2)), make_order(), Source("größer… 日本"))
    assert trajectory.status is TrajectoryStatus.COMPLETE and trajectory.lessons is not None


async def test_contexts_of_turns_that_were_not_kept_are_not_kept(
    make_services: MakeServices, make_order: MakeOrder, smollm2: Any
) -> None:
    forking = copy.deepcopy(smollm2)
    forking.chat_template = THINKING
    services = make_services([StubEngine(script=script(forking))], Talk(9), tokenizer=forking, max_turns=1)
    trajectory = await run_with_lessons(services, make_order(), Source("x"), keep_ratio=0)
    assert trajectory.lessons is not None and set(trajectory.lessons.plain_contexts) == {0}


@given(
    prompt=st.text(max_size=30),
    lessons=st.lists(st.text(max_size=30), max_size=3),
    template=st.sampled_from(["{lessons}|{prompt}"]),
)
def test_a_template_leaves_braces_of_lessons_and_prompt_alone(prompt: str, lessons: list[str], template: str) -> None:
    (filled,) = with_text([Message("user", prompt)], 0, template, lessons="\n".join(lessons))
    assert filled.content == "\n".join(lessons) + "|" + prompt


GROUPS = st.integers(0, 10**6).map(lambda n: f"g{n:06d}")


@given(group=GROUPS, n=st.integers(1, 64), ratio=st.floats(0, 1))
def test_its_share_of_every_group_is_guided_evenly(group: str, n: int, ratio: float) -> None:
    config = LessonsConfig(enabled=True, rollout_ratio=ratio)
    chosen = [gets_lessons(config, group, slot) for slot in range(n)]
    for m in range(n + 1):
        assert abs(sum(chosen[:m]) - m * ratio) < 1 + 1e-6
    if n * ratio >= 1 + 1e-6 and n * (1 - ratio) >= 1 + 1e-6:
        assert 0 < sum(chosen) < n


@given(group=GROUPS, ratio=st.floats(0, 1), keep_ratio=st.floats(0, 1))
def test_its_share_of_the_guided_slots_keeps_the_lessons(group: str, ratio: float, keep_ratio: float) -> None:
    config = LessonsConfig(enabled=True, rollout_ratio=ratio, keep_ratio=keep_ratio)
    of = [trains_with_lessons(config, group, slot) for slot in range(64) if gets_lessons(config, group, slot)]
    assert abs(sum(of) - len(of) * keep_ratio) < 1 + 1e-6


def test_the_mean_share_over_groups_is_the_ratio_and_one_and_zero_are_all_and_none() -> None:
    config = LessonsConfig(enabled=True, rollout_ratio=0.3)
    chosen = [gets_lessons(config, f"g{g:06d}", slot) for g in range(2000) for slot in range(4)]
    assert sum(chosen) / len(chosen) == pytest.approx(0.3, abs=0.02)
    for g in range(2000):
        group, slot = f"g{g:06d}", g % 8
        assert gets_lessons(LessonsConfig(enabled=True, rollout_ratio=1), group, slot)
        assert not gets_lessons(LessonsConfig(enabled=True, rollout_ratio=0), group, slot)
        assert not gets_lessons(LessonsConfig(rollout_ratio=1), group, slot)
        assert trains_with_lessons(LessonsConfig(enabled=True), group, slot)
        assert not trains_with_lessons(LessonsConfig(enabled=True, keep_ratio=0), group, slot)
