"""``afterplay env play``: one episode, played by somebody at the terminal, by an engine, or by an expert."""

from __future__ import annotations

import sys
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread

from actors.engine.base import Sampling
from actors.engine.client import EngineClient
from actors.environments.base import Reply
from actors.environments.commands.describing import end
from actors.environments.host import EnvironmentHost
from actors.rendering import Renderer, load_tokenizer
from pipeline.config.play import EnvironmentConfig
from pipeline.errors import ConfigurationError
from pipeline.schema import FinishReason, Message, Task

Speak = Callable[[tuple[Message, ...]], Awaitable[Reply | None]]
"""From what the environment has said since the last reply to the next reply; None: the player leaves."""
Show = Callable[[str, str], None]
"""Print one line of talk: who says it, and what."""


def play(
    name: str,
    options: dict[str, Any],
    seed: int,
    turns_max: int,
    show: Show,
    *,
    engine: str | None = None,
    model: Path | None = None,
    temperature: float = 1.0,
    tokens_max: int = 256,
    expert: bool = False,
) -> float | None:
    """Play the task with ``seed`` and return its score, or None where the player left before the end.

    Raises :class:`ConfigurationError` for wrong options and :class:`PlugInError` where the environment fails."""
    config = EnvironmentConfig(name=name, options=options, step_seconds_max=600)
    host = EnvironmentHost(name, config)

    async def run() -> float | None:
        async with AsyncExitStack() as stack:
            task = Task(f"{name}/{seed}", name, seed)
            if expert:
                speak = _replaying(await anyio.to_thread.run_sync(expert_replies, host.environment, task))
            elif engine is not None:
                if model is None:
                    raise ConfigurationError("--engine needs --model: the folder with the tokenizer of what it serves")
                client = await stack.enter_async_context(EngineClient(engine))
                speak = _sampling(client, Renderer(*load_tokenizer(model)), temperature, tokens_max)
            else:
                speak = _typing
            return await episode(host, task, turns_max, speak, show)

    try:
        return anyio.run(run)
    finally:
        end(host)


async def episode(host: EnvironmentHost, task: Task, turns_max: int, speak: Speak, show: Show) -> float | None:
    """One play. Prints everything that is said; the score, or None where the player left."""
    game = await host.start(task)
    score, said = 0.0, game.messages
    try:
        for _ in range(turns_max):
            for message in said:
                show(message.role, message.content)
            reply = await speak(said)
            if reply is None:
                show("left", f"score so far {score:g}")
                return None
            show("assistant", str(reply))
            step = await host.step(game, reply)
            score, said = score + step.reward, step.messages
            signals = "".join(f", {key} {value:g}" for key, value in step.signals.items())
            show("step", f"reward {step.reward:g}{signals}")
            if step.done:
                for message in said:
                    show(message.role, message.content)
                show("done", f"score {score:g}")
                return score
        show("stopped", f"after {turns_max} turns, score {score:g}")
        return score
    finally:
        await host.close(game)


def expert_replies(environment: Any, task: Task) -> list[str]:
    """Replies that solve the task, from an environment that knows them. Raises :class:`ConfigurationError` where it has
    no ``expert(task)``."""
    expert = getattr(environment, "expert", None)
    if not callable(expert):
        raise ConfigurationError(f"{type(environment).__name__} has no expert(task): it cannot show how it is played")
    return [str(reply) for reply in expert(task)]


def _replaying(replies: list[str]) -> Speak:
    left = iter(replies)

    async def speak(_: tuple[Message, ...]) -> Reply | None:
        text = next(left, None)
        return None if text is None else Reply(text)

    return speak


async def _typing(_: tuple[Message, ...]) -> Reply | None:
    """A reply from standard input; a line that ends with a backslash goes on. The end of the input leaves."""
    lines: list[str] = []
    if sys.stdin.isatty():
        print("> ", end="", flush=True)
    while True:
        line = await anyio.to_thread.run_sync(sys.stdin.readline)
        if not line:
            return Reply("\n".join(lines)) if lines else None
        line = line.rstrip("\n")
        lines.append(line.removesuffix("\\"))
        if not line.endswith("\\"):
            return Reply("\n".join(lines))


def _sampling(client: EngineClient, renderer: Renderer, temperature: float, tokens_max: int) -> Speak:
    """Replies sampled as in training: token ids in and out, the template's way of going on."""
    sampling = Sampling(tokens_max, temperature=temperature, stop_token_ids=renderer.end_ids)
    held: dict[str, Any] = {}

    async def speak(said: tuple[Message, ...]) -> Reply | None:
        if not held:
            held["conversation"] = renderer.start(said)
        else:
            held["conversation"] = renderer.extend(held["conversation"], held["ids"], held["completed"], said)
        generation = await client.generate(held["conversation"].prompt_ids, sampling)
        held["ids"] = generation.token_ids.tolist()
        held["completed"] = renderer.completed(held["ids"])
        return Reply(held["completed"].text, generation.finish_reason or FinishReason.STOP)

    return speak
