"""Preflight of environments: each is built with its agent loop and tools, one scripted episode of it is played and
scored by the user's functions, and its first prompt is measured with the tokenizer of the model.

The script is the same short reply in every turn. It finds what raises and what is not of the right form, not whether a
task can be solved.

External engines are asked whether they are healthy and what they serve.
"""

from __future__ import annotations

import logging
import os
import shutil
import threading
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, cast
from urllib.parse import urlsplit, urlunsplit

import anyio

from actors.engine.base import ServedModel
from actors.engine.client import EngineClient
from actors.env_commands.chat_dialogue import ChatRenderer
from actors.env_commands.describe import end_environment
from actors.env_commands.play import NewMessages, OwnCompletions, episode
from actors.environments.base import Episode, Reply, Step
from actors.environments.host import START, STEP, EnvironmentHost
from actors.environments.plugins import make_source
from actors.gateway.program_loop import ProgramLoop
from actors.metrics import ActorMetrics
from actors.rendering.renderer import Conversation, Renderer, renderer_of
from actors.rollout.agent_loop import AgentLoop, MultiTurn, Opening, SingleTurn
from actors.rollout.services import build_loop
from actors.tools.parsing.base import call_number, stated_call
from actors.tools.parsing.registry import parser_of
from pipeline.config import RunConfig
from pipeline.config.rewards import JudgeConfig, RewardModelConfig, ScorerConfig
from pipeline.config.rollouts import EnvironmentConfig, LoopConfig
from pipeline.config.tasks import TRAIN
from pipeline.errors import ConfigurationError, EngineError, Findings, PlugInError, PlugInTimeout, boundary
from pipeline.lessons.store import close_source
from pipeline.runtime.engine_keys import find_key
from pipeline.runtime.metrics import CollectorRegistry
from pipeline.runtime.plugin_limits import (
    BLOCKED_SECONDS_MAX,
    BlockingCalls,
    TaskOwner,
    bounded_prints,
    interrupting_blocks,
    watch_tasks,
)
from pipeline.runtime.run_directory import RunDirectory
from pipeline.schema import FinishReason, Message, Task, TokenSpan, Trajectory, TrajectoryStatus, Turn
from pipeline.scorer.functions import TRAJECTORY_HINT, Call, Outcome, Workers
from pipeline.scorer.judges import Judge, RewardModel
from pipeline.scorer.verdict import ENVIRONMENT, ScoreFailure
from pipeline.tasks.splits import evaluated_environments, split_names

log = logging.getLogger(__name__)

TELL_SECONDS = 3.0
"""Plug-in code that has not returned after so long is named on the log."""

REPLY = "1"

ANSWER = "An answer, for the check of the chat template."

TURNS_MAX = 8

SCORE_SECONDS_MAX = 2.0
"""For the calls of a score function; a slower one is not checked."""

WORKER_SECONDS_MAX = 10.0
"""For those of a function with ``worker: true``, whose process must start first."""

ASK_SECONDS_MAX = 5.0
"""For the answer of a judge or reward model."""

STARTS, STARTS_SECONDS_MAX = 4, 0.5
"""Rounds in which tasks are started again, to see whether they start alike, and the time after which no more are."""

DIFFERENCE_CHARACTERS = 80
"""Part of two texts that is shown where they differ."""

TRIES = 3
"""Tasks that are tried where an environment raises: a run takes rollouts that fail now and then."""


@contextmanager
def telling(what: str, seconds_max: float = BLOCKED_SECONDS_MAX) -> Iterator[None]:
    """While the code inside does not return, one line on the log says what the check waits for, and how long. From a
    thread, because the code may hold the event loop."""
    line = f"{what} has not returned for {TELL_SECONDS:g} s; the check waits up to {seconds_max:g} s"
    timer = threading.Timer(TELL_SECONDS, log.warning, (line,))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


