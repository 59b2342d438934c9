"""``afterplay env play``: one episode, played by somebody at the terminal, by an engine, or by an expert.

It is played as an actor plays it: by the agent loop that the environment or the run file asks for, with its tools."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, cast

import anyio

from actors.engine.base import Sampling
from actors.engine.client import EngineClient
from actors.environments.base import Reply
from actors.environments.commands.describing import end, shown
from actors.environments.commands.players import Said, Speak, Typed, replaying, sampling, typing
from actors.environments.commands.subject import Subject
from actors.environments.host import EnvironmentHost
from actors.loop.base import AgentEpisode, AgentLoop, Answer
from actors.loop.build import build_loop
from actors.loop.checked import checked_answer, checked_opening
from actors.loop.game import HostedGame
from actors.rendering import Renderer, load_tokenizer
from pipeline.errors import ConfigurationError
from pipeline.metrics import CollectorRegistry
from pipeline.metrics.actor import ActorMetrics
from pipeline.owned import StartedTasks
from pipeline.schema import Task

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
    run_file: Path | None = None,
) -> float | None:
    """Play the task with ``seed`` and return its score, or None where the player left before the end.

    ``run_file``: ``name`` is a section of its environments, with that section's options, agent loop and data.
    Raises :class:`ConfigurationError` for wrong options and :class:`PlugInError` where the environment fails."""
    if engine is not None and model is None:
        raise ConfigurationError("--engine needs --model: the folder with the tokenizer of what it serves")
    if expert and engine is not None:
        raise ConfigurationError("expected one player, got --expert and --engine")
    subject = Subject.of(name, options, run_file)
    renderer = Typed() if model is None else Renderer(*load_tokenizer(_folder(model)))
    host = EnvironmentHost(subject.section, subject.config)

    async def run() -> float | None:
        async with AsyncExitStack() as stack:
            task = subject.task(seed)
            loop = build_loop(host, cast(Renderer, renderer), ActorMetrics(CollectorRegistry()))
            stack.push_async_callback(loop.close)
            if expert:
                speak = replaying(await anyio.to_thread.run_sync(expert_replies, host.environment, task))
            elif engine is not None:
                assert isinstance(renderer, Renderer)
                how = Sampling(tokens_max, temperature=temperature, stop_token_ids=renderer.end_ids)
                speak = sampling(await stack.enter_async_context(EngineClient(engine)), renderer, how)
            else:
                speak = typing()
            async with anyio.create_task_group() as serving:
                serving.start_soon(loop.serve)
                score = await episode(host, task, turns_max, speak, show, loop)
                serving.cancel_scope.cancel()
            for line in subject.notes:
                show("note", line)
            return score

    try:
        return anyio.run(run)
    except BaseExceptionGroup as group:
        raise _only(group) from None
    finally:
        end(host)


async def episode(
    host: EnvironmentHost, task: Task, turns_max: int, speak: Speak, show: Show, loop: AgentLoop
) -> float | None:
    """One play. Prints everything that is said; the score, or None where the player left."""
    metrics, started = ActorMetrics(CollectorRegistry()), StartedTasks()
    game = HostedGame(f"play/{task.task_id}", task, host, await host.start(task), metrics, started)
    try:
        agent = loop.begin(game)
        if not isinstance(agent, AgentEpisode):
            raise ConfigurationError(
                f"environments.{host.section}: {type(loop).__name__} asks for completions itself: afterplay env play "
                "cannot answer it. Start it with an engine, as a run does"
            )
        try:
            return await _turns(agent, turns_max, speak, show)
        finally:
            with anyio.CancelScope(shield=True):
                await agent.close()
    finally:
        with anyio.CancelScope(shield=True):
            await game.close()


async def _turns(agent: AgentEpisode, turns_max: int, speak: Speak, show: Show) -> float | None:
    opening = checked_opening(await agent.start())
    for line in told_tools(opening.tools):
        show("tools", line)
    score, said = 0.0, Said(opening.messages, opening)
    for _ in range(turns_max):
        for message in said.messages:
            show(message.role, shown(message))
        reply = await speak(said)
        if reply is None:
            show("left", f"score so far {score:g}")
            return None
        show("assistant", str(reply))
        answer = checked_answer(await agent.answer(Reply(str(reply), reply.finish_reason)))
        score, said = score + answer.reward, Said(tuple(answer.messages), opening, answer.said)
        signals = "".join(f", {key} {value:g}" for key, value in answer.signals.items())
        show("step", f"reward {answer.reward:g}{signals}")
        if answer.done or answer.limit is not None:
            for message in said.messages:
                show(message.role, shown(message))
            show("done", _end(answer, score))
            return score
    show("stopped", f"after {turns_max} turns, score {score:g}")
    return score


def _end(answer: Answer, score: float) -> str:
    reached = "" if answer.limit is None else f" (the agent loop's limit {answer.limit.value} was reached)"
    return f"score {score:g}{reached}"


def told_tools(tools: Sequence[Mapping[str, Any]]) -> list[str]:
    """What may be called, and how."""
    functions = [tool["function"] for tool in tools]
    lines = []
    for function in functions:
        properties = function.get("parameters", {}).get("properties", {})
        parameters = ", ".join(f"{name}: {rule.get('type', 'any')}" for name, rule in properties.items())
        lines.append(f"{function['name']}({parameters})  {function.get('description', '')}".rstrip())
    if lines:
        lines.append('call with <tool_call>{"name": "...", "arguments": {...}}</tool_call>')
    return lines


def expert_replies(environment: Any, task: Task) -> list[str]:
    """Replies that solve the task, from an environment that knows them. Raises :class:`ConfigurationError` where it has
    no ``expert(task)``."""
    return [str(reply) for reply in expert_of(environment)(task)]


def expert_of(environment: Any) -> Callable[[Task], Sequence[str]]:
    """Raises :class:`ConfigurationError` where there is none."""
    expert = getattr(environment, "expert", None)
    if not callable(expert):
        raise ConfigurationError(f"{type(environment).__name__} has no expert(task): it cannot show how it is played")
    return cast("Callable[[Task], Sequence[str]]", expert)


def _folder(model: Path) -> Path:
    """Raises :class:`ConfigurationError` for what is no folder: it would be looked for on the hub."""
    if not model.is_dir():
        raise ConfigurationError(f"--model: expected the folder of a model (runs/NAME/model), got {model}")
    return model


def _only(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """The first error in it: one thing goes wrong in a play."""
    error: BaseException = group
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
