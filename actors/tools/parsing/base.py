"""Parsing of a reply: its text, and its calls in their order.

A parser never raises. A call that cannot be read becomes a :class:`CallError` at its position among the calls, with a
message for the policy, so that the calls beside it still run. What a policy thinks is not parsed: a call there is none.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

ToolSchema = Mapping[str, Any]
"""``{"type": "function", "function": {"name", "description", "parameters"}}``."""
CALLS_MAX = 256
"""Calls read from one reply; what comes after them is left unread."""
NAME_CHARACTERS_MAX = 64
"""Part of a name that a policy wrote which goes back into messages."""
REASONING = ("reasoning_content", "reasoning", "thinking")
"""Fields of a reply that hold thoughts."""


@dataclass(frozen=True, slots=True)
class ToolCall:
    """One call, as the policy wrote it. ``arguments`` are JSON values."""

    name: str
    arguments: Mapping[str, Any] = field(default_factory=dict)


def stated_call(number: str, name: str, arguments: Any) -> dict[str, Any]:
    """A call with the id ``number`` as chat templates and OpenAI's messages state it."""
    return {"id": number, "type": "function", "function": {"name": name, "arguments": arguments}}


def call_number(turn: int, index: int) -> str:
    """The id of a call: nine digits, because Mistral's templates want that."""
    return f"{turn % 10**5:05d}{index % 10**4:04d}"


@dataclass(frozen=True, slots=True)
class CallError:
    """A call that cannot be read."""

    text: str
    """Message to the policy."""
    name: str = ""
    """The tool, where that much could be read."""

    @classmethod
    def of(cls, reason: object) -> CallError:
        """With the ``reason`` why it cannot be read."""
        return cls(f"The tool call could not be read: {reason}.")


@dataclass(frozen=True, slots=True)
class Parsed:
    """A parsed reply."""

    content: str
    """The text before the calls."""
    calls: tuple[ToolCall | CallError, ...] = ()


@dataclass(frozen=True, slots=True)
class Thinking:
    """The marks around what a policy thinks."""

    marks: tuple[tuple[str, str], ...] = (("<think>", "</think>"),)
    """(opening, closing). A thought that is not closed lasts to the end of the reply."""
    begun: str = ""
    """The closing mark, where the prompt has opened the thought with which a reply begins."""

    def first_end(self, text: str) -> int:
        """Position behind the thought that the prompt has opened; 0 where there is none."""
        return _behind(text, self.begun, 0) if self.begun else 0

    def next_thought(self, text: str, at: int) -> tuple[int, int]:
        """Begin and end of the first thought that opens at ``at`` or later; both the length of the text for none."""
        begin, mark = len(text), ("", "")
        for pair in self.marks:
            found = text.find(pair[0], at, begin)
            if found >= 0:
                begin, mark = found, pair
        return begin, _behind(text, mark[1], begin + len(mark[0])) if mark[0] else begin


Read = Callable[[str, int, Sequence[ToolSchema]], tuple[list[ToolCall | CallError], int]]
"""``read(text, at, tools)``: the calls that stand at ``at``, and where they end. Raises :class:`Unreadable`."""


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """The form in which a model family writes calls."""

    mark: re.Pattern[str]
    """The text before a call, or before several that follow each other. Calls are read from its end on."""
    read: Read
    render: Callable[[Sequence[ToolCall]], str]
    """The calls as such a model would write them: for demonstrations and tests."""
    start: re.Pattern[str] | None = None
    """The beginning of calls that are the whole reply and have no mark before them."""
    close: str = ""
    """The text behind a call. The next one is looked for there where a call cannot be read."""

    def parse(self, text: str, tools: Sequence[ToolSchema] = (), thinking: Thinking = Thinking()) -> Parsed:
        """The reply taken apart."""
        if self.start is None and self.mark.search(text) is None:
            return Parsed(text)
        calls: list[ToolCall | CallError] = []
        content = text
        at = thinking.first_end(text)
        thought = thinking.next_thought(text, at)
        while len(calls) < CALLS_MAX:
            found = self.mark.search(text, at)
            begin, inside = found.span() if found is not None else (len(text), len(text))
            if not calls and self.start is not None and self.start.match(text, at):
                begin = inside = at
            if thought[0] < begin:
                at = thought[1]
                thought = thinking.next_thought(text, at)
                continue
            if begin == len(text):
                break
            content = content if calls else text[:begin].rstrip()
            try:
                more, at = self.read(text, inside, tools)
                calls += more
            except Unreadable as error:
                calls.append(CallError.of(error))
                at = max(inside, text.find(self.close, inside)) if self.close else inside
            at = max(at, begin + 1)
            if thought[0] < at:
                thought = thinking.next_thought(text, at)
        return Parsed(content, tuple(calls[:CALLS_MAX]))


