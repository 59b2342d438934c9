"""The built-in environment with a tool."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from actors.environments import Reply, Step, ToolUse
from actors.environments.big_sums import BigSums
from actors.environments.host import EnvironmentHost
from actors.loop.build import build_loop
from actors.rendering import Renderer
from actors.tools.calculator import calculate
from pipeline.config.load import load
from pipeline.metrics.actor import ActorMetrics
from pipeline.schema import Task

RUN_FILE = Path(__file__).resolve().parents[3] / "configs" / "tools.yaml"


def step(seed: int, reply: str, *uses: ToolUse) -> tuple[str, Step]:
    episode = BigSums().start(Task(f"t/{seed}", "sums", seed))
    question = episode.messages[0].content.split("What is ")[1].split("?")[0]
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


def test_the_run_file_builds_its_agent_loop(words: Renderer, metrics: ActorMetrics) -> None:
    config = load(RUN_FILE)
    host = EnvironmentHost("sums", config.environments["sums"])
    loop = build_loop(host, Renderer(words), metrics)
    assert type(loop).__name__ == "ToolAgent" and [t.name for t in host.tools()] == ["calculator"]


@pytest.mark.parametrize("options", [{"digits": 0}, {"operations": ()}, {"operations": ("+", "+")}])
def test_wrong_options_are_refused(options: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=r"digits|operations"):
        BigSums(**options)  # type: ignore[arg-type]
