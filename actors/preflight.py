"""Preflight of environments: each is built with its agent loop and tools, one scripted episode of it is played, and its
first prompt is measured with the tokenizer of the model.

The script is the same short reply in every turn. It finds what raises and what is not of the right form, not whether a
task can be solved.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import cast

import anyio

from actors.env_commands.describe import end_environment
from actors.env_commands.play import NewMessages, OwnCompletions, Typed, episode
from actors.environments.base import Reply
from actors.environments.host import EnvironmentHost
from actors.environments.plugins import make_source
from actors.rendering.renderer import Renderer, load_tokenizer
from actors.rollout.agent_loop import Opening
from actors.rollout.services import build_loop, can_restart
from pipeline.config import RunConfig
from pipeline.config.rollouts import EnvironmentConfig
from pipeline.config.tasks import TRAIN
from pipeline.errors import PlugInError, PlugInTimeout
from pipeline.experience.memory import close_source
from pipeline.metrics.actor import ActorMetrics
from pipeline.metrics.base import CollectorRegistry
from pipeline.runtime.findings import Findings
from pipeline.runtime.plugin_guard import TaskOwner, bounded_prints, interrupting_blocks, watch_tasks
from pipeline.schema import Task

REPLY = "1"
TURNS_MAX = 8
TRIES = 3
"""Tasks that are tried where an environment raises: a run takes rollouts that fail now and then."""


class Script:
    """Answers every turn with :data:`REPLY`, and keeps the start of the conversation."""

    def __init__(self) -> None:
        self.opening: Opening | None = None
        self.turns = 0

    async def __call__(self, new: NewMessages) -> Reply:
        self.opening = new.opening
        self.turns += 1
        return Reply(REPLY)


def check_environments(config: RunConfig, tasks: Mapping[str, Sequence[Task]], found: Findings) -> dict[str, Opening]:
    """Build and play every environment; returns the first prompts of those that could be played. ``tasks``: rows of
    data, for the environments that have some."""
    return anyio.run(_check_all, config, tasks, found)


async def _check_all(config: RunConfig, tasks: Mapping[str, Sequence[Task]], found: Findings) -> dict[str, Opening]:
    openings = {}
    can: list[str] = []
    watch_tasks()
    started = TaskOwner()
    with interrupting_blocks(), bounded_prints(), started.owning():
        if config.lessons.enabled and config.lessons.source != "stage":
            with found.collecting():
                await close_source(make_source(config.lessons))
        for name, section in config.environments.items():
            with found.collecting():
                opening = await _check(name, section, tasks.get(name), found, can)
                if opening is not None:
                    openings[name] = opening
    if config.replay.enabled and config.replay.mode == "restart" and not can:
        found.problems.append(
            "replay.mode: restart plays stored turns again, but no environment of the run file can: expected one with "
            "replayable = True and more than one turn, run by multi_turn, tool_agent or a loop of your own with "
            "restarts = True; set replay.mode: mix, or declare it in the environment's class"
        )
    started.cancel()
    return openings


async def _check(
    name: str, section: EnvironmentConfig, tasks: Sequence[Task] | None, found: Findings, can: list[str]
) -> Opening | None:
    """The first prompt; None where no episode could be played, which is reported elsewhere. An environment that can be
    restarted is added to ``can``."""
    host = EnvironmentHost(name, section)
    try:
        if can_restart(host) and section.max_turns > 1:
            can.append(name)
        splits = host.splits()
        if tasks is not None and not tasks:
            return None
        if _parser_needs_tokenizer(section):
            found.notes.append(f"environments.{name}: not played, its parser needs the model's tokenizer")
            return None
        if tasks is None:
            own = getattr(host.environment, "splits", None) or {}
            seeds = own[TRAIN] if TRAIN in splits else range(section.seed + TRIES)
            chosen = [seeds[(section.seed + i) % len(seeds)] for i in range(TRIES)]
            tasks = [Task(f"{name}/{seed}", name, int(seed)) for seed in chosen]
        script = await _play(host, tasks, found)
        if script is None:
            return None
        turns = "1 turn" if script.turns == 1 else f"{script.turns} turns"
        found.notes.append(f"environments.{name}: {turns} of a scripted episode of {section.name} played")
        return script.opening
    finally:
        end_environment(host)


async def _play(host: EnvironmentHost, tasks: Sequence[Task], found: Findings) -> Script | None:
    """One episode, of the first of ``tasks`` that can be played. Raises the :class:`PlugInError` of the first."""
    first: PlugInError | None = None
    turns_max = min(host.config.max_turns, TURNS_MAX)
    for task in tasks[:TRIES]:
        loop = build_loop(host, cast(Renderer, Typed()), ActorMetrics(CollectorRegistry()))
        script = Script()
        try:
            await episode(host, task, turns_max, script, lambda who, text: None, loop)
            return script
        except OwnCompletions:
            found.notes.append(f"environments.{host.section}: not played, its agent requests completions itself")
            return None
        except PlugInError as error:
            first = first or error
            if isinstance(error, PlugInTimeout):
                break
        finally:
            await loop.close()
    assert first is not None
    again = f"afterplay env play {host.section} --config FILE shows it"
    raise PlugInError(
        f"environments.{host.section}: {first.boundary}", first.kind, f"{first.message}; {again}", line=first.line
    ) from first


def _parser_needs_tokenizer(section: EnvironmentConfig) -> bool:
    parser = str(section.loop.options.get("parser", ""))
    return parser == "transformers" or parser.startswith("vllm:")


def check_prompts(config: RunConfig, openings: Mapping[str, Opening], folder: Path, found: Findings) -> None:
    """Compare the first prompts, tool schemas included, with the limits on tokens. ``folder`` has the tokenizer."""
    model = config.model
    with found.collecting():
        renderer = Renderer(*load_tokenizer(folder, model.chat_template, model.trust_remote_code))
        for name, opening in openings.items():
            with found.collecting(f"environments.{name}: "):
                n = len(renderer.start(opening.messages, opening.tools).prompt_ids)
                _compare(name, n, config, found)


def _compare(name: str, n_tokens: int, config: RunConfig, found: Findings) -> None:
    context_max, turn_max = config.model.max_length, config.sampling.max_tokens
    episode_max = config.environments[name].max_tokens
    for key, most in (("model.max_length", context_max), (f"environments.{name}.max_tokens", episode_max)):
        if n_tokens >= most:
            found.problems.append(
                f"environments.{name}: expected a first prompt shorter than {key} ({most} tokens), got {n_tokens} "
                f"tokens with the tool schemas: set {key} to at least {n_tokens + turn_max}, or shorten the prompt"
            )
            return
    found.notes.append(f"environments.{name}: the first prompt has {n_tokens} of {context_max} tokens")
    if n_tokens + turn_max > min(context_max, episode_max):
        room = min(context_max, episode_max) - n_tokens
        found.notes.append(
            f"environments.{name}: the first reply has room for {room} tokens, fewer than sampling.max_tokens "
            f"({turn_max})"
        )
