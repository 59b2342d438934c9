"""OpenAI's own client drives a session on a real engine: what is recorded is what the engine saw and sampled."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import Any

import aiohttp
import anyio
import anyio.to_thread
import numpy as np
import pytest

from actors.engine.base import Generation, Sampling
from actors.engine.client import EngineClient
from actors.engine.pool import EnginePool
from actors.environments.host import EnvironmentHost
from actors.metrics import ActorMetrics
from actors.rendering.renderer import Renderer
from actors.rendering.tokenizer import load_tokenizer
from actors.rollout.rollout import Rollout
from actors.rollout.services import Services
from pipeline.runtime.engine_keys import authorization
from pipeline.runtime.metrics import CollectorRegistry
from pipeline.runtime.run_directory import RunDirectory
from pipeline.schema import Order, Task, Trajectory, TrajectoryStatus
from tests.end_to_end.conftest import VLLM
from tests.support.running_engine import RunningEngine

VERSION = 2_000_000
"""Above what other tests stamp on the same engine: versions never go back."""
SECONDS = 300.0
TOOL = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Add two integers.",
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
            "required": ["a", "b"],
        },
    },
}
pytestmark = pytest.mark.timeout(900)


class Watched(EngineClient):
    """Keeps what was asked of the engine and what it answered."""

    def __init__(self, engine: RunningEngine) -> None:
        super().__init__(engine.url, key=engine.key("actor"))
        self.seen: list[tuple[list[int], Generation]] = []

    async def generate(self, token_ids: Sequence[int], sampling: Sampling, **more: Any) -> Generation:
        generation = await super().generate(token_ids, sampling, **more)
        self.seen.append((list(token_ids), generation))
        return generation


@pytest.fixture(params=["embedded", VLLM])
async def engine(request: pytest.FixtureRequest) -> AsyncIterator[RunningEngine]:
    """Stamped as ``VERSION``."""
    pytest.importorskip("openai", reason="pip install openai to test its clients against the gateway")
    running: RunningEngine = request.getfixturevalue(f"{request.param}_engine")
    async with aiohttp.ClientSession() as session:
        body = {"new_version": str(VERSION)}
        async with session.post(f"{running.url}/update_weight_version", json=body, headers=running.control) as answer:
            assert answer.status == 200
    yield running


class Program:
    """Two calls of a tool-using conversation by the async client (whole, streamed), one more by the sync client, and
    one of two choices with a stop text. Remembers what it was told."""

    def __init__(self, on_vllm: bool) -> None:
        self.on_vllm = on_vllm
        self.texts: list[str] = []
        self.logprobs: list[float] = []
        self.stopped: list[Any] = []

    async def __call__(self, task: Any, base_url: str, api_key: str) -> float:
        import openai

        history: list[Any] = [{"role": "user", "content": "say hello"}]
        async with openai.AsyncOpenAI(base_url=base_url, api_key=api_key, timeout=SECONDS, max_retries=0) as api:
            whole = await api.chat.completions.create(model="m", messages=history, tools=[TOOL], logprobs=True)  # type: ignore[list-item]
            message, logprobs = whole.choices[0].message, whole.choices[0].logprobs
            assert logprobs is not None and logprobs.content is not None
            self.logprobs = [token.logprob for token in logprobs.content]
            self.texts.append(message.content or "")
            history.append(message)
            calls = message.tool_calls or ()
            history += [{"role": "tool", "tool_call_id": call.id, "content": "5"} for call in calls]
            history += [] if calls else [{"role": "user", "content": "again"}]
            text = ""
            stream = await api.chat.completions.create(model="m", messages=history, tools=[TOOL], stream=True)  # type: ignore[list-item]
            async for chunk in stream:
                text += chunk.choices[0].delta.content or ""
            self.texts.append(text)
            history += [{"role": "assistant", "content": text}, {"role": "user", "content": "try"}]
            if self.on_vllm:
                answer = await api.chat.completions.create(
                    model="m", messages=[{"role": "user", "content": "Tell a story."}], n=2, stop=["e"]
                )
                self.stopped = [choice.message.content for choice in answer.choices]

        def at_last() -> str:
            with openai.OpenAI(base_url=base_url, api_key=api_key, timeout=SECONDS, max_retries=0) as sync:
                answer = sync.chat.completions.create(model="m", messages=history, tools=[TOOL], max_tokens=4)  # type: ignore[list-item]
            return answer.choices[0].message.content or ""

        self.texts.append(await anyio.to_thread.run_sync(at_last))
        return 1.0


async def play(engine: RunningEngine, client: Watched, program: Program) -> tuple[Trajectory, Renderer]:
    settings = engine.config.model_dump()
    loop = {"name": "program", "options": {"function": "builtins:print", "parser": "hermes"}, "history": "append"}
    section = {"name": "program", "loop": loop, "max_turns": 8, "max_seconds": SECONDS}
    settings |= {"environments": {"game": section}, "sampling": {"max_tokens": 16}}
    config = type(engine.config).model_validate(settings)
    metrics = ActorMetrics(CollectorRegistry(), environments=("game",))
    pool = EnginePool([client], wait_seconds_max=30, metrics=metrics)
    renderer = Renderer(*load_tokenizer(RunDirectory(config.run.path).model))
    hosts = {"game": EnvironmentHost("game", config.environments["game"])}
    services = Services.of(config, "actor-0", renderer, pool, hosts, metrics)
    services.loops["game"]._function = program  # type: ignore[attr-defined]
    order = Order("g0.0.0", "g0", Task("game/0", "game", 0), 0, 0, VERSION, SECONDS)
    async with anyio.create_task_group() as background:
        background.start_soon(pool.watch)
        background.start_soon(services.serve)
        with anyio.fail_after(SECONDS):
            trajectory = await Rollout(order, services).run()
        background.cancel_scope.cancel()
    await services.close()
    await pool.close()
    return trajectory, renderer


async def test_a_session_of_openais_clients_is_token_exact(engine: RunningEngine) -> None:
    on_vllm = engine.config.engine.kind == "vllm"
    client, program = Watched(engine), Program(on_vllm)
    trajectory, renderer = await play(engine, client, program)
    assert trajectory.status is TrajectoryStatus.COMPLETE, trajectory.failure
    assert trajectory.rewards == {"environment": 1.0} and trajectory.version_range() == (VERSION, VERSION)
    talk = [turn for turn in trajectory.turns if turn.branch == trajectory.graded_turn.branch]
    assert len(talk) == 3 and len(trajectory.turns) == 3 + len(program.stopped)

    seen = {(tuple(prompt), tuple(generation.token_ids.tolist())) for prompt, generation in client.seen}
    for branch in trajectory.branches():
        turns = [trajectory.turns[i] for i in sorted(set(branch.turn_index.tolist()))]
        ids, last = tuple(branch.token_ids.tolist()), len(turns[-1].completion)
        assert (ids[:-last], ids[-last:]) in seen
        assert int(branch.loss_mask.sum()) == sum(len(turn.completion) for turn in turns)
    sampled = sorted(tuple(turn.completion.token_ids.tolist()) for turn in trajectory.turns)
    assert sampled == sorted(tuple(generation.token_ids.tolist()) for _, generation in client.seen)
    for turn, text in zip(talk, program.texts, strict=True):
        ids = turn.completion.token_ids.tolist()
        assert renderer.completed(ids).text == turn.completion_message.content
        assert turn.signals["tool_calls"] or text == turn.completion_message.content
    assert np.allclose(talk[0].completion.behaviour_logprobs, program.logprobs)
    if on_vllm:
        assert len(program.stopped) == 2 and all("e" not in text for text in program.stopped)
        messages = [{"role": "user", "content": "Tell a story."}]
        assert tuple(await rendered_by_vllm(engine, messages)) in {prompt for prompt, _ in seen}


async def rendered_by_vllm(engine: RunningEngine, messages: list[dict[str, str]]) -> list[int]:
    """The prompt that the server itself makes of these messages."""
    body = {"model": "policy", "messages": messages, "add_generation_prompt": True}
    headers, url = authorization(engine.key("actor")), f"{engine.url}/tokenize"
    async with aiohttp.ClientSession(headers=headers) as session, session.post(url, json=body) as answer:
        assert answer.status == 200, await answer.text()
        return list((await answer.json())["tokens"])
