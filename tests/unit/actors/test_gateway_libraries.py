"""Documentation examples of agent libraries, unmodified, each play an episode: the trajectory is the engine's log,
token for token. The libraries live in a Python and a folder of their own."""

from __future__ import annotations

from typing import Any

import pytest

from actors.engine.base import Generation
from pipeline.schema import Order, TrajectoryStatus
from tests.support.agent_programs import Serve, assert_exact, library_command, run_order
from tests.support.stub_engine import StubEngine

pytestmark = [pytest.mark.timeout(600), pytest.mark.slow]
WEATHER = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Tokyo"}}\n</tool_call>'
CODE = "Thought: I add.\n<code>\nfinal_answer(sum(range(1, 11)))\n</code>"


@pytest.mark.parametrize(
    ("program", "replies", "branches"),
    [
        ("openai_chat.py", ["Arr, use isinstance.", "This is a test."], [0, 1]),
        ("openai_responses.py", ["Arr, use isinstance.", "Arr, because.", "Once."], [0, 1, 1]),
        ("anthropic_messages.py", ["Hello.", "Hello there!"], [0, 1]),
        ("openai_agents.py", [WEATHER, "It is sunny."], [0, 0]),
        ("pydantic_agent.py", ["From a book on C.", WEATHER, "It is sunny."], [0, 0, 1]),
        ("langgraph_agent.py", [WEATHER, "It is sunny."], [0, 0]),
        ("smolagents_agent.py", [CODE], [0]),
        ("openai_node.mjs", ["Arr, they be.", "Arr, aye.", "Sheep sleep deep."], [0, 1, 2]),
    ],
)
async def test_an_example_of_the_documentation_plays_token_for_token(
    serve: Serve, long_order: Order, smollm2: Any, program: str, replies: list[str], branches: list[int]
) -> None:
    told = iter(replies)
    engine = StubEngine(script=lambda ids, s: [*smollm2(next(told)).input_ids, smollm2.eos_token_id])
    log: list[tuple[tuple[int, ...], Generation]] = []
    generate = engine.generate

    async def logged(token_ids: Any, *args: Any, **options: Any) -> Generation:
        generation = await generate(token_ids, *args, **options)
        log.append((tuple(token_ids), generation))
        return generation

    engine.generate = logged  # type: ignore[method-assign]
    options = {
        "command": library_command(program),
        "reward": "scorer",
        "environment": {"OPENAI_AGENTS_DISABLE_TRACING": "1"},
    }
    limits = {"sampling": {"max_tokens": 256}, "max_turns": 9, "max_tokens": 32_000, "max_length": 8192}
    trajectory = await run_order(serve(engine, loop_options=options, tokenizer=smollm2, **limits), long_order)
    assert trajectory.status is TrajectoryStatus.COMPLETE, trajectory.failure
    assert sorted(turn.branch for turn in trajectory.turns) == branches
    assert_exact(trajectory, engine)
    sampled = sorted(turn.completion.token_ids.tolist() for turn in trajectory.turns)
    assert sampled == sorted(generation.token_ids.tolist() for _, generation in log) and len(log) == len(replies)
