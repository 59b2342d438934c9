"""Streams: events are written while the engine samples, what is recorded is what is recorded without them, and what was
shown is never replaced by another sample."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import anyio
import orjson
import pytest

from actors.gateway import session
from pipeline.errors import EngineUnavailable
from pipeline.schema import Order, TrajectoryStatus
from tests.support.agent_programs import Caller, Serve, assert_exact, hear_outcomes, run_order, user
from tests.support.stub_engine import StubEngine

pytestmark = pytest.mark.timeout(400)
BODIES: dict[str, dict[str, Any]] = {
    "/chat/completions": {"messages": [user("say hello")]},
    "/messages": {"messages": [user("say hello")], "max_tokens": 9},
    "/responses": {"input": [user("say hello")]},
}
SAID = "4 5 6 7"


class StepwiseEngine(StubEngine):
    """Samples :data:`SAID`; after the first token that is heard it waits for :attr:`release`."""

    def __init__(self, words: Any) -> None:
        ids = [*words(SAID, add_special_tokens=False).input_ids, words.eos_token_id]
        super().__init__(script=lambda _, sampling: ids[: sampling.max_tokens])
        self.first, self.release = anyio.Event(), anyio.Event()
        self.n_heard = 0
        self.dies = False

    async def between(self, n_heard: int) -> None:
        self.n_heard = n_heard
        if n_heard == 2:  # the text of the first token is known
            self.first.set()
            await self.release.wait()
            if self.dies:
                raise EngineUnavailable(f"engine {self.name} died in a request")


def shown(event: Any) -> str:
    """The text that an event of any dialect brings."""
    if event.get("choices"):
        return str(event["choices"][0]["delta"].get("content") or "")
    delta = event.get("delta")
    return delta if isinstance(delta, str) else str((delta or {}).get("text", ""))


@asynccontextmanager
async def streaming(client: Caller, path: str, **headers: str) -> AsyncIterator[tuple[Any, AsyncIterator[Any]]]:
    """The response to a streamed request, and its events."""
    body = {**BODIES[path], "stream": True}
    async with client._session.post(f"{client.base_url}{path}", json=body, headers=headers) as response:

        async def events() -> AsyncIterator[Any]:
            async for line in response.content:
                if line.startswith(b"data: {"):
                    yield orjson.loads(line.removeprefix(b"data: "))

        yield response, events()


async def taken(events: AsyncIterator[Any]) -> str:
    return "".join([shown(event) async for event in events])


@pytest.mark.parametrize("path", BODIES)
async def test_the_first_event_comes_before_the_last_token_and_the_record_is_that_of_a_whole_answer(
    serve: Serve, make_order: Callable[..., Order], words: Any, path: str
) -> None:
    """The engine goes on when the program has read the first text."""
    found = []
    for streamed in (False, True):
        engine = StepwiseEngine(words)

        async def run(task: Any, client: Caller) -> float:
            if not streamed:  # noqa: B023
                assert (await client.post(path, BODIES[path]))[0] == 200
                return 1.0
            async with streaming(client, path) as (response, events):
                assert response.status == 200 and response.content_type == "text/event-stream"
                async for event in events:
                    if text := shown(event):
                        break
                assert SAID.startswith(text) and engine.n_heard == 2  # noqa: B023
                engine.release.set()  # noqa: B023
                assert text + await taken(events) == SAID
            return 1.0

        trajectory = await run_order(serve(engine, run, sampling={"max_tokens": 8}), make_order(seconds_max=200.0))
        assert trajectory.status is TrajectoryStatus.COMPLETE, trajectory.failure
        assert_exact(trajectory, engine)
        assert (engine.n_heard > 0) == streamed, "an answer that is not streamed asks the engine for no stream"
        (turn,) = trajectory.turns
        span = turn.completion
        assert span.behaviour_logprobs is not None
        found.append(
            (span.token_ids.tolist(), span.behaviour_logprobs.tolist(), span.version_spans, turn.finish_reason)
        )
    assert found[0] == found[1]


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("asks_again", [False, True])
async def test_an_engine_that_dies_in_a_stream_ends_it_with_an_error_and_is_not_asked_again(
    serve: Serve, long_order: Order, words: Any, path: str, asks_again: bool
) -> None:
    engine, outcomes = StepwiseEngine(words), list[str]()
    engine.dies = True

    async def run(task: Any, client: Caller) -> float:
        async with streaming(client, path) as (response, events):
            assert response.status == 200
            async for event in events:
                if shown(event):
                    engine.release.set()
            assert "died in a request" in event["error"]["message"]
            if path == "/messages":
                assert (event["type"], event["error"]["type"]) == ("error", "api_error")
            else:
                assert event["error"]["code"] == "engine_unavailable"
        assert engine.n_requests == 1, "another sample would not continue what was shown"
        if asks_again:
            engine.dies = False
            async with streaming(client, path) as (_, events):
                assert await taken(events) == SAID
        return 1.0

    services = serve(engine, run, sampling={"max_tokens": 8})
    hear_outcomes(services, outcomes.append)
    trajectory = await run_order(services, long_order)
    assert outcomes == (["engine", "ok"] if asks_again else ["engine"])
    if asks_again:
        assert trajectory.status is TrajectoryStatus.COMPLETE and len(trajectory.turns) == 1, trajectory.failure
        assert trajectory.turns[0].signals["refused_calls"] == 1.0
    else:
        assert trajectory.status is TrajectoryStatus.ERROR and trajectory.failure is not None
        assert trajectory.failure.boundary == "engine" and trajectory.rewards == {}


async def test_an_engine_that_dies_before_the_first_token_is_asked_again_and_the_program_sees_nothing(
    serve: Serve, long_order: Order, words: Any
) -> None:
    engine = StepwiseEngine(words)
    engine.release.set()
    generate = engine.generate

    async def failing(*args: Any, **options: Any) -> Any:
        if engine.n_requests < 2:
            engine.n_requests += 1
            raise EngineUnavailable("HTTP 500")
        return await generate(*args, **options)

    engine.generate = failing  # type: ignore[method-assign]

    async def run(task: Any, client: Caller) -> float:
        async with streaming(client, "/chat/completions") as (_, events):
            assert await taken(events) == SAID
        return 1.0

    trajectory = await run_order(serve(engine, run, sampling={"max_tokens": 8}), long_order)
    assert trajectory.status is TrajectoryStatus.COMPLETE and len(trajectory.turns) == 1, trajectory.failure
    assert engine.n_requests == 3


@pytest.mark.parametrize("comes_back", [True, False])
async def test_a_client_that_hangs_up_in_a_stream_finds_it_again_from_its_beginning(
    serve: Serve, long_order: Order, words: Any, monkeypatch: pytest.MonkeyPatch, comes_back: bool
) -> None:
    """Once. Without a client for too long the call leaves nothing behind."""
    if not comes_back:
        monkeypatch.setattr(session, "ABANDONED_SECONDS_MAX", 0.0)
    engine, hung_up = StepwiseEngine(words), anyio.Event()

    async def run(task: Any, client: Caller) -> float:
        async with streaming(client, "/chat/completions") as (response, events):
            async for event in events:
                if shown(event):
                    break
            response.close()
        await hung_up.wait()
        if comes_back:
            async with streaming(client, "/chat/completions") as (response, events):
                assert response.headers["X-Afterplay-Repeated"] == "true"
                async for again in events:
                    if text := shown(again):
                        break
                assert again["id"] == event["id"]
                engine.release.set()
                assert text + await taken(events) == SAID
        return 1.0

    services = serve(engine, run, sampling={"max_tokens": 8})
    hear_outcomes(services, lambda outcome: hung_up.set() if outcome == "hung_up" else None)
    trajectory = await run_order(services, long_order)
    assert engine.n_requests == 1
    if comes_back:
        assert trajectory.status is TrajectoryStatus.COMPLETE and len(trajectory.turns) == 1, trajectory.failure
    else:
        assert trajectory.failure is not None and trajectory.failure.kind == "NoCalls"


async def test_a_limit_in_a_stream_is_its_last_event_and_the_episode_is_truncated(
    serve: Serve, long_order: Order, words: Any
) -> None:
    engine = StepwiseEngine(words)

    async def run(task: Any, client: Caller) -> dict[str, Any]:
        gateway = services.loops["game"].gateway  # type: ignore[attr-defined]
        await client.chat([user("say")])
        async with streaming(client, "/chat/completions") as (_, events):
            async for event in events:
                if shown(event):
                    next(iter(gateway._sessions.values())).expire()
        assert event["error"]["code"] == "episode_limit"
        return {"reward": 0.5}

    services = serve(engine, run, sampling={"max_tokens": 8})
    trajectory = await run_order(services, long_order)
    assert trajectory.status is TrajectoryStatus.TRUNCATED and len(trajectory.turns) == 1, trajectory.failure
    assert trajectory.rewards == {"environment": 0.5}


async def test_what_is_refused_before_the_first_event_has_its_status(
    serve: Serve, long_order: Order, words: Any
) -> None:
    engine = StepwiseEngine(words)
    engine.release.set()

    async def run(task: Any, client: Caller) -> float:
        async with streaming(client, "/chat/completions") as (_, events):
            assert await taken(events) == SAID
        async with streaming(client, "/chat/completions") as (response, _):
            assert response.status == 400
            assert (await response.json())["error"]["code"] == "episode_limit"
        return 1.0

    trajectory = await run_order(serve(engine, run, sampling={"max_tokens": 8}, max_turns=1), long_order)
    assert trajectory.status is TrajectoryStatus.TRUNCATED and len(trajectory.turns) == 1, trajectory.failure


async def test_the_clients_of_openai_and_anthropic_raise_what_ends_a_stream(
    serve: Serve, long_order: Order, words: Any
) -> None:
    openai = pytest.importorskip("openai", reason="pip install openai to test its client against the gateway")
    anthropic = pytest.importorskip("anthropic", reason="pip install anthropic to test its client against the gateway")
    engine = StepwiseEngine(words)
    engine.dies = True
    engine.release.set()

    async def run(task: Any, client: Caller) -> float:
        async with openai.AsyncOpenAI(base_url=client.base_url, api_key="unused", max_retries=0) as api:
            with pytest.raises(openai.APIError, match="died in a request"):
                async for _ in await api.chat.completions.create(model="m", messages=[user("say")], stream=True):
                    pass
            with pytest.raises(openai.APIError, match="died in a request"):
                async for _ in await api.responses.create(model="m", input="say", stream=True):
                    pass
        url = client.base_url.removesuffix("/v1")
        async with anthropic.AsyncAnthropic(base_url=url, api_key="unused", max_retries=0) as api:
            with pytest.raises(anthropic.APIStatusError, match="died in a request"):
                async with api.messages.stream(model="m", max_tokens=9, messages=[user("say")]) as stream:
                    await stream.get_final_message()
        return 1.0

    trajectory = await run_order(serve(engine, run, sampling={"max_tokens": 8}), long_order)
    assert trajectory.failure is not None and trajectory.failure.boundary == "engine"
