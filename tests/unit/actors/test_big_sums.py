"""The built-in environment with a tool."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from actors.adapters.big_sums import BigSums
from actors.environments import Reply, Step, ToolUse
from actors.environments.host import EnvironmentHost
from actors.metrics import ActorMetrics
from actors.rendering.renderer import Renderer
from actors.rollout.services import build_loop
from actors.tools.base import schema_of_tool
from actors.tools.calculator import calculate
from actors.tools.parsing.base import ToolCall
from actors.tools.parsing.registry import FORMATS
from pipeline.config.load import load
from pipeline.schema import Task

RUN_FILE = Path(__file__).resolve().parents[3] / "configs" / "tools.yaml"


def step(seed: int, reply: str, *uses: ToolUse) -> tuple[str, Step]:
    episode = BigSums().start(Task(f"t/{seed}", "sums", seed))
    question = episode.messages[-1].content.split("What is ")[1].split("?")[0]
    answer = calculate(question)
    done = episode.step(Reply(reply.format(answer=answer), tool_calls=uses))
    assert isinstance(done, Step)
    return answer, done


@given(seed=st.integers(0, 2**62), text=st.sampled_from(["{answer}", "It is {answer}.", "12 and then {answer}"]))
def test_the_calculators_answer_is_the_right_one(seed: int, text: str) -> None:
    answer, done = step(seed, text)
    assert (done.reward, done.done) == (1.0, True)
    use = ToolUse("calculator", {}, answer, True)
    _, done = step(seed, "no idea", use)
    assert done.reward == 0.2 and done.signals == {"called": 1.0, "right": 0.0}
    _, done = step(seed, "9" * 5000 + "-")
    assert done.reward == 0.0


@given(seed=st.integers(0, 2**62), operation=st.sampled_from("+-*"))
def test_a_story_has_the_numbers_of_its_sum_and_an_answer_that_is_not_negative(seed: int, operation: str) -> None:
    episode = BigSums(stories=True, operations=(operation,), examples=0, digits=4).start(Task("t", "sums", seed))  # type: ignore[arg-type]
    (question,) = episode.messages
    a, b = sorted((int(n) for n in re.findall(r"\d+", question.content)), reverse=True)
    value = {"+": a + b, "-": a - b, "*": a * b}[operation]
    done = episode.step(Reply(str(value)))
    assert isinstance(done, Step) and done.reward == 1.0 and value >= 0
    assert question.content.endswith("?") and "{" not in question.content


@pytest.mark.parametrize("told", [True, False])
def test_solved_examples_stand_before_the_question_in_the_form_that_is_asked_for(smollm2: Any, told: bool) -> None:
    environment = BigSums(examples=2)
    renderer = Renderer(smollm2)
    tools = [schema_of_tool(tool, "") for tool in environment.tools()]
    text = renderer.start(environment.start(Task("t", "sums", 1)).messages, tools if told else ()).text
    assert ("# Tools" in text) == told
    shown = text.split("<|im_end|>", 1)[1] if told else text
    calls = [*FORMATS["hermes"].parse(shown, tools).calls]
    answers = [part.split("\n</tool_response>")[0] for part in text.split("<tool_response>\n")[1:]]
    assert [calculate(c.arguments["expression"]) for c in calls if isinstance(c, ToolCall)] == answers
    assert len(answers) == 2 and text.endswith("?<|im_end|>\n<|im_start|>assistant\n")


def test_the_run_file_builds_its_agent_loop(words: Renderer, metrics: ActorMetrics) -> None:
    config = load(RUN_FILE)
    host = EnvironmentHost("sums", config.environments["sums"])
    loop = build_loop(host, Renderer(words), metrics)
    assert type(loop).__name__ == "ToolAgent" and [t.name for t in host.tools()] == ["calculator"]


@pytest.mark.parametrize("options", [{"digits": 0}, {"operations": ()}, {"operations": ("+", "+")}])
def test_wrong_options_are_refused(options: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=r"digits|operations"):
        BigSums(**options)  # type: ignore[arg-type]
