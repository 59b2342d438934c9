"""The tools of one episode: created, called, released exactly once.

*Consumes* parsed calls; *produces* one :class:`Done` for each, in call order. *Waits* for tools, each under its limit;
at most ``parallel_max`` calls of a turn run at once. No error of a tool is raised here, cancellation apart: failures
are counted and logged. Long answers are truncated to a length in characters or tokens,
with a mark at the cut.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import anyio

from actors.metrics import ActorMetrics
from actors.tools.base import Check, Tool, ToolError, ToolResult
from actors.tools.parsing.base import CallError, ToolCall
from pipeline.errors import PlugInError, boundary, described, is_failure, traceback_of
from pipeline.schema import Task
from pipeline.schema.trajectory import finite_number

log = logging.getLogger(__name__)

LOGGED_MAX = 3
"""Tracebacks logged for each tool and kind of error; all are counted."""
RELEASE_SECONDS_MAX = 5.0
NAMES_SHOWN_MAX = 20
Side = Literal["left", "right", "middle"]
"""The side that is cut away."""
MARK = "\n... [{n} {unit} left out] ...\n"
CHARACTERS_A_TOKEN_MAX = 64
"""No token is counted as longer, so that a text of megabytes is cut before it is tokenised."""


class Tokens(Protocol):
    """A tokenizer, as far as cutting needs one."""

    def encode_text(self, text: str) -> tuple[int, ...]: ...
    def decode_ids(self, ids: tuple[int, ...]) -> str: ...


def truncate_characters(text: str, length_max: int, side: Side) -> str:
    """At most ``length_max`` characters of ``text``, and the mark beside them.

    >>> truncate_characters("abcdefgh", 4, "middle")
    'ab\\n... [4 characters left out] ...\\ngh'
    """
    if len(text) <= length_max:
        return text
    head, tail = _head_and_tail(length_max, side)
    mark = MARK.format(n=len(text) - length_max, unit="characters")
    return text[:head] + mark + text[len(text) - tail :]


def truncate_tokens(text: str, length_max: int, side: Side, tokens: Tokens) -> str:
    """The same in tokens of ``text`` alone; a character that a cut goes through is left out."""
    room = length_max * CHARACTERS_A_TOKEN_MAX
    long = len(text) > 4 * room
    shown = truncate_characters(text, 4 * room, side) if long else text
    ids = tokens.encode_text(shown)
    if len(ids) <= length_max:
        return shown
    head, tail = _head_and_tail(length_max, side)
    mark = MARK.format(n="many" if long else len(ids) - length_max, unit="tokens")
    first = tokens.decode_ids(ids[:head]).rstrip("\ufffd") if head else ""
    last = tokens.decode_ids(ids[len(ids) - tail :]).lstrip("\ufffd") if tail else ""
    return first + mark + last


def truncater(
    length_max: int, side: Side, unit: Literal["characters", "tokens"], tokens: Tokens
) -> Callable[[str], str]:
    """The function that truncates one answer."""
    if unit == "characters":
        return lambda text: truncate_characters(text, length_max, side)
    return lambda text: truncate_tokens(text, length_max, side, tokens)


def _head_and_tail(length_max: int, side: Side) -> tuple[int, int]:
    """(from the beginning, from the end)."""
    if side == "right":
        return length_max, 0
    if side == "left":
        return 0, length_max
    return length_max - length_max // 2, length_max // 2


class Failures:
    """Log of the failures of tools' own code, with tracebacks, bounded for each tool and kind of error."""

    def __init__(self) -> None:
        self._logged: Counter[tuple[str, str]] = Counter()

    def add(self, tool: str, where: str, episode: str, error: BaseException) -> None:
        """``where``: ``create``, ``execute`` or ``release``."""
        key = (tool, type(error).__name__)
        count = self._logged[key] + 1
        if len(self._logged) < 1000 or key in self._logged:
            self._logged[key] = count
        if count <= LOGGED_MAX:
            more = "; more of these are only counted" if count == LOGGED_MAX else ""
            words = (tool, where, described(error), episode, more, traceback_of(error))
            log.warning("tool %s failed in %s with %s (episode %s)%s\n%s", *words)


@dataclass(frozen=True, slots=True)
class Ready:
    """A tool with its cached properties."""

    tool: Tool
    schema: Mapping[str, Any]
    check: Check
    label: str
    """Its name in metrics."""

    @property
    def name(self) -> str:
        return str(self.schema["function"]["name"])


@dataclass(frozen=True, slots=True)
class Done:
    """Outcome of one call."""

    name: str
    text: str
    """The policy's view of the answer, truncated already."""
    outcome: str
    """``ok``, or why not: one of :data:`actors.metrics.TOOL_OUTCOMES`."""
    arguments: Mapping[str, Any] = field(default_factory=dict)
    reward: float = 0.0
    signals: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ToolLimits:
    """Limits of one loop."""

    parallel_max: int
    calls_max: int
    """Calls of one turn that are run; the others are answered with an error."""
    seconds_max: float
    truncate: Callable[[str], str]


