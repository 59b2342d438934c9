"""``tool_agent``: the policy's tool calls are run and answered; a reply without calls goes to the environment.

Calls are read from the text of the sampled tokens by the parser that the model's template asks for. The calls of one
turn run at once, up to ``max_parallel_calls``; their answers are appended in call order as messages of the role
``tool``, which the chat template puts into words. Errors in a call are reported to the policy and counted; the
episode continues. An episode that reaches a limit while it is still calling tools is TRUNCATED with the rewards that it
had so far, and is never called finished.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Literal

import anyio
from pydantic import BaseModel, ConfigDict, Field, model_validator
from pydantic.dataclasses import dataclass

from actors.environments.base import STRICT_OPTIONS, Reply, ToolUse
from actors.environments.host import EnvironmentHost
from actors.metrics import ActorMetrics
from actors.rendering.renderer import Renderer
from actors.rollout.agent_loop import AgentEpisode, AgentLoop, Answer, Game, Limit, Opening
from actors.tools.base import Check, Tool, Toolset, as_tool, build_tool, check_of, schema_of_tool
from actors.tools.parsing.base import NAME_CHARACTERS_MAX, CallError, Parsed, ToolCall, call_number, stated_call
from actors.tools.parsing.registry import parser_of
from actors.tools.runner import Done, EpisodeTools, Failures, Ready, ToolLimits, truncater
from pipeline.errors import AfterplayError, ConfigurationError, boundary
from pipeline.schema import Message

log = logging.getLogger(__name__)

LABELS_MAX = 64
"""Different names of tools in metrics; more are called ``other``."""
CHECKS_MAX = 1024
LEFT_OUT = "[left out: an earlier answer]"
_THINK_END = "</think>"


def keep_last_answers(messages: Sequence[Message], n: int) -> tuple[Message, ...]:
    """All but the last ``n`` tool answers replaced by a mark. Answers that the policy has not read yet (those at the
    end) stay, however many they are."""
    unread = 0
    while unread < len(messages) and messages[len(messages) - 1 - unread].role == "tool":
        unread += 1
    left, result = max(n, unread), []
    for message in reversed(messages):
        if message.role == "tool":
            if left <= 0 and len(message.content) > len(LEFT_OUT):
                message = replace(message, content=LEFT_OUT)
            left -= 1
        result.append(message)
    return tuple(reversed(result))


def without_thinking(messages: Sequence[Message]) -> tuple[Message, ...]:
    """``<think>…</think>`` taken out of replies before the user's last message, as the templates of Qwen3 and others
    do; the thinking of a reply whose tool calls are still being answered stays."""
    last_user = max((i for i, message in enumerate(messages) if message.role == "user"), default=-1)
    return tuple(
        replace(message, content=message.content.rpartition(_THINK_END)[2].lstrip("\n"))
        if i < last_user and message.role == "assistant" and _THINK_END in message.content
        else message
        for i, message in enumerate(messages)
    )


class ToolSpec(BaseModel):
    """One tool of the run file."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    name: str
    """``calculator``, ``python``, ``search``, ``mcp``, an entry point of ``afterplay.tools``, ``module:name`` or
    ``path/file.py:name``; a class of :class:`actors.tools.Tool` or a function."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of its constructor."""
    blocking: bool = False
    """A function that blocks for more than a millisecond: run it in threads."""