class TellingHost(EnvironmentHost):
    """A host that tells which call the check waits for, and keeps the tools and files of the newest episode."""

    episode_tools: tuple[Any, ...] = ()
    episode_files: Mapping[str, str] | None = None

    def _telling(self, call: str) -> AbstractContextManager[None]:
        # What holds the event loop is interrupted after BLOCKED_SECONDS_MAX, other calls after step_seconds_max.
        return telling(f"environments.{self.section}: {call}", max(BLOCKED_SECONDS_MAX, self.config.step_seconds_max))

    async def start(self, task: Task) -> Episode:
        with self._telling(START):
            episode = await super().start(task)
        with boundary(f"environments.{self.section}: Episode.tools"):
            self.episode_tools = tuple(getattr(episode, "tools", ()))
            self.episode_files = getattr(episode, "files", None)
        return episode

    async def step(self, episode: Episode, reply: Reply) -> Step:
        with self._telling(STEP):
            return await super().step(episode, reply)


class Script:
    """Answers every turn with :data:`REPLY`, and keeps the conversation."""

    def __init__(self, task: Task) -> None:
        self.task = task
        self.opening: Opening | None = None
        self.turns: list[Turn] = []
        self.score: float | None = None

    async def __call__(self, new: NewMessages) -> Reply:
        self.opening = new.opening
        prompt, sampled = TokenSpan.context([0]), TokenSpan.sampled([0], [0.0], 0)
        said = Message("assistant", REPLY)
        self.turns.append(Turn(prompt, sampled, tuple(new.messages), said, FinishReason.STOP, temperature=1.0))
        return Reply(REPLY)

    def trajectory(self) -> Trajectory:
        """The episode as a score function gets it; its tokens mean nothing."""
        return Trajectory(
            "preflight", "preflight", self.task, tuple(self.turns), TrajectoryStatus.COMPLETE,
            rewards={ENVIRONMENT: self.score},
        )  # fmt: skip


def check_environments(
    config: RunConfig, tasks: Mapping[str, Sequence[Task]], found: Findings, at_once: bool = False
) -> dict[str, Opening]:
    """Build and play every environment; returns the first prompts of those that could be played. ``tasks``: rows of
    data, for the environments that have some. ``at_once``: with a problem before any is played, raise it as
    :class:`ConfigurationError`."""
    return anyio.run(_check_all, config, tasks, found, at_once)


async def _check_all(
    config: RunConfig, tasks: Mapping[str, Sequence[Task]], found: Findings, at_once: bool
) -> dict[str, Opening]:
    openings = {}
    hosts: dict[str, TellingHost] = {}
    played: dict[str, Script] = {}
    watch_tasks()
    started = TaskOwner()
    with interrupting_blocks(BLOCKED_SECONDS_MAX, stacks=False), bounded_prints(), started.owning():
        if config.lessons.enabled and config.lessons.source != "stage":
            with found.collecting():
                await close_source(make_source(config.lessons))
        with found.collecting():
            _build_all(config, hosts, found)
        if at_once and found.problems:
            for host in hosts.values():
                with found.collecting():
                    end_environment(host)
            found.require_none()
        for name, host in hosts.items():
            with found.collecting():
                script = await _check(host, tasks.get(name), found)
                if script is not None and script.opening is not None:
                    openings[name] = script.opening
                if script is not None:
                    played[name] = script
                await _score(name, script, tasks.get(name, (Task(f"{name}/0", name, 0),)), config.scorer, found)
        services: list[JudgeConfig | RewardModelConfig] = [*config.scorer.judges, *config.scorer.reward_models]
        for service in services:
            await _ask(service, played, config, found)
    started.cancel()
    return openings


def _build_all(config: RunConfig, hosts: dict[str, TellingHost], found: Findings) -> None:
    """Add every environment that can be built to ``hosts``. Raises :class:`ConfigurationError` where a split that is
    evaluated is missing."""
    own: dict[str, Collection[str]] = {}
    for name, section in config.environments.items():
        with found.collecting(), telling(f"environments.{name}: {section.name}"):
            _require_judge(name, section, config.scorer)
            host = TellingHost(name, section)
            own[name] = host.splits()
            hosts[name] = host
    if config.evaluation.every is not None and len(own) == len(config.environments):
        names = split_names(config, own)
        evaluated_environments(config, {name for name in names if config.evaluation.split in names[name]}, own)


