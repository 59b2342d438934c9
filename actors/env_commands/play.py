"""``afterplay env play``: plays one episode of an environment, or of a section of a run file with its loop and data.

The replies come from the user at the terminal, or from the environment's expert. The episode runs as in an actor:
in the agent loop that the environment or the run file selects, with its tools.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, closing, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import anyio

from actors.env_commands.chat_dialogue import ChatRenderer
from actors.env_commands.describe import end_environment, shown
from actors.environments.base import Reply
from actors.environments.host import EnvironmentHost
from actors.metrics import ActorMetrics
from actors.rendering.renderer import Renderer
from actors.rollout.agent_loop import (
    AGENT_LOOP,
    AgentEpisode,
    AgentLoop,
    Game,
    Opening,
    checked_answer,
    checked_opening,
)
from actors.rollout.services import build_loop
from pipeline.config import RunConfig
from pipeline.config.load import load
from pipeline.config.rollouts import EnvironmentConfig
from pipeline.config.tasks import TRAIN
from pipeline.errors import ConfigurationError, boundary, leaves
from pipeline.runtime.metrics import CollectorRegistry
from pipeline.runtime.plugin_limits import TaskOwner
from pipeline.schema import Message, Task
from pipeline.tasks.open import open_source
from pipeline.tasks.source import TaskSource

READ_BYTES = 64 * 1024


@dataclass(frozen=True, slots=True)
class NewMessages:
    """Messages since the last reply."""

    messages: tuple[Message, ...]
    opening: Opening
    """Start of the conversation."""


Speak = Callable[[NewMessages], Awaitable[Reply | None]]
"""Chooses the reply to new messages; None: the player leaves."""


def typing() -> Speak:
    """Replies from standard input. A line that ends with a backslash continues; end of input leaves."""
    lines = Lines()

    async def speak(_: NewMessages) -> Reply | None:
        parts: list[str] = []
        if sys.stdin.isatty():
            print("> ", end="", flush=True)
        while (line := await lines.next()) is not None:
            parts.append(line.removesuffix("\\"))
            if not line.endswith("\\"):
                break
        return Reply("\n".join(parts)) if parts else None

    return speak


class Lines:
    """Standard input line by line. Waiting for one can be cancelled, which a thread in ``readline`` cannot."""

    def __init__(self) -> None:
        self._held = b""
        self._ended = False
        self._fd: int | None = None
        with suppress(OSError, ValueError):  # a stand-in without a file
            self._fd = sys.stdin.fileno()

    async def next(self) -> str | None:
        """The next line without its end; None at the end of the input."""
        if self._fd is None:
            line = sys.stdin.readline()
            return line.rstrip("\r\n") if line else None
        while b"\n" not in self._held and not self._ended:
            with suppress(OSError, NotImplementedError):  # a file on disk never has to be waited for
                await anyio.wait_readable(self._fd)
            came = os.read(self._fd, READ_BYTES)
            self._held += came
            self._ended = not came
        if not self._held:
            return None
        first, _, self._held = self._held.partition(b"\n")
        return first.removesuffix(b"\r").decode("utf-8", "replace")


def replaying(replies: Sequence[str]) -> Speak:
    """Replies from a list."""
    left = iter(replies)

    async def speak(_: NewMessages) -> Reply | None:
        text = next(left, None)
        return None if text is None else Reply(text)

    return speak


STEP_SECONDS_MAX = 600.0


@dataclass(frozen=True, slots=True)
class Subject:
    """One environment, configured."""

    section: str
    config: EnvironmentConfig
    run: RunConfig | None = None
    """The run file; None: a name without one."""
    notes: tuple[str, ...] = ()
    """Notes on parts of the reward that the score does not include."""

    @classmethod
    def of(cls, name: str, options: Mapping[str, Any], run_file: Path | None, **more: Any) -> Subject:
        """``options`` override those of the section, ``more`` its other keys. Raises :class:`ConfigurationError`."""
        if run_file is None:
            return cls(name, EnvironmentConfig(name=name, options=dict(options), **more))
        run = load(run_file)
        section = run.environments.get(name)
        if section is None:
            raise ConfigurationError(
                f"expected one of the environments of {run_file} ({', '.join(run.environments)}), got {name!r}"
            )
        parts = [part.known_as for part in run.scorer.parts if part.applies_to(name)]
        notes = (f"the score does not include {', '.join(parts)}: the scorer runs only in a run",) if parts else ()
        config = section.model_copy(update={"options": {**section.options, **options}, **more})
        return cls(name, config, run, notes)

    def task(self, seed: int) -> Task:
        """The task with ``seed``. If tasks are rows of data: the row at position ``seed`` of the training split, or of
        the first split if there is none."""
        if self.config.tasks_from is None:
            return Task(f"{self.section}/{seed}", self.section, seed)
        with closing(self.source()) as source:
            split = source.splits.get(TRAIN) or next(iter(source.splits.values()))
            return split[seed % len(split)]

    def source(self) -> TaskSource:
        """The data that the tasks are rows of."""
        return open_source(self.section, self.config, 0 if self.run is None else self.run.run.seed)


class OwnCompletions(ConfigurationError):
    """The agent requests completions itself, so nobody else can reply."""


Show = Callable[[str, str], None]
"""Prints one line, with the role that it comes from."""


def play(
    name: str,
    options: dict[str, Any],
    seed: int,
    turns_max: int,
    show: Show,
    *,
    expert: bool = False,
    run_file: Path | None = None,
) -> float | None:
    """Play the task with ``seed`` and return its score, or None if the player left before the end.

    ``run_file``: ``name`` is a section of its environments, with that section's options, agent loop and data.
    Raises :class:`ConfigurationError` for wrong options and :class:`PlugInError` if the environment fails.
    """
    subject = Subject.of(name, options, run_file, step_seconds_max=STEP_SECONDS_MAX)
    host = EnvironmentHost(subject.section, subject.config)

    async def run() -> float | None:
        async with AsyncExitStack() as stack:
            task = subject.task(seed)
            loop = build_loop(host, cast(Renderer, ChatRenderer()), ActorMetrics(CollectorRegistry()))
            stack.push_async_callback(loop.close)
            speak = replaying(await anyio.to_thread.run_sync(expert_of(host.environment), task)) if expert else typing()
            score = await episode(host, task, turns_max, speak, show, loop)
            for line in subject.notes:
                show("note", line)
            return score

    try:
        return anyio.run(run)
    except BaseExceptionGroup as group:
        raise next(leaves(group)) from None  # an episode fails for one reason
    finally:
        end_environment(host)


async def episode(
    host: EnvironmentHost, task: Task, turns_max: int, speak: Speak, show: Show, loop: AgentLoop
) -> float | None:
    """Run one episode and print every message. Returns the score, or None if the player left."""
    metrics, started = ActorMetrics(CollectorRegistry()), TaskOwner()
    game = Game(f"play/{task.task_id}", task, host, await host.start(task), metrics, started)
    try:
        with boundary(AGENT_LOOP):
            agent = loop.begin(game)
        if type(agent).run is not AgentEpisode.run:
            raise OwnCompletions(
                f"environments.{host.section}: {type(loop).__name__} requests completions itself, which afterplay env "
                "play does not support: use it in a run, or in afterplay env eval"
            )
        try:
            async with anyio.create_task_group() as serving:
                serving.start_soon(_serve, loop)
                with boundary(AGENT_LOOP):
                    score = await _turns(agent, turns_max, speak, show)
                serving.cancel_scope.cancel()
            return score
        except BaseExceptionGroup as group:
            raise next(leaves(group)) from None  # an episode fails for one reason
        finally:
            with anyio.CancelScope(shield=True), boundary(AGENT_LOOP):
                await agent.close()
    finally:
        with anyio.CancelScope(shield=True):
            await game.close()


async def _serve(loop: AgentLoop) -> None:
    with boundary("agent loop serve"):
        await loop.serve()


async def _turns(agent: AgentEpisode, turns_max: int, speak: Speak, show: Show) -> float | None:
    opening = checked_opening(await agent.start())
    for line in tool_lines(opening.tools):
        show("tools", line)
    score, new = 0.0, NewMessages(opening.messages, opening)
    for _ in range(turns_max):
        for message in new.messages:
            show(message.role, shown(message))
        reply = await speak(new)
        if reply is None:
            show("left", f"score so far {score:g}")
            return None
        show("assistant", str(reply))
        answer = checked_answer(await agent.answer(reply))
        score, new = score + answer.reward, NewMessages(tuple(answer.messages), opening)
        signals = "".join(f", {key} {value:g}" for key, value in answer.signals.items())
        show("step", f"reward {answer.reward:g}{signals}")
        if answer.done or answer.limit is not None:
            for message in new.messages:
                show(message.role, shown(message))
            reached = "" if answer.limit is None else f" (the agent loop's limit {answer.limit.value} was reached)"
            show("done", f"score {score:g}{reached}")
            return score
    show("stopped", f"after {turns_max} turns, score {score:g}")
    return score


def tool_lines(tools: Sequence[Mapping[str, Any]]) -> list[str]:
    """One line for each tool with its parameters, and one that shows how to call them."""
    functions = [tool["function"] for tool in tools]
    lines = []
    for function in functions:
        properties = function.get("parameters", {}).get("properties", {})
        parameters = ", ".join(f"{name}: {rule.get('type', 'any')}" for name, rule in properties.items())
        lines.append(f"{function['name']}({parameters})  {function.get('description', '')}".rstrip())
    if lines:
        lines.append('call with <tool_call>{"name": "...", "arguments": {...}}</tool_call>')
    return lines


def expert_of(environment: Any) -> Callable[[Task], list[str]]:
    """The replies of the environment's ``expert`` to a task. Raises :class:`ConfigurationError` if it has none."""
    expert = getattr(environment, "expert", None)
    if not callable(expert):
        raise ConfigurationError(f"{type(environment).__name__} has no expert(task), so nobody can play it alone")

    def replies(task: Task) -> list[str]:
        with boundary("expert"):
            return [str(reply) for reply in expert(task)]

    return replies
