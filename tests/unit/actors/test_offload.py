"""Long prompts are rendered and encoded off the event loop, and are the same as on it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import anyio
import pytest

from actors.environments import Environment, Episode, Reply, Step
from actors.rendering import offload
from actors.rendering.renderer import Renderer
from actors.rollout.services import Services
from pipeline.schema import Message, Order, Task, Trajectory, TrajectoryStatus
from tests.support.agent_programs import Caller, Serve, assert_exact, echoing, user
from tests.support.agent_programs import run_order as run_program
from tests.unit.actors.conftest import run_order

LONG, SHORT = "say hello " * (offload.CHARACTERS_MIN // 10 + 1), "say hello "


class Talk(Environment):
    """Two turns of one long text each."""

    def __init__(self, text: str) -> None:
        self.text = text

    def start(self, task: Task) -> Episode:
        return TalkEpisode(self.text)


class TalkEpisode(Episode):
    def __init__(self, text: str) -> None:
        self.messages = (Message("user", text),)

    def step(self, reply: Reply) -> Step:
        return Step(self.messages, 0.5, done=False)


@pytest.fixture
def encoders(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """For each text of a prompt that is encoded, whether the loop's thread does it."""
    found: list[bool] = []
    encode, loop = Renderer._encode, threading.current_thread()

    def noted(self: Renderer, text: str) -> tuple[int, ...]:
        found.append(threading.current_thread() is loop)
        return encode(self, text)

    monkeypatch.setattr(Renderer, "_encode", noted)
    return found


@pytest.mark.parametrize("text", [SHORT, LONG])
@pytest.mark.parametrize("by", ["program", "environment"])
async def test_long_prompts_are_encoded_off_the_loop_and_short_ones_on_it(
    serve: Serve,
    make_services: Callable[..., Services],
    long_order: Order,
    words: Any,
    encoders: list[bool],
    monkeypatch: pytest.MonkeyPatch,
    text: str,
    by: str,
) -> None:
    limits = {"max_turns": 2, "max_tokens": 50_000, "max_length": 20_000}

    async def run(task: Any, client: Caller) -> float:
        history = [user(text)]
        for _ in range(2):
            history += [(await client.chat(history))["choices"][0]["message"], user(text)]
        return 1.0

    async def played() -> Trajectory:
        engine = echoing(words)
        if by == "program":
            services = serve(engine, run, **limits)
            encoders.clear()  # of the renderer's start
            trajectory = await run_program(services, long_order)
        else:
            services = make_services([engine], Talk(text), **limits)
            encoders.clear()
            trajectory = await run_order(services, long_order)
        assert trajectory.status is not TrajectoryStatus.ERROR and len(trajectory.turns) == 2, trajectory.failure
        assert_exact(trajectory, engine)
        return trajectory

    found = await played()
    assert set(encoders) == {text is SHORT}
    monkeypatch.setattr(offload, "CHARACTERS_MIN", 10**9)
    same = await played()
    for one, other in zip(found.turns, same.turns, strict=True):
        assert one.context.token_ids.tolist() == other.context.token_ids.tolist()


def held_rendering(monkeypatch: pytest.MonkeyPatch) -> tuple[anyio.Event, threading.Event]:
    """Hold the rendering of a long prompt in its thread. Returns the event of its begin, and that which lets it end."""
    begun, go_on = anyio.Event(), threading.Event()
    start = Renderer.start

    def slow(self: Renderer, messages: Any, *args: Any) -> Any:
        if messages[0].content == LONG:
            anyio.from_thread.run_sync(begun.set)
            go_on.wait(60)
        return start(self, messages, *args)

    monkeypatch.setattr(Renderer, "start", slow)
    return begun, go_on


async def test_prompts_of_a_session_are_made_in_the_order_of_its_calls(
    serve: Serve, long_order: Order, words: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A long prompt begins before a short one that came later, although it takes longer."""
    begun, both = held_rendering(monkeypatch)
    engine = echoing(words)

    async def run(task: Any, client: Caller) -> float:
        async with anyio.create_task_group() as group:
            group.start_soon(client.chat, [user(LONG)])
            await begun.wait()
            group.start_soon(client.chat, [user(SHORT)])
            await client.post(client.base_url.removesuffix("/v1") + "/nothing", {})
            both.set()
        return 1.0

    trajectory = await run_program(serve(engine, run, max_length=20_000, max_tokens=50_000), long_order)
    assert trajectory.status is TrajectoryStatus.COMPLETE, trajectory.failure
    assert [len(prompt) > 1000 for _, prompt in engine.requests] == [True, False]


async def test_time_that_ends_while_a_long_prompt_is_made_truncates(
    serve: Serve, long_order: Order, words: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, go_on = held_rendering(monkeypatch)

    async def run(task: Any, client: Caller) -> float:
        await client.chat([user(SHORT)])
        (session,) = services.loops["game"].gateway._sessions.values()  # type: ignore[attr-defined]

        async def refused() -> None:
            status, answer, _ = await client.post("/chat/completions", {"messages": [user(LONG)]})
            assert (status, answer["error"]["code"], answer["error"]["param"]) == (400, "episode_limit", "max_seconds")

        async with anyio.create_task_group() as group:
            group.start_soon(refused)
            await begun.wait()
            session.expire()
            go_on.set()
        return 1.0

    services = serve(echoing(words), run, max_length=20_000, max_tokens=50_000)
    trajectory = await run_program(services, long_order)
    assert trajectory.status is TrajectoryStatus.TRUNCATED, trajectory.failure
    assert trajectory.rewards == {"environment": 1.0} and len(trajectory.turns) == 1
