"""Llama 3.x: a JSON object with ``parameters`` as the whole reply, several of them parted by ``;``, perhaps after
``<|python_tag|>``; and the built-in tools' form ``<|python_tag|>search.call(query="x")``.

Format: the prompt format pages of Llama 3.1 and 3.2 and the chat templates published with the models.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence

from actors.tools.parsing.base import (
    CALLS_MAX,
    CallError,
    Parsed,
    ToolCall,
    ToolFormat,
    ToolSchema,
    Unreadable,
    call_of,
    json_at,
)
from actors.tools.parsing.pythonic import calls_in

TAG = "<|python_tag|>"
_LOOKS_LIKE_A_CALL = re.compile(r'\s*\{\s*"(?:name|type)"\s*:')


def parse_llama(text: str, tools: Sequence[ToolSchema] = ()) -> Parsed:
    """JSON that is no call (no ``name``) is text, unless it stands behind the tag."""
    content, tag, body = text.rpartition(TAG)
    if not tag and not _LOOKS_LIKE_A_CALL.match(body):
        return Parsed(text)
    if tag and not body.lstrip().startswith("{"):
        return Parsed(content.rstrip(), _python(body, tools))
    calls: list[ToolCall | CallError] = []
    at = 0
    while len(calls) < CALLS_MAX:
        try:
            value, at = json_at(body, at)
            calls.append(call_of(value, arguments_key=("parameters", "arguments")))
            rest = body[at:].lstrip(" \t\r\n;")
            if not rest:
                break
            if not rest.startswith("{"):
                raise Unreadable("expected nothing after the call")
            at = len(body) - len(rest)
        except Unreadable as error:
            if calls and not rest_is_call(body[at:]):
                break
            calls.append(CallError(f"The tool call could not be read: {error}."))
            break
    return Parsed(content.rstrip(), tuple(calls))


def rest_is_call(rest: str) -> bool:
    """Whether what follows a call looks like another one; else it is talk, and left out."""
    return _LOOKS_LIKE_A_CALL.match(rest.lstrip(" \t\r\n;")) is not None


def render_llama(calls: Sequence[ToolCall]) -> str:
    """As the template of Llama 3.1 writes one; several are parted by ``; ``."""
    return "; ".join(json.dumps({"name": c.name, "parameters": dict(c.arguments)}, ensure_ascii=False) for c in calls)


def _python(body: str, tools: Sequence[ToolSchema]) -> tuple[ToolCall | CallError, ...]:
    try:
        found = calls_in(f"[{body.strip()}]", tools)
    except Unreadable as error:
        return (CallError(f"The tool call could not be read: {error}."),)
    return tuple(
        ToolCall(c.name.removesuffix(".call"), c.arguments) if isinstance(c, ToolCall) else c for c in found[:CALLS_MAX]
    )


LLAMA = ToolFormat(parse_llama, render_llama)