def _behind(text: str, mark: str, at: int) -> int:
    found = text.find(mark, at)
    return len(text) if found < 0 else found + len(mark)


class Unreadable(Exception):
    """Raised inside a parser for one call; never leaves it."""


def call_of(value: Any) -> ToolCall:
    """``{"name": ..., "arguments": {...}}`` as a call. Raises :class:`Unreadable`."""
    if not isinstance(value, dict):
        raise Unreadable(f"expected a JSON object with name and arguments, got {shown(value)}")
    name = value.get("name", value.get("tool_name"))
    if not isinstance(name, str) or not name:
        raise Unreadable(f'expected "name" to be the name of a tool, got {shown(name)}')
    return call(name, next((value[key] for key in ("arguments", "parameters") if key in value), {}))


def call(name: str, arguments: Any) -> ToolCall:
    """Arguments may be a JSON text of an object. Raises :class:`Unreadable` for arguments that are no JSON object, or
    hold text that no tokenizer can take."""
    arguments = json_of(arguments) if isinstance(arguments, str) else arguments
    arguments = {} if arguments is None else arguments
    if not isinstance(arguments, dict):
        raise Unreadable(f"expected the arguments of {name} to be a JSON object, got {shown(arguments)}")
    try:
        (name + json.dumps(arguments, ensure_ascii=False, allow_nan=False)).encode()
    except (UnicodeEncodeError, ValueError, TypeError, RecursionError) as error:
        raise Unreadable(f"the arguments of {name[:64]!a} are not valid JSON text: {type(error).__name__}") from None
    return ToolCall(name, arguments)


def json_of(text: str) -> Any:
    """The JSON value that is all of ``text``. Raises :class:`Unreadable`."""
    value, end = json_at(text, 0)
    if text[end:].strip():
        raise Unreadable(f"expected nothing after the JSON value, got {shown(text[end:].strip())}")
    return value


def json_at(text: str, start: int) -> tuple[Any, int]:
    """The JSON value at ``start`` (spaces skipped) and where it ends. Raises :class:`Unreadable`."""
    start = skip_space(text, start)
    try:
        value, end = _DECODER.raw_decode(text, start)
    except json.JSONDecodeError as error:
        raise Unreadable(f"not valid JSON: {error.msg} at character {error.pos - start}") from None
    except (ValueError, RecursionError) as error:
        raise Unreadable(f"not valid JSON: {str(error)[:200] or type(error).__name__}") from None
    return value, end


def skip_space(text: str, at: int) -> int:
    """The first place from ``at`` on without JSON's white space."""
    while at < len(text) and text[at] in " \t\r\n":
        at += 1
    return at


def schema_in(tools: Sequence[ToolSchema], name: str) -> Any:
    """JSON schema of a tool's arguments; None where it is unknown."""
    functions = (tool.get("function", {}) for tool in tools)
    return next((function.get("parameters") for function in functions if function.get("name") == name), None)


def shown(value: Any) -> str:
    """A short form for messages."""
    text = ascii(value)
    return text if len(text) <= 80 else text[:80] + "..."


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


_DECODER = json.JSONDecoder(parse_constant=_no_constant)
