"""Comparison of a prompt with what was said in it: a template may render a conversation and leave a part of it out.

A text counts as there where the prompt has it as it was said, without white space around it, or as a JSON or Python
string. Texts of users, tools and written replies stand in the order in which they were said; system messages and the
parts of a call stand anywhere.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from actors.tools.parsing.base import REASONING
from pipeline.schema import Message

SYSTEM_ROLES = ("system", "developer")
_KINDS = {"user": "a message of the user", "assistant": "a written reply", "tool": "the answer of a tool"}
_OF_SCHEMAS = frozenset({"type", "title", "format"})
"""Keys of a JSON schema whose values are no text of the tool's author. ``$ref`` and its like are none either."""


class TextLost(ValueError):
    """A chat template renders a conversation without a text that was said in it."""


def lost(messages: Iterable[Message], rendered: str, at: int = 0) -> str | None:
    """The first of the texts of ``messages`` that ``rendered[at:]`` lacks, in words; None where all are there."""
    start = at
    for message in messages:
        before = at
        if message.content and not message.content.isspace():
            anywhere = message.role in SYSTEM_ROLES
            end = _end_of(message.content, rendered, start if anywhere else at)
            if end < 0:
                kind = "the system message" if anywhere else _KINDS.get(message.role, f"a message of {message.role!r}")
                return _words(kind, message.content)
            at = at if anywhere else end
        for kind, text in _beside(message) if message.extra else ():
            if _end_of(text, rendered, before) < 0:
                return _words(kind, text)
    return None


def lost_schema(tools: Iterable[Mapping[str, Any]], rendered: str, restore: Callable[[str], str]) -> str | None:
    """The first text of the schemas of ``tools`` that ``rendered`` lacks; ``restore`` takes stand-ins out of them."""
    for tool in tools:
        for text in schema_texts(tool.get("function", tool)):
            if _end_of(restore(text), rendered, 0) < 0:
                return _words("a text of a tool's schema", restore(text))
    return None


def schema_texts(value: Any) -> Iterator[str]:
    """Names, descriptions, properties and choices of a JSON schema."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from schema_texts(item)
    elif isinstance(value, Mapping):
        for key, item in value.items():
            if key in ("properties", "$defs", "definitions") and isinstance(item, Mapping):
                for name, schema in item.items():
                    yield name
                    yield from schema_texts(schema)
            elif not (key.startswith("$") or (key in _OF_SCHEMAS and not isinstance(item, Mapping))):
                yield from schema_texts(item)


def _beside(message: Message) -> Iterator[tuple[str, str]]:
    """(kind, text) of what a message says beside its content."""
    for key in REASONING:
        if isinstance(text := message.extra.get(key), str) and text:
            yield f"the {key} of a written reply", text
    for call in message.extra.get("tool_calls") or ():
        function = call.get("function", call)
        yield "the name in a written call", str(function["name"])
        arguments = function.get("arguments")
        for text in _leaves(arguments_of(arguments)):
            yield "an argument of a written call", text


def arguments_of(stated: Any) -> Any:
    """Arguments of a call as an object, also where they are stated as OpenAI's JSON text."""
    if isinstance(stated, str):
        try:
            value = json.loads(stated)
        except (ValueError, RecursionError):
            return stated
        return value if isinstance(value, dict) else stated
    return stated


def _leaves(value: Any) -> Iterator[str]:
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield str(key)
            yield from _leaves(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _leaves(item)
    elif isinstance(value, str):
        yield value
    elif isinstance(value, int | float) and not isinstance(value, bool):
        yield json.dumps(value)


def _end_of(text: str, rendered: str, at: int) -> int:
    """End of ``text`` in ``rendered[at:]``; -1 where it is not there."""
    text = text.strip()
    found = rendered.find(text, at)
    if found >= 0:
        return found + len(text)
    for written in (json.dumps(text, ensure_ascii=False), json.dumps(text), repr(text)):
        found = rendered.find(written[1:-1], at)
        if found >= 0:
            return found + len(written) - 2
    return -1


def _words(kind: str, text: str) -> str:
    return f"{kind}, {text if len(text) <= 60 else text[:60] + '…'!r}"
