"""Parsers of tool calls in JSON or tags.

Hermes, Qwen 2.5 and 3: JSON in tags; Qwen3-Coder: tags alone (github.com/NousResearch/Hermes-Function-Calling and the
chat templates published with Qwen3 and Qwen3-Coder)::

    <tool_call>
    {"name": "add", "arguments": {"a": 1, "b": 2}}
    </tool_call>

    <tool_call>
    <function=add>
    <parameter=a>
    1
    </parameter>
    </function>
    </tool_call>

Llama 3.x: a JSON object with ``parameters`` as the whole reply, several of them separated by ``;``, perhaps after
``<|python_tag|>``; and the built-in tools' form ``<|python_tag|>search.call(query="x")`` (prompt format pages of Llama
3.1 and 3.2 and the chat templates published with the models).

Mistral: ``[TOOL_CALLS]`` and then a JSON list, or ``name[ARGS]{...}`` for each call (tokenizers of version 11 on; the
tokenizers of mistral-common and the chat templates published with the models).
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

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
from actors.tools.parsing.pythonic import calls_in

OPEN, CLOSE = "<tool_call>", "</tool_call>"
_FUNCTION = re.compile(r"\s*<function=([^>\n]*)>")
_PARAMETER = re.compile(r"\s*<parameter=([^>\n]*)>\n?")
_Block = Callable[[str, int, Sequence[ToolSchema]], tuple[ToolCall, int]]


def parse_hermes(text: str, tools: Sequence[ToolSchema] = ()) -> Parsed:
    """JSON in ``<tool_call>`` tags."""
    return _blocks(text, tools, _json_block)


def parse_qwen(text: str, tools: Sequence[ToolSchema] = ()) -> Parsed:
    """Either form, block by block."""
    return _blocks(text, tools, _either_block)


def render_hermes(calls: Sequence[ToolCall]) -> str:
    """Calls as Qwen's templates write them."""
    return "\n".join(
        f"{OPEN}\n{json.dumps({'name': c.name, 'arguments': dict(c.arguments)}, ensure_ascii=False)}\n{CLOSE}"
        for c in calls
    )


def render_qwen_xml(calls: Sequence[ToolCall]) -> str:
    """Calls as Qwen3-Coder's template writes them."""
    return "\n".join(_xml(c) for c in calls)


def _blocks(text: str, tools: Sequence[ToolSchema], block: _Block) -> Parsed:
    at = text.find(OPEN)
    if at < 0:
        return Parsed(text)
    content = text[:at].rstrip()
    calls: list[ToolCall | CallError] = []
    while at >= 0 and len(calls) < CALLS_MAX:
        start = at + len(OPEN)
        try:
            found, end = block(text, start, tools)
            rest = text[end:].lstrip()
            if rest and not rest.startswith(CLOSE):
                raise Unreadable(f"expected {CLOSE} after the call")
            calls.append(found)
        except Unreadable as error:
            end = start
            calls.append(CallError(f"The tool call could not be read: {error}."))
        close = text.find(CLOSE, end)
        at = text.find(OPEN, end if close < 0 else close)
    return Parsed(content, tuple(calls))


def _json_block(text: str, start: int, tools: Sequence[ToolSchema]) -> tuple[ToolCall, int]:
    value, end = json_at(text, start)
    return call_of(value), end


def _either_block(text: str, start: int, tools: Sequence[ToolSchema]) -> tuple[ToolCall, int]:
    if _FUNCTION.match(text, start):
        return _xml_block(text, start, tools)
    return _json_block(text, start, tools)


def _xml_block(text: str, start: int, tools: Sequence[ToolSchema]) -> tuple[ToolCall, int]:
    opening = _FUNCTION.match(text, start)
    assert opening is not None
    name, at = opening[1].strip(), opening.end()
    if not name:
        raise Unreadable("expected a name in <function=...>")
    types = _properties(tools, name)
    arguments: dict[str, Any] = {}
    while (parameter := _PARAMETER.match(text, at)) is not None:
        end = text.find("</parameter>", parameter.end())
        if end < 0:
            raise Unreadable(f"<parameter={parameter[1]}> is not closed")
        key = parameter[1].strip()
        arguments[key] = _value(text[parameter.end() : end].removesuffix("\n"), types.get(key))
        at = end + len("</parameter>")
    rest = text[at:].lstrip()
    if not rest.startswith("</function>"):
        raise Unreadable("expected </function> after the parameters")
    return call(name, arguments), text.index("</function>", at) + len("</function>")


def _value(text: str, schema: Any) -> Any:
    """A string if the schema asks for one, else the parsed JSON, else the text."""
    kinds = schema.get("type") if isinstance(schema, Mapping) else None
    if kinds == "string" or (isinstance(kinds, list) and "string" in kinds):
        return text
    try:
        return json_of(text)
    except Unreadable:
        return text


def _properties(tools: Sequence[ToolSchema], name: str) -> Mapping[str, Any]:
    for tool in tools:
        function = tool.get("function", {})
        if function.get("name") == name:
            found = function.get("parameters", {}).get("properties", {})
            return found if isinstance(found, Mapping) else {}
    return {}


def _xml(one: ToolCall) -> str:
    values = {k: v if isinstance(v, str) else json.dumps(v, ensure_ascii=False) for k, v in one.arguments.items()}
    parameters = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in values.items())
    return f"{OPEN}\n<function={one.name}>\n{parameters}</function>\n{CLOSE}"


HERMES = ToolFormat(parse_hermes, render_hermes)
QWEN = ToolFormat(parse_qwen, render_hermes)
QWEN_XML = ToolFormat(parse_qwen, render_qwen_xml)


PYTHON_TAG = "<|python_tag|>"
_LOOKS_LIKE_A_CALL = re.compile(r'\s*\{\s*"(?:name|type)"\s*:')


def parse_llama(text: str, tools: Sequence[ToolSchema] = ()) -> Parsed:
    """JSON that is no call (no ``name``) is text, unless it stands behind the tag."""
    content, tag, body = text.rpartition(PYTHON_TAG)
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
    """True if the text after a call looks like another one; else it is talk, and left out."""
    return _LOOKS_LIKE_A_CALL.match(rest.lstrip(" \t\r\n;")) is not None


def render_llama(calls: Sequence[ToolCall]) -> str:
    """Calls as the template of Llama 3.1 writes one; several are separated by ``; ``."""
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


TOOL_CALLS_TAG = "[TOOL_CALLS]"
_NAMED = re.compile(r"\s*([A-Za-z0-9_.\-]+)\s*(?:\[CALL_ID\][^\[{]*)?(?:\[ARGS\])?\s*(?=\{)")


def parse_mistral(text: str, tools: Sequence[ToolSchema] = ()) -> Parsed:
    """Everything behind the first tag is calls."""
    content, tag, body = text.partition(TOOL_CALLS_TAG)
    if not tag:
        return Parsed(text)
    try:
        calls = (
            _listed(body) if body.lstrip().startswith("[") else [_named(part) for part in body.split(TOOL_CALLS_TAG)]
        )
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
    return f"{TOOL_CALLS_TAG}{json.dumps(listed, ensure_ascii=False)}"


def render_mistral_named(calls: Sequence[ToolCall]) -> str:
    """The form of newer tokenizers."""
    return "".join(f"{TOOL_CALLS_TAG}{c.name}[ARGS]{json.dumps(dict(c.arguments), ensure_ascii=False)}" for c in calls)


MISTRAL = ToolFormat(parse_mistral, render_mistral)
