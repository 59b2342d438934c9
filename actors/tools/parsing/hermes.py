"""``<tool_call>`` blocks with JSON in them (Hermes, Qwen 2.5 and 3) or with Qwen3-Coder's tags.

::

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

Formats: github.com/NousResearch/Hermes-Function-Calling and the chat templates published with Qwen3 and Qwen3-Coder.
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
)

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
    """As Qwen's templates write it."""
    return "\n".join(
        f"{OPEN}\n{json.dumps({'name': c.name, 'arguments': dict(c.arguments)}, ensure_ascii=False)}\n{CLOSE}"
        for c in calls
    )


def render_qwen_xml(calls: Sequence[ToolCall]) -> str:
    """As Qwen3-Coder's template writes it."""
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
    """Text where the schema says so, else JSON where it is JSON."""
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