async def _check(host: TellingHost, tasks: Sequence[Task] | None, found: Findings) -> Script | None:
    """The script of an episode that was played; None where none could be, which is reported elsewhere."""
    name, section = host.section, host.config
    try:
        splits = host.splits()
        if tasks is not None and not tasks:
            return None
        if tasks is None:
            declared = getattr(host.environment, "splits", None) or {}
            seeds = declared[TRAIN] if TRAIN in splits else range(section.seed + TRIES)
            chosen = [seeds[(section.seed + i) % len(seeds)] for i in range(TRIES)]
            tasks = [Task(f"{name}/{seed}", name, int(seed)) for seed in chosen]
        parser = str(section.loop.options.get("parser", ""))
        if parser == "transformers" or parser.startswith("vllm:"):
            found.notes.append(f"environments.{name}: not played, its parser needs the model's tokenizer")
            script = None
        else:
            script = await _play(host, tasks, found)
        await _check_starts(host, tasks[:TRIES])
        if script is None:
            return None
        turns = "1 turn" if len(script.turns) == 1 else f"{len(script.turns)} turns"
        found.notes.append(f"environments.{name}: {turns} of a scripted episode of {section.name} played")
        return script
    finally:
        end_environment(host)


async def _play(host: TellingHost, tasks: Sequence[Task], found: Findings) -> Script | None:
    """One episode, of the first of ``tasks`` that can be played. Raises the :class:`PlugInError` of the first."""
    first: PlugInError | None = None
    turns_max = min(host.config.max_turns, TURNS_MAX)
    for task in tasks[:TRIES]:
        loop = build_loop(host, cast(Renderer, ChatRenderer()), ActorMetrics(CollectorRegistry()))
        script = Script(task)
        try:
            script.score = await episode(host, task, turns_max, script, lambda who, text: None, loop)
            _check_tools(host, loop)
            return script
        except OwnCompletions:
            _find_program(host, loop)
            _check_tools(host, loop)
            found.notes.append(f"environments.{host.section}: not played, its agent requests completions itself")
            return None
        except PlugInError as error:
            first = first or error
            if isinstance(error, PlugInTimeout):
                break
        finally:
            with boundary(f"environments.{host.section}.loop: close"):
                await loop.close()
    assert first is not None
    again = f"afterplay env play {host.section} --config FILE shows it"
    raise PlugInError(
        f"environments.{host.section}: {first.boundary}", first.kind, f"{first.message}; {again}", line=first.line
    ) from first


def _check_tools(host: TellingHost, loop: AgentLoop) -> None:
    """Raises :class:`ConfigurationError` for tools in a loop that gives the policy none. Loops of the user's own may do
    what they like with them."""
    tools = [*host.tools(), *host.episode_tools]
    if tools and type(loop) in (MultiTurn, SingleTurn, ProgramLoop):
        names = ", ".join(str(getattr(tool, "name", getattr(tool, "__name__", tool))) for tool in tools)
        raise ConfigurationError(
            f"environments.{host.section}: {host.config.name} has tools ({names}), and expected the loop tool_agent, "
            f'which gives them to the policy, got {type(loop).__name__}, which does not: set loop = "tool_agent" in '
            f"the class, or environments.{host.section}.loop: tool_agent"
        )


async def _check_starts(host: TellingHost, tasks: Sequence[Task]) -> None:
    """Start each task several times, the first one twice at least. Raises :class:`PlugInError` where the messages
    differ."""
    until = anyio.current_time() + STARTS_SECONDS_MAX
    first: dict[str, tuple[Message, ...]] = {}
    for number, task in enumerate([task for task in tasks for _ in range(2)] * STARTS):
        if number > 1 and anyio.current_time() > until:
            return
        try:
            episode = await host.start(task)
        except PlugInError:
            continue  # some fail now and then; that all do is known already
        await host.close(episode)
        before = first.setdefault(task.task_id, episode.messages)
        if [(m.role, m.content) for m in before] != [(m.role, m.content) for m in episode.messages]:
            one, other = _difference(before, episode.messages)
            raise PlugInError(
                f"environments.{host.section}: environment start", "WrongValue",
                f"expected each start of task {task.task_id} to give the same messages, because the rollouts of a "
                f"group are compared with each other, got {one!r} and then {other!r}: draw everything random from "
                "task.seed, as in random.Random(task.seed)",
            )  # fmt: skip