@dataclass(config=STRICT_OPTIONS)
class ToolAgent(AgentLoop):
    """Options of ``environments.<name>.loop.options`` for ``tool_agent``."""

    tools: tuple[str | ToolSpec, ...] = ()
    """Tools beside those that the environment brings. A name alone is a tool without options."""
    tell_schemas: bool = True
    """The prompt describes the tools. False where the environment's own messages show them: a long text about tools
    confuses a model that never saw one, and a few examples do not."""
    parser: str = "auto"
    """Form of calls: ``auto`` (that in which the chat template writes calls), the name of one (docs/AGENTS.md lists
    them, such as ``hermes``), ``transformers`` (the tokenizer's response template) or ``vllm:NAME``."""
    max_parallel_calls: int = Field(default=8, ge=1, le=256)
    """Calls of one turn that run at the same time."""
    max_calls: int = Field(default=16, ge=1, le=256)
    """Calls of one turn that are run at all; the rest are answered with an error."""
    max_assistant_turns: int | None = Field(default=None, ge=1)
    """Replies of the policy, calls included. None: ``max_turns`` of the section alone."""
    max_user_turns: int | None = Field(default=None, ge=1)
    """Times the policy is answered, by tools or by the environment. None: no limit of its own."""
    max_tool_response_length: int = Field(default=4096, ge=1, le=1_000_000)
    """Longest answer of one call, in ``tool_response_unit``; the rest is cut off and marked as missing."""
    tool_response_unit: Literal["characters", "tokens"] = "characters"
    tool_response_cut: Literal["left", "right", "middle"] = "middle"
    """The side that is cut away: errors stand at the end of an output, headings at its beginning."""
    tool_seconds_max: float = Field(default=30.0, gt=0, le=3600)
    """Time of one call, of a tool's ``create`` and of waiting for the list of tools."""
    keep_tool_answers: int | None = Field(default=None, ge=1)
    """Compaction: when the prompt grows beyond ``compact_above_tokens``, all but so many of the last tool answers are
    left out, in a new branch. None: never."""
    compact_above_tokens: int = Field(default=2048, ge=1)
    drop_thinking: bool = False
    """Take ``<think>`` out of replies before the user's last message, in a new branch, where the template does not."""

    @model_validator(mode="after")
    def _names_are_not_given_twice(self) -> ToolAgent:
        names = [spec for spec in self.tools if isinstance(spec, str)]
        if len(set(names)) != len(names):
            raise ValueError(f"tools: expected each name once, got {names}")
        return self

    def bind(self, host: EnvironmentHost, renderer: Renderer, metrics: ActorMetrics) -> None:
        """Build the tools. Raises :class:`ConfigurationError`."""
        self._where = f"environments.{host.section}.loop"
        self._metrics = metrics
        self._threads = host.threads
        self._blocking = host.blocking
        self._labels: set[str] = set()
        self._checks: dict[str, Check] = {}
        self.failures = Failures()
        where = f"{self._where}.options.parser"
        self.parse = parser_of(self.parser, renderer.template, renderer.tokenizer, where, renderer.name)
        self._rules = ToolLimits(
            self.max_parallel_calls,
            self.max_calls,
            self.tool_seconds_max,
            truncater(self.max_tool_response_length, self.tool_response_cut, self.tool_response_unit, renderer),
        )
        self._tools: list[Tool] = []
        self._toolsets: list[Toolset] = []
        for given in self.tools:
            spec = ToolSpec(name=given) if isinstance(given, str) else given
            option = f"{self._where}.options.tools ({spec.name})"
            built = build_tool(spec.name, spec.options, option, self._threads if spec.blocking else None)
            if isinstance(built, Toolset):
                self._toolsets.append(built)
            else:
                self._tools.append(built)
        for tool in host.tools():
            self._tools.append(as_tool(tool, f"environments.{host.section}", self._threads if self._blocking else None))
        self._shared = [self._ready(tool) for tool in self._tools]
        _require_different(self._shared, self._where)

    def begin(self, game: Game) -> AgentEpisode:
        return ToolAgentEpisode(self, game)

    async def episode_tools(self, game: Game) -> EpisodeTools:
        """The tools of one episode, not begun yet. Raises :class:`PlugInError`."""
        ready = list(self._shared)
        with boundary("tools"):
            for toolset in self._toolsets:
                with anyio.fail_after(self.tool_seconds_max):
                    ready += [self._ready(tool) for tool in await toolset.tools()]
            own = getattr(game.episode, "tools", ())
            threads = self._threads if self._blocking else None
            ready += [self._ready(as_tool(tool, f"{self._where}: Episode.tools", threads)) for tool in own]
            _require_different(ready, self._where)
        return EpisodeTools(game.key, game.task, ready, self._rules, self._metrics, self.failures)

    async def serve(self) -> None:
        async with anyio.create_task_group() as group:
            for toolset in self._toolsets:
                group.start_soon(toolset.serve)

    async def close(self) -> None:
        closing: list[Tool | Toolset] = [*self._tools, *self._toolsets]
        for tool in closing:
            try:
                with boundary(f"{self._where}: closing {getattr(tool, 'name', type(tool).__qualname__)}"):
                    await tool.close()
            except AfterplayError as error:
                log.exception("%s", error)

    def _ready(self, tool: Tool) -> Ready:
        schema = schema_of_tool(tool, self._where)
        key = repr(schema)
        check = self._checks.get(key)
        if check is None:
            check = check_of(schema, self._where)
            if len(self._checks) < CHECKS_MAX:
                self._checks[key] = check
        label = schema["function"]["name"]
        if label not in self._labels and len(self._labels) >= LABELS_MAX:
            label = "other"
        self._labels.add(label)
        return Ready(tool, schema, check, label)


