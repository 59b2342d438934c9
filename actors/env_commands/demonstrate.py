"""``afterplay env demonstrate``: an expert's episodes as demonstrations, and their messages as token ids.

``afterplay replay import`` and ``loss.supervised`` read the file.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any

import anyio
import orjson

from actors.env_commands.describe import end_environment
from actors.env_commands.play import expert_of
from actors.environments.base import Reply
from actors.environments.host import EnvironmentHost
from actors.rendering.renderer import Renderer
from actors.rendering.tokenizer import load_tokenizer
from actors.tools.parsing.base import REASONING, ToolSchema
from pipeline.config.rollouts import HELD_OUT_SEED, EnvironmentConfig
from pipeline.config.tasks import TRAIN
from pipeline.errors import ConfigurationError, SchemaError
from pipeline.schema import Message, Task
from pipeline.tasks.splits import is_held_out


def render(
    renderer: Renderer, messages: Sequence[Message], tools: Sequence[ToolSchema] = ()
) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """(context ids, completion ids) of each assistant message; completions end with the template's end-of-turn token.

    Raises :class:`SchemaError` for a conversation that begins with the assistant, does not end with the assistant, or
    has two assistant messages in a row.
    """
    roles = [message.role for message in messages]
    twice = any(a == b == "assistant" for a, b in pairwise(roles))
    if not roles or roles[0] == "assistant" or roles[-1] != "assistant" or twice:
        raise SchemaError(
            "expected messages that begin with another role than assistant, end with assistant and never have it twice "
            f"in a row, got the roles {roles}"
        )
    ends = [i for i, role in enumerate(roles) if role == "assistant"]
    conversation = renderer.start(messages[: ends[0]], tools)
    turns = []
    for at, end in enumerate(ends):
        reply = messages[end]
        if unread := [key for key in REASONING if reply.extra.get(key)]:
            raise SchemaError(
                f"expected the thoughts of a reply in its content, as the model writes them, got {unread[0]}"
            )
        text = renderer.as_text(reply).content
        completion = renderer.completion_ids(text)
        turns.append((conversation.added_ids, completion))
        if at + 1 < len(ends):
            new = messages[end + 1 : ends[at + 1]]
            parsed = reply if reply.extra.get("tool_calls") else None
            completed = renderer.completed(completion)
            after = renderer.extend(conversation, completion, completed, new, parsed_reply=parsed)
            if after.branch != conversation.branch:
                raise SchemaError(
                    "the chat template changes earlier turns when the conversation continues: give token ids instead"
                )
            conversation = after
    return turns


class Demonstrator:
    """Renders conversations with the tokenizer of a prepared model folder, which is loaded on first use.

    Raises :class:`ConfigurationError` if there is no such folder.
    """

    def __init__(self, folder: Path, chat_template: str | None, trust_remote_code: bool) -> None:
        self._arguments = (folder, chat_template, trust_remote_code)

    @cached_property
    def _renderer(self) -> Renderer:
        return Renderer(*load_tokenizer(*self._arguments))

    def __call__(
        self, messages: Sequence[Message], tools: Sequence[ToolSchema] = ()
    ) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
        return render(self._renderer, messages, tools)


def demonstrate(
    name: str, options: dict[str, Any], section: str, seeds: Sequence[int], path: Path
) -> tuple[int, int, int]:
    """Write one line for each of ``seeds`` that the expert solves; ``section`` is the environment's name in the run
    file. Returns the numbers of written episodes, of unsolved ones, and of seeds that are left out because a run does
    not train on them. ``path`` is written completely or not at all.

    Raises :class:`ConfigurationError` for wrong options, an environment without an expert, seeds of which none is
    trained on, or a path that cannot be written.
    """
    host = EnvironmentHost(section, EnvironmentConfig(name=name, options=options, step_seconds_max=600))
    part = path.with_name(f"{path.name}.part")
    written = unsolved = 0
    try:
        expert = expert_of(host.environment)
        splits = getattr(host.environment, "splits", None) or {}
        trained = splits.get(TRAIN, range(HELD_OUT_SEED))
        chosen = [seed for seed in seeds if seed in trained and not is_held_out(splits, seed)]
        if not chosen:
            raise ConfigurationError(
                f"--first, --count: expected seeds of the split train, because a run learns from demonstrations, got "
                f"{seeds[0]} to {seeds[-1]}: afterplay env show {name} lists the seeds of each split"
            )
        with part.open("wb") as file:
            for seed in chosen:
                task = Task(f"{section}/{seed}", section, seed)
                replies = expert(task)
                line = anyio.run(_line, host, task, replies) if replies else None
                if line is None:
                    unsolved += 1
                else:
                    file.write(orjson.dumps(line) + b"\n")
                    written += 1
        part.replace(path)
    except OSError as error:
        raise ConfigurationError(f"--out: {path} cannot be written: {error.strerror or error}") from error
    finally:
        part.unlink(missing_ok=True)
        end_environment(host)
    return written, unsolved, len(seeds) - len(chosen)


async def _line(host: EnvironmentHost, task: Task, replies: list[str]) -> dict[str, Any] | None:
    """The episode of ``replies``; None if its reward is not above 0."""
    game = await host.start(task)
    messages: list[Message] = list(game.messages)
    score = 0.0
    try:
        for text in replies:
            step = await host.step(game, Reply(text))
            messages.append(Message("assistant", text))
            score += step.reward
            if step.done:
                break
            messages.extend(step.messages)
    finally:
        await host.close(game)
    if score <= 0:
        return None
    while messages[-1].role != "assistant":
        messages.pop()
    conversation = [{"role": message.role, "content": message.content} for message in messages]
    return {"environment": task.environment, "seed": task.seed, "reward": score, "messages": conversation}
