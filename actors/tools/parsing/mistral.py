"""Mistral: ``[TOOL_CALLS]`` and then a JSON list, or ``name[ARGS]{...}`` for each call (tokenizers of version 11 on).

Formats: the tokenizers of mistral-common and the chat templates published with the models.
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
    call,
    call_of,
    json_at,
    json_of,
    shown,
)

TAG = "[TOOL_CALLS]"
_NAMED = re.compile(r"\s*([A-Za-z0-9_.\-]+)\s*(?:\[CALL_ID\][^\[{]*)?(?:\[ARGS\])?\s*(?=\{)")


def parse_mistral(text: str, tools: Sequence[ToolSchema] = ()) -> Parsed:
    """Everything behind the first tag is calls."""
    content, tag, body = text.partition(TAG)
    if not tag:
        return Parsed(text)
    try:
        calls = _listed(body) if body.lstrip().startswith("[") else [_named(part) for part in body.split(TAG)]
    except Unreadable as error:
        calls = [CallError(f"The tool call could not be read: {error}.")]
    return Parsed(content.rstrip(), tuple(calls[:CALLS_MAX]))


def _listed(body: str) -> list[ToolCall | CallError]:
    values, _ = json_at(body, 0)
    if not values:
        raise Unreadable("expected a list of calls, got an empty one")
    calls: list[ToolCall | CallError] = []
    for value in values:
        try:
            calls.append(call_of(value))
        except Unreadable as error:
            calls.append(CallError(f"The tool call could not be read: {error}."))
    return calls


def _named(part: str) -> ToolCall | CallError:
    opening = _NAMED.match(part)
    try:
        if opening is None:
            raise Unreadable(f"expected a name and a JSON object, got {shown(part)}")
        return call(opening[1], json_of(part[opening.end() :]))
    except Unreadable as error:
        return CallError(f"The tool call could not be read: {error}.")


def render_mistral(calls: Sequence[ToolCall]) -> str:
    """The list form."""
    listed = [{"name": c.name, "arguments": dict(c.arguments)} for c in calls]
    return f"{TAG}{json.dumps(listed, ensure_ascii=False)}"


def render_mistral_named(calls: Sequence[ToolCall]) -> str:
    """The form of newer tokenizers."""
    return "".join(f"{TAG}{c.name}[ARGS]{json.dumps(dict(c.arguments), ensure_ascii=False)}" for c in calls)


MISTRAL = ToolFormat(parse_mistral, render_mistral)
