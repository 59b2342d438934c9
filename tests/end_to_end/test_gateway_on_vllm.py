"""OpenAI's own client drives a session on a real engine, and agents of other people drive theirs on a real vLLM: what
is recorded is what the engine saw and sampled."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import aiohttp
import anyio
import anyio.to_thread
import numpy as np
import pytest
import yaml

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
from tests.support.agent_programs import LIBRARY_PROGRAMS, agents_python, library_command, page_options
from tests.support.running_engine import RunningEngine
from tests.support.sandbox_kinds import options_of

VERSION = 2_000_000
"""Above what other tests stamp on the same engine: versions never go back."""
SECONDS = 2400.0
"""A guard against hanging."""
MINI = "mini-swe-agent"
CODING_AGENT = Path(__file__).parents[2] / "configs" / "coding_agent.yaml"
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
pytestmark = pytest.mark.timeout(3600)


class Watched(EngineClient):
    """Keeps what was asked of the engine and what it answered."""

    def __init__(self, engine: RunningEngine) -> None:
        super().__init__(engine.url, key=engine.key("actor"), request_seconds_max=SECONDS)
        self.seen: list[tuple[list[int], Generation]] = []
        self.n_heard = 0
        """Tokens that came before the end of their request."""

    async def generate(self, token_ids: Sequence[int], sampling: Sampling, **more: Any) -> Generation:
        if (heard := more.get("heard")) is not None:

            def both(token_ids: Any, logprobs: Any) -> None:
                self.n_heard += len(token_ids)
                heard(token_ids, logprobs)

            more["heard"] = both
        generation = await super().generate(token_ids, sampling, **more)
        self.seen.append((list(token_ids), generation))
        return generation


@pytest.fixture(params=["embedded", VLLM])
async def engine(request: pytest.FixtureRequest) -> RunningEngine:
    """Stamped as ``VERSION``."""
    pytest.importorskip("openai", reason="pip install openai to test its clients against the gateway")
    running: RunningEngine = request.getfixturevalue(f"{request.param}_engine")
    await stamp(running)
    return running


async def stamp(engine: RunningEngine) -> None:
    async with aiohttp.ClientSession() as session:
        body = {"new_version": str(VERSION)}
        async with session.post(f"{engine.url}/update_weight_version", json=body, headers=engine.control) as answer:
            assert answer.status == 200


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


Sections = Mapping[str, Mapping[str, Any]]


async def play(
    engine: RunningEngine,
    client: Watched,
    sections: Sections,
    tokens_max: int,
    function: Callable[..., Any] | None = None,
) -> tuple[dict[str, Trajectory], Renderer]:
    """One episode of each section of ``environments``, all at once. ``function`` is called in place of theirs. None of
    their sandboxes is left."""
    settings = engine.config.model_dump() | {"environments": sections, "sampling": {"max_tokens": tokens_max}}
    config = type(engine.config).model_validate(settings)
    metrics = ActorMetrics(CollectorRegistry(), environments=tuple(sections))
    pool = EnginePool([client], wait_seconds_max=SECONDS, metrics=metrics)  # a long prompt keeps it busy
    renderer = Renderer(*load_tokenizer(RunDirectory(config.run.path).model))
    hosts = {name: EnvironmentHost(name, section) for name, section in config.environments.items()}
    services = Services.of(config, "actor-0", renderer, pool, hosts, metrics)
    loops: Any = services.loops
    played: dict[str, Trajectory] = {}

    async def one(name: str) -> None:
        if function is not None:
            loops[name]._function = function
        order = Order(f"{name}.0", name, Task(f"{name}/0", name, 0), 0, 0, VERSION, SECONDS)
        played[name] = await Rollout(order, services).run()

    async with anyio.create_task_group() as background:
        background.start_soon(pool.watch)
        background.start_soon(services.serve)
        async with anyio.create_task_group() as episodes:
            for name in sections:
                episodes.start_soon(one, name)
        background.cancel_scope.cancel()
    assert not any(loop._program._sandboxes.live for loop in loops.values() if loop._program is not None)
    await services.close()
    await pool.close()
    return played, renderer


def section(**options: Any) -> dict[str, Any]:
    """An environment whose episodes are those of a program."""
    loop = {"name": "program", "options": {"parser": "hermes", **options}, "history": "append"}
    return {"name": "program", "loop": loop, "max_turns": 8, "max_seconds": SECONDS}


async def test_a_session_of_openais_clients_is_token_exact(engine: RunningEngine) -> None:
    on_vllm = engine.config.engine.kind == "vllm"
    client, program = Watched(engine), Program(on_vllm)
    sections = {"game": section(function="builtins:print")}
    played, renderer = await play(engine, client, sections, 16, program)
    trajectory = played["game"]
    assert trajectory.status is TrajectoryStatus.COMPLETE, trajectory.failure
    assert trajectory.rewards == {"environment": 1.0} and trajectory.version_range() == (VERSION, VERSION)
    talk = [turn for turn in trajectory.turns if turn.branch == trajectory.graded_turn.branch]
    assert len(talk) == 3 and len(trajectory.turns) == 3 + len(program.stopped)

    seen = log_of(client)
    assert_in_log(trajectory, seen)
    assert sampled([trajectory]) == Counter(completion for _, completion in seen.elements())
    for turn, text in zip(talk, program.texts, strict=True):
        ids = turn.completion.token_ids.tolist()
        assert renderer.completed(ids).text == turn.completion_message.content
        assert turn.signals["tool_calls"] or text == turn.completion_message.content
    assert np.allclose(talk[0].completion.behaviour_logprobs, program.logprobs)
    if on_vllm:
        assert len(program.stopped) == 2 and all("e" not in text for text in program.stopped)
        messages = [{"role": "user", "content": "Tell a story."}]
        assert tuple(await rendered_by_vllm(engine, messages)) in {prompt for prompt, _ in seen}


async def test_a_stream_shows_the_text_of_the_recorded_tokens_before_the_last_is_sampled(
    engine: RunningEngine,
) -> None:
    client, texts, finished = Watched(engine), list[str](), list[bool]()

    async def program(task: Any, base_url: str, api_key: str) -> float:
        import openai

        async with openai.AsyncOpenAI(base_url=base_url, api_key=api_key, timeout=SECONDS, max_retries=0) as api:
            ask: Any = {"model": "m", "messages": [{"role": "user", "content": "Tell a long story."}], "stream": True}
            texts.append("")
            async for chunk in await api.chat.completions.create(**ask):
                if chunk.choices[0].delta.content and not texts[0]:
                    finished.append(bool(client.seen))
                texts[0] += chunk.choices[0].delta.content or ""
        return 1.0

    played, renderer = await play(engine, client, {"game": section(function="builtins:print")}, 48, program)
    trajectory = played["game"]
    assert trajectory.status is TrajectoryStatus.COMPLETE, trajectory.failure
    assert_in_log(trajectory, log_of(client))
    (turn,) = trajectory.turns
    assert texts == [renderer.completed(turn.completion.token_ids.tolist()).text]
    assert client.n_heard == len(turn.completion)
    if engine.config.engine.kind == "vllm":  # 25 ms a token; the tiny model of the other engine may end at once
        assert finished == [False]


Log = Counter[tuple[tuple[int, ...], tuple[int, ...]]]


def log_of(client: Watched) -> Log:
    """(prompt, completion) of the engine's requests."""
    return Counter((tuple(prompt), tuple(generation.token_ids.tolist())) for prompt, generation in client.seen)


