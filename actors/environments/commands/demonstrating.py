"""``afterplay env demonstrate``: an expert's plays as the lines that ``afterplay replay import`` and
``loss.supervised`` read."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import anyio
import orjson

from actors.environments.base import Reply
from actors.environments.commands.describing import end
from actors.environments.commands.playing import expert_of, expert_replies
from actors.environments.host import EnvironmentHost
from pipeline.config.play import EnvironmentConfig
from pipeline.errors import ConfigurationError
from pipeline.schema import Message, Task


def demonstrate(name: str, options: dict[str, Any], section: str, seeds: Iterable[int], path: Path) -> tuple[int, int]:
    """Write one line for each of ``seeds`` that the expert solves; ``section`` is the environment's name in the run
    file. Returns how many were written and how many were given up. ``path`` is written whole or not at all.

    Raises :class:`ConfigurationError` for options that do not fit, an environment without an expert, or a place that
    cannot be written."""
    host = EnvironmentHost(section, EnvironmentConfig(name=name, options=options, step_seconds_max=600))
    part = path.with_name(f"{path.name}.part")
    written = left_out = 0
    try:
        expert_of(host.environment)
        with part.open("wb") as file:
            for line in _lines(host, section, seeds):
                if line is None:
                    left_out += 1
                else:
                    file.write(orjson.dumps(line) + b"\n")
                    written += 1
        part.replace(path)
    except OSError as error:
        raise ConfigurationError(f"--out: {path} cannot be written: {error.strerror or error}") from error
    finally:
        part.unlink(missing_ok=True)
        end(host)
    return written, left_out


def _lines(host: EnvironmentHost, section: str, seeds: Iterable[int]) -> Iterator[dict[str, Any] | None]:
    for seed in seeds:
        task = Task(f"{section}/{seed}", section, seed)
        replies = expert_replies(host.environment, task)
        yield anyio.run(_line, host, task, replies) if replies else None


async def _line(host: EnvironmentHost, task: Task, replies: list[str]) -> dict[str, Any] | None:
    """The play of ``replies``; None where they earn nothing."""
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
    said = [{"role": message.role, "content": message.content} for message in messages]
    return {"environment": task.environment, "seed": task.seed, "reward": score, "messages": said}