def _difference(before: Sequence[Message], after: Sequence[Message]) -> tuple[str, str]:
    """The two texts from shortly before the place where they begin to differ."""
    texts = [" ".join(f"{m.role}: {m.content}" for m in messages) for messages in (before, after)]
    length = min(map(len, texts))
    same = next((i for i in range(length) if texts[0][i] != texts[1][i]), length)
    at = max(0, same - DIFFERENCE_CHARACTERS // 2)
    one, other = (text[at : at + DIFFERENCE_CHARACTERS] for text in texts)
    return one, other


def _find_program(host: TellingHost, loop: object) -> None:
    """Raises :class:`ConfigurationError` where the command of an agent loop names a folder, a program or a script of
    Python that is not there."""
    if not isinstance(loop, ProgramLoop) or loop.sandbox.kind not in ("auto", "bubblewrap", "none"):
        return
    where, folder = f"environments.{host.section}.loop.options", Path(loop.folder or ".").expanduser().resolve()
    if not folder.is_dir():
        raise ConfigurationError(f"{where}.folder: expected a folder at {folder}, got none")
    if not loop.command:
        return
    program, *arguments = loop.command
    own = {os.path.normpath(path) for path in host.episode_files or ()}
    if "/" not in program and shutil.which(program, path=loop.environment.get("PATH")) is None:
        raise ConfigurationError(
            f"environments.{host.section}: expected the program {program} on the PATH, found none: install it, or "
            "give its path in loop.options.command"
        )
    if "/" in program and os.path.normpath(program) not in own and not os.access(folder / program, os.X_OK):
        raise ConfigurationError(
            f"{where}.command: expected a program at {folder / program}, got "
            + ("a file that may not be executed" if (folder / program).is_file() else "none")
        )
    script = arguments[0] if arguments and Path(program).name.startswith("python") else ""
    if script.endswith(".py") and os.path.normpath(script) not in own and not (folder / script).is_file():
        raise ConfigurationError(f"{where}.command: expected a program at {folder / script}, got none")


def _require_judge(environment: str, section: EnvironmentConfig, scorer: ScorerConfig) -> None:
    """Raises :class:`ConfigurationError` where an agent program leaves its reward to judges that have none for it."""
    reward = section.loop.options.get("reward") if "program" in (section.loop.name, section.name) else None
    judged = reward not in ("scorer", "environment") or (reward == "environment" and section.name != "program")
    if not (judged or any(part.applies_to(environment) for part in scorer.parts)):
        other = "" if reward == "scorer" else ", the environment program judges nothing,"
        raise ConfigurationError(
            f"environments.{environment}.loop.options.reward is {reward}{other} and no part of the scorer applies to "
            f"{environment}, so every reward would be 0: add one to scorer.functions, or let the program report its "
            "reward (reward: program)"
        )


async def _score(
    environment: str, script: Script | None, tasks: Sequence[Task], scorer: ScorerConfig, found: Findings
) -> None:
    """Call the user's own score functions with the episode, and built-in graders with ``tasks``. Of an environment that
    was not played, own functions get a conversation of one turn, which may not be what they expect: then a failure is a
    note."""
    for section in scorer.functions:
        where = f"scorer.functions: {section.known_as}"
        if not section.applies_to(environment) or (script is None and not tasks):
            continue
        if ":" not in section.path:
            with found.collecting():
                await _grade(Call(section, 1, Workers(1)), tasks)
            continue
        seconds_max = WORKER_SECONDS_MAX if section.worker else SCORE_SECONDS_MAX
        waits = WORKER_SECONDS_MAX if section.worker else BLOCKED_SECONDS_MAX  # what holds the loop is not cancelled
        outcome: Outcome | None = None
        with found.collecting(), anyio.move_on_after(seconds_max) as limit, telling(where, waits):
            call = Call(section, 1, Workers(1))
            played = script or await _unplayed(environment, tasks)
            outcome = await call.tried(played.trajectory(), BlockingCalls(1).run, worker=bool(section.worker))
        if limit.cancelled_caught:
            found.notes.append(f"{where}: not checked, it gave no value within {seconds_max:g} s")
        if isinstance(outcome, ScoreFailure):
            about = f"{where}: no number for the scripted episode of {environment} (every reply is {REPLY!r})"
            hint = TRAJECTORY_HINT if "'Trajectory' object" in outcome.details else ""
            tell = found.told if script is not None and section.weight else found.notes
            tell.append(" ".join(f"{about}: {outcome.details}{hint}".split()))


async def _unplayed(environment: str, tasks: Sequence[Task]) -> Script:
    """A conversation of one turn, in place of an episode."""
    task = next(iter(tasks), Task(f"{environment}/0", environment, 0))
    script, asked = Script(task), (Message("user", str(task.payload.get("prompt", ""))),)
    await script(NewMessages(asked, Opening(asked)))
    return script


async def _grade(call: Call, tasks: Sequence[Task]) -> None:
    """Raises :class:`ConfigurationError` where a built-in grader can grade none of the tasks."""
    first: ScoreFailure | None = None
    for task in tasks:
        outcome = await call.tried((await _unplayed(task.environment, [task])).trajectory(), BlockingCalls(1).run)
        if not isinstance(outcome, ScoreFailure):
            return
        first = first or outcome
    if first is not None:
        raise ConfigurationError(f"scorer.functions: {call.name}: {first.details.removeprefix('SchemaError: ')}")


async def _ask(
    section: JudgeConfig | RewardModelConfig, played: Mapping[str, Script], config: RunConfig, found: Findings
) -> None:
    """Ask a judge or reward model once, about an episode that was played."""
    where = f"scorer: {section.known_as} at {section.url}"
    once = section.model_copy(update={"retries": 0, "timeout_seconds": min(section.timeout_seconds, ASK_SECONDS_MAX)})
    environment = next((name for name in config.environments if section.applies_to(name)), "")
    script = played.get(environment) or await _unplayed(environment, ())
    with found.collecting(), telling(where, ASK_SECONDS_MAX):
        if isinstance(once, JudgeConfig):
            judge = Judge(once, lambda name: None)
            outcome = await judge.one(script.trajectory())
            await judge.close()
        else:
            model = RewardModel(once, lambda name: None)
            (outcome,) = await model.many([script.trajectory()])
            await model.close()
        if not isinstance(outcome, ScoreFailure):
            return
        may_pass = outcome.reason == "timeout" or (outcome.reason == "protocol" and isinstance(section, JudgeConfig))
        unknown = outcome.reason == "raised" and environment not in played
        tell = found.notes if may_pass or unknown or not section.weight else found.told
        tell.append(" ".join(f"{where}: expected a score, got {outcome.reason}: {outcome.details}".split()))


def check_prompts(config: RunConfig, openings: Mapping[str, Opening], folder: Path, found: Findings) -> None:
    """Compare the first prompts, tool schemas included, with the limits on tokens, and see that they and those after
    them have all that is said. ``folder`` has the tokenizer."""
    with found.collecting():
        renderer = renderer_of(config.model, folder)
        for name, opening in openings.items():
            with found.collecting(f"environments.{name}: "):
                conversation = renderer.start(opening.messages, opening.tools)
                _compare(name, len(conversation.prompt_ids), config, found)
                section = config.environments[name]
                _find_parser(name, section.loop, renderer, conversation, found)
                if section.max_turns > 1:
                    _continue(renderer, conversation, append=section.loop.history == "append")


def _find_parser(
    environment: str, loop: LoopConfig, renderer: Renderer, conversation: Conversation, found: Findings
) -> None:
    """Raises :class:`ConfigurationError` where the policy has tools and no parser reads the calls that the template
    writes. A program may do without tools: then it is a note."""
    parser, where = str(loop.options.get("parser", "auto")), f"environments.{environment}.loop.options.parser"
    if not conversation.tools and loop.name not in ("tool_agent", "program"):
        return
    try:
        parser_of(parser, renderer.template, renderer.tokenizer, where, renderer.name)
    except ConfigurationError as error:
        if loop.name != "program" or parser != "auto":
            raise
        found.notes.append(f"calls with tools are refused: {error}")


def _continue(renderer: Renderer, conversation: Conversation, append: bool) -> None:
    """The second prompts after a first one. Raises :class:`PlugInError` where the chat template leaves something out of
    them, or does not take them."""
    answers: list[tuple[Message, Message | None]] = [(Message("user", ANSWER), None)]
    for tool in conversation.tools[:1]:
        name, number = tool["function"]["name"], call_number(1, 0)
        call = stated_call(number, name, {})
        answer = Message("tool", ANSWER, {"name": name, "tool_call_id": number})
        answers.append((answer, Message("assistant", "", {"tool_calls": [call]})))
    for new, parsed in answers:
        ids = renderer.completion_ids(REPLY)
        renderer.extend(conversation, ids, renderer.completed(ids), [new], parsed_reply=parsed, append=append)


def _compare(name: str, n_tokens: int, config: RunConfig, found: Findings) -> None:
    context_max, turn_max = config.context_max, config.sampling.max_tokens
    episode_max = config.environments[name].max_tokens
    reserved = config.model.max_length - context_max
    limits = (("model.max_length", context_max, reserved), (f"environments.{name}.max_tokens", episode_max, 0))
    for key, most, more in limits:
        if n_tokens >= most:
            needed = n_tokens + turn_max + more
            found.problems.append(
                f"environments.{name}: expected a first prompt shorter than {key} ({most} tokens), got {n_tokens} "
                f"tokens with the tool schemas: set {key} to at least {needed}, or shorten the prompt"
            )
            return
    found.notes.append(f"environments.{name}: the first prompt has {n_tokens} of {context_max} tokens")
    if n_tokens + turn_max > min(context_max, episode_max):
        room = min(context_max, episode_max) - n_tokens
        found.notes.append(
            f"environments.{name}: the first reply has room for {room} tokens, fewer than sampling.max_tokens "
            f"({turn_max})"
        )


SECONDS_MAX = 3.0
"""For all answers of one engine; all are asked at once."""


def check_engines(config: RunConfig, found: Findings) -> None:
    """Add what is wrong with the engines at ``engine.urls``. Passwords in a URL and keys are never part of it."""

    async def ask_all(key: str | None) -> None:
        async with anyio.create_task_group() as asking:
            for url in config.engine.addresses():
                asking.start_soon(_ask_engine, url, config, key, found)

    with found.collecting():
        anyio.run(ask_all, find_key(config.engine, "actor_key"))


async def _ask_engine(url: str, config: RunConfig, key: str | None, found: Findings) -> None:
    shown = without_password(url)
    remedy = ": start it and wait until it is healthy, or correct engine.urls"
    async with EngineClient(url, key=key) as client:
        with found.collecting():
            try:
                with anyio.fail_after(SECONDS_MAX):
                    await client.health()
                    remedy = ""
                    served = await client.served()
                    await client.require_routes()
            except TimeoutError:
                raise ConfigurationError(
                    f"engine.urls: expected an answer from the engine {shown} within {SECONDS_MAX:g} s, got none: it "
                    "is too busy, or hangs, or the address is wrong"
                ) from None
            except (EngineError, ValueError) as error:
                raise ConfigurationError(f"engine.urls: {str(error).replace(url, shown).strip()}{remedy}") from None
            _compare_served(served, shown, config, found)


def _compare_served(served: ServedModel | None, url: str, config: RunConfig, found: Findings) -> None:
    model = config.model
    if served is None:
        found.notes.append(f"engine.urls: {url} does not say which model it serves")
        return
    if served.max_length is not None and served.max_length < model.max_length:
        found.problems.append(
            f"engine.urls: expected an engine for model.max_length ({model.max_length} tokens), got {url} with "
            f"{served.max_length}: start it with --max-model-len {model.max_length}, or set model.max_length: "
            f"{served.max_length}"
        )
    # the engine was started with model.source, a folder of that name, or the model folder of the run
    root, own = Path(served.root), RunDirectory(config.run.path).model
    same = model.source in (served.name, served.root) or root.name == Path(model.source).name
    if not (same or root.resolve() == own.resolve()):
        found.notes.append(
            f"engine.urls: {url} serves {served.root}, and model.source is {model.source}: expected the same model"
        )


def without_password(url: str) -> str:
    """The URL without user and password.

    >>> without_password("http://me:secret@10.0.0.1:8000/v1")
    'http://10.0.0.1:8000/v1'
    """
    parts = urlsplit(url)
    return urlunsplit(parts._replace(netloc=parts.netloc.rpartition("@")[2]))