class ToolAgentEpisode(AgentEpisode):
    """One rollout with tools."""

    def __init__(self, loop: ToolAgent, game: Game) -> None:
        super().__init__(game)
        self._loop = loop
        self._tools: EpisodeTools | None = None
        self._replies = 0
        self._answers = 0
        self._used: list[ToolUse] = []

    async def start(self) -> Opening:
        tools = self._tools = await self._loop.episode_tools(self.game)
        await tools.create()
        return Opening(self.game.episode.messages, tools.schemas if self._loop.tell_schemas else ())

    async def answer(self, reply: Reply) -> Answer:
        assert self._tools is not None
        self._replies += 1
        parsed = self._loop.parse(reply, self._tools.schemas)
        if parsed.calls:
            return self._limited(await self._of_tools(self._tools, parsed))
        used, self._used = tuple(self._used), []
        step = await self.game.step(Reply(str(reply), reply.finish_reason, used))
        return self._limited(Answer.of(step))

    async def _of_tools(self, tools: EpisodeTools, parsed: Parsed) -> Answer:
        done = await tools.run(parsed.calls)
        self._used += [ToolUse(d.name, d.arguments, d.text, d.outcome == "ok") for d in done]
        ids = [call_number(self._replies, index) for index in range(len(done))]
        messages = tuple(
            Message("tool", d.text, {"name": d.name[:NAME_CHARACTERS_MAX], "tool_call_id": i})
            for d, i in zip(done, ids, strict=True)
        )
        stated = [_stated(call, i) for call, i in zip(parsed.calls, ids, strict=True)]
        parsed_reply = Message("assistant", parsed.content, {"tool_calls": stated})
        return Answer(messages, sum(d.reward for d in done), signals=_signals(done), parsed_reply=parsed_reply)

    def _limited(self, answer: Answer) -> Answer:
        """Apply the loop's own limits to an answer after which the episode would continue."""
        if answer.done:
            return answer
        self._answers += 1
        loop = self._loop
        if loop.max_assistant_turns is not None and self._replies >= loop.max_assistant_turns:
            return replace(answer, limit=Limit.ASSISTANT_TURNS)
        if loop.max_user_turns is not None and self._answers > loop.max_user_turns:
            return replace(answer, limit=Limit.USER_TURNS)
        return answer

    def rewrite(self, messages: Sequence[Message], prompt_tokens: int) -> Sequence[Message]:
        loop = self._loop
        if loop.drop_thinking:
            messages = without_thinking(messages)
        if loop.keep_tool_answers is not None and prompt_tokens > loop.compact_above_tokens:
            messages = keep_last_answers(messages, loop.keep_tool_answers)
        return messages

    async def close(self) -> None:
        if self._tools is not None:
            await self._tools.release()


def _stated(call: ToolCall | CallError, number: str) -> dict[str, Any]:
    """A call as chat templates take it."""
    arguments = dict(call.arguments) if isinstance(call, ToolCall) else {}
    return stated_call(number, (call.name or "unknown")[:NAME_CHARACTERS_MAX], arguments)


def _signals(done: Sequence[Done]) -> dict[str, float]:
    """Added up over the calls of a turn."""
    signals = {"tool_calls": float(len(done)), "tool_errors": float(sum(d.outcome != "ok" for d in done))}
    for one in done:
        for name, value in one.signals.items():
            signals[name] = signals.get(name, 0.0) + value
    return signals


def _require_different(ready: Sequence[Ready], where: str) -> None:
    names = [tool.name for tool in ready]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ConfigurationError(f"{where}: expected tools with different names, got twice: {', '.join(twice)}")