def assert_in_log(trajectory: Trajectory, seen: Log) -> None:
    """The trajectory holds what the engine read and sampled."""
    assert trajectory.turns
    for branch in trajectory.branches():
        turns = [trajectory.turns[i] for i in sorted(set(branch.turn_index.tolist()))]
        ids, last = tuple(branch.token_ids.tolist()), len(turns[-1].completion)
        assert (ids[:-last], ids[-last:]) in seen
        assert int(branch.loss_mask.sum()) == sum(len(turn.completion) for turn in turns)


def sampled(trajectories: Sequence[Trajectory]) -> Counter[tuple[int, ...]]:
    return Counter(tuple(turn.completion.token_ids.tolist()) for played in trajectories for turn in played.turns)


@pytest.fixture(scope="module")
def agents(request: pytest.FixtureRequest) -> tuple[dict[str, Trajectory], Log]:
    """Episodes of all agents that are installed here, played at once, and the engine's log."""
    sections: dict[str, Mapping[str, Any]] = {}
    for program in LIBRARY_PROGRAMS:
        with contextlib.suppress(pytest.skip.Exception):
            environment = {"OPENAI_AGENTS_DISABLE_TRACING": "1"}
            played = section(command=library_command(program), reward="scorer", environment=environment)
            sections[program] = played | {"max_turns": 4}  # an agent that does not end loops until it is refused
    with contextlib.suppress(pytest.skip.Exception):
        python = Path(agents_python())
        options_of("bubblewrap")
        repair = yaml.safe_load(CODING_AGENT.read_text())["environments"]["repair"]
        loop = {"name": "program", "options": page_options(python.parents[1])}
        sections[MINI] = repair | {"loop": loop, "max_seconds": SECONDS, "max_turns": 2}
    if not sections:
        return {}, Counter()
    engine: RunningEngine = request.getfixturevalue("vllm_engine")

    async def run() -> tuple[dict[str, Trajectory], Log]:
        await stamp(engine)
        client = Watched(engine)
        played, _ = await play(engine, client, sections, 64)
        return played, log_of(client)

    return anyio.run(run)


@pytest.mark.vllm
@pytest.mark.parametrize("program", [*LIBRARY_PROGRAMS, MINI])
def test_an_agent_of_other_people_is_token_exact(agents: tuple[dict[str, Trajectory], Log], program: str) -> None:
    if program == MINI:
        agents_python()
        options_of("bubblewrap")
    else:
        library_command(program)
    played, seen = agents
    trajectory = played[program]
    failure = trajectory.failure  # openai-agents takes a reply that is cut for an error
    assert failure is None or (failure.boundary == "program" and "max_output_tokens" in failure.details), failure
    assert_in_log(trajectory, seen)
    assert sampled(list(played.values())) == Counter(completion for _, completion in seen.elements())
    if program == MINI:
        assert set(trajectory.rewards) == {"environment"} and "right_calls" in trajectory.turns[-1].signals


async def rendered_by_vllm(engine: RunningEngine, messages: list[dict[str, str]]) -> list[int]:
    """The prompt that the server itself makes of these messages."""
    body = {"model": "policy", "messages": messages, "add_generation_prompt": True}
    headers, url = authorization(engine.key("actor")), f"{engine.url}/tokenize"
    async with aiohttp.ClientSession(headers=headers) as session, session.post(url, json=body) as answer:
        assert answer.status == 200, await answer.text()
        return list((await answer.json())["tokens"])