class EpisodeTools:
    """The tools of one episode: ``create``, then ``run`` once a turn, then ``release``."""

    def __init__(
        self, key: str, task: Task, tools: Sequence[Ready], rules: ToolLimits, metrics: ActorMetrics, failures: Failures
    ) -> None:
        self._key = key
        self._task = task
        self._tools = {tool.name: tool for tool in tools}
        self._rules = rules
        self._metrics = metrics
        self._failures = failures
        self._begun: list[Ready] = []

    @property
    def schemas(self) -> tuple[Mapping[str, Any], ...]:
        return tuple(tool.schema for tool in self._tools.values())

    async def create(self) -> None:
        """Begin with every tool. Raises :class:`PlugInError`: without its tools an episode is not what was ordered.

        ``release`` must follow, also then."""
        for ready in self._tools.values():
            self._begun.append(ready)
            try:
                with boundary(f"tool create ({ready.name})"), anyio.fail_after(self._rules.seconds_max):
                    await ready.tool.create(self._key, self._task)
            except PlugInError as error:
                self._failures.add(ready.label, "create", self._key, error)
                raise

    async def release(self) -> None:
        """End with every tool that was begun with, all at once. Never raises; the second call does nothing."""
        begun, self._begun = self._begun, []
        if not begun:
            return
        async with anyio.create_task_group() as group:
            for ready in begun:
                group.start_soon(self._release, ready)

    async def run(self, calls: Sequence[ToolCall | CallError]) -> list[Done]:
        """Run the calls of one turn."""
        done: list[Done | None] = [None] * len(calls)
        limiter = anyio.Semaphore(self._rules.parallel_max)

        async def one(index: int, call: ToolCall) -> None:
            async with limiter:
                done[index] = await self._execute(call)

        waiting = []
        for index, call in enumerate(calls):
            if isinstance(call, CallError):
                done[index] = self._refused(call.name, "unreadable", call.text)
            elif index >= self._rules.calls_max:
                text = f"This call was not run: at most {self._rules.calls_max} calls are run in one turn."
                done[index] = self._refused(call.name, "too_many", text)
            else:
                waiting.append((index, call))
        if len(waiting) == 1:
            index, call = waiting[0]
            done[index] = await self._execute(call)
        elif waiting:
            async with anyio.create_task_group() as group:
                for index, call in waiting:
                    group.start_soon(one, index, call)
        return [one_done for one_done in done if one_done is not None]

    async def _execute(self, call: ToolCall) -> Done:
        ready = self._tools.get(call.name)
        if ready is None:
            names = ", ".join(list(self._tools)[:NAMES_SHOWN_MAX]) or "none"
            return self._refused(call.name, "unknown", f"There is no tool {call.name[:64]!r}. There are: {names}.")
        fault = ready.check(call.arguments)
        if fault is not None:
            return self._refused(call.name, "bad_arguments", f"The arguments of {call.name} are wrong: {fault}")
        started = time.perf_counter()
        outcome, result = await self._call(ready, call)
        self._metrics.tool_duration_seconds.labels(tool=ready.label).observe(time.perf_counter() - started)
        self._metrics.tool_calls_total.labels(tool=ready.label, outcome=outcome).inc()
        return Done(call.name, self._cut(result.text), outcome, call.arguments, result.reward, result.signals)

    async def _call(self, ready: Ready, call: ToolCall) -> tuple[str, ToolResult]:
        try:
            with anyio.move_on_after(self._rules.seconds_max) as scope:
                result = await ready.tool.execute(self._key, call.arguments)
            if scope.cancelled_caught:
                raise TimeoutError(f"{call.name} took longer than {self._rules.seconds_max:g} s")
            return "ok", _checked(result)
        except ToolError as error:
            return "refused", ToolResult(f"Error: {error}")
        except BaseException as error:
            if not is_failure(error):
                raise
            self._failures.add(ready.label, "execute", self._key, error)
            if isinstance(error, TimeoutError):
                return "timeout", ToolResult(f"Error: {call.name} did not answer in time.")
            if isinstance(error, _WrongValue):
                return "wrong_value", ToolResult(f"Error: {call.name} failed.")
            return "raised", ToolResult(f"Error: {call.name} failed ({type(error).__name__}).")

    def _refused(self, name: str, outcome: str, text: str) -> Done:
        ready = self._tools.get(name)
        label = ready.label if ready is not None else "unknown"
        self._metrics.tool_calls_total.labels(tool=label, outcome=outcome).inc()
        return Done(name, self._cut(f"Error: {text}"), outcome)

    def _cut(self, text: str) -> str:
        """Short enough, and nothing in it that no tokenizer can take."""
        text = self._rules.truncate(text)
        return text if text.isascii() else text.encode("utf-8", "replace").decode()

    async def _release(self, ready: Ready) -> None:
        try:
            with anyio.fail_after(RELEASE_SECONDS_MAX):
                await ready.tool.release(self._key)
        except BaseException as error:
            if not is_failure(error):
                raise
            self._failures.add(ready.label, "release", self._key, error)
            self._metrics.tool_calls_total.labels(tool=ready.label, outcome="release_failed").inc()


class _WrongValue(Exception):
    """A tool returned a wrong type."""


def _checked(result: Any) -> ToolResult:
    if not isinstance(result, ToolResult):
        raise _WrongValue(f"expected a ToolResult, got {repr(result)[:200]}")
    if not isinstance(result.text, str):
        raise _WrongValue(f"expected ToolResult.text to be text, got {repr(result.text)[:200]}")
    if not isinstance(result.signals, Mapping):
        raise _WrongValue(f"expected ToolResult.signals to be a mapping, got {repr(result.signals)[:200]}")
    reward = _number("reward", result.reward)
    return ToolResult(result.text, reward, {str(k): _number(k, v) for k, v in result.signals.items()})


def _number(name: str, value: Any) -> float:
    number = finite_number(value)
    if number is None:
        raise _WrongValue(f"expected {name} to be a finite number, got {repr(value)[:200]}")
    return number
