"""Results of parsing a reply: its text, and its calls in their order.

A parser never raises. A call that cannot be read becomes a :class:`CallError` at its position among the calls, with a
message for the policy, so that the calls beside it still run.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

ToolSchema = Mapping[str, Any]
"""``{"type": "function", "function": {"name", "description", "parameters"}}``."""
CALLS_MAX = 256
"""Calls read from one reply; what comes after them is left unread."""


@dataclass(frozen=True, slots=True)
class ToolCall:
    """One call, as the policy wrote it. ``arguments`` are JSON values."""

    name: str
    arguments: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class CallError:
    """A call that cannot be read."""

    text: str
    """Message to the policy."""
    name: str = ""
    """The tool, where that much could be read."""


@dataclass(frozen=True, slots=True)
class Parsed:
    """A parsed reply."""

    content: str
    """The text before the calls."""
    calls: tuple[ToolCall | CallError, ...] = ()


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """The tool-call format of a model family. Pure functions."""

    parse: Callable[[str, Sequence[ToolSchema]], Parsed]
    render: Callable[[Sequence[ToolCall]], str]
    """The calls as such a model would write them: for demonstrations and tests."""


class Unreadable(Exception):
    """Raised inside a parser for one call; never leaves it."""


def call_of(value: Any, *, arguments_key: tuple[str, ...] = ("arguments", "parameters")) -> ToolCall:
    """``{"name": ..., "arguments": {...}}`` as a call. Raises :class:`Unreadable`."""
    if not isinstance(value, dict):
        raise Unreadable(f"expected a JSON object with name and arguments, got {shown(value)}")
    name = value.get("name")
    if not isinstance(name, str) or not name:
        raise Unreadable(f'expected "name" to be the name of a tool, got {shown(name)}')
    found: Any = {}
    for key in arguments_key:
        if key in value:
            found = value[key]
            break
    if isinstance(found, str):
        found = json_of(found)
    if found is None:
        found = {}
    return call(name, found)


def call(name: str, arguments: Any) -> ToolCall:
    """Raises :class:`Unreadable` for arguments that are no JSON object, or hold text that no tokenizer can take."""
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
    while start < len(text) and text[start] in " \t\r\n":
        start += 1
    try:
        value, end = _DECODER.raw_decode(text, start)
    except json.JSONDecodeError as error:
        raise Unreadable(f"not valid JSON: {error.msg} at character {error.pos - start}") from None
    except (ValueError, RecursionError) as error:
        raise Unreadable(f"not valid JSON: {str(error)[:200] or type(error).__name__}") from None
    return value, end


def shown(value: Any) -> str:
    """A short form for messages."""
    text = ascii(value)
    return text if len(text) <= 80 else text[:80] + "..."


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


_DECODER = json.JSONDecoder(parse_constant=_no_constant)
