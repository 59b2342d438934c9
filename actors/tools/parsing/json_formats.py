"""Forms of calls whose arguments are JSON.

The forms are those of the chat templates that the models are published with (all of Qwen 2.5 and 3, Llama 3, Mistral,
Granite, Command R, DeepSeek, Kimi, gpt-oss and others). Three kinds:

* objects between marks, ``<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>``, one or several, or a list;
* the name apart from its arguments, ``[TOOL_CALLS]add[ARGS]{"a": 1}``;
* Llama's, an object as the whole reply, several separated by ``;``, and behind ``<|python_tag|>`` also a call of a
  built-in tool, ``search.call(query="x")``.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from typing import Any

from actors.tools.parsing.base import (
    CallError,
    ToolCall,
    ToolFormat,
    ToolSchema,
    Unreadable,
    call,
    call_of,
    json_at,
    shown,
)
from actors.tools.parsing.pythonic import calls_in

_GAP = re.compile(r"[ \t\r\n,;]*")
_OBJECT = '{"name": "NAME", "arguments": ARGUMENTS}'


def written(each: str, between: str = "", before: str = "", after: str = "") -> Callable[[Sequence[ToolCall]], str]:
    """Writes calls: ``each`` with NAME, INDEX and ARGUMENTS filled in, in a frame of ``before`` and ``after``."""

    def one(index: int, call: ToolCall) -> str:
        arguments = json.dumps(dict(call.arguments), ensure_ascii=False)
        return each.replace("INDEX", str(index)).replace("NAME", call.name, 1).replace("ARGUMENTS", arguments, 1)

    return lambda calls: before + between.join(one(i, c) for i, c in enumerate(calls)) + after


def objects(
    mark: str,
    close: str,
    render: Callable[[Sequence[ToolCall]], str],
    one: Callable[[Any], ToolCall] = call_of,
    head: str | None = None,
) -> ToolFormat:
    """JSON objects, or lists of them, behind a mark. ``head``: a pattern of what else may stand there: a group ``name``
    and all that comes between it and its arguments."""
    apart = re.compile(head) if head is not None else None

    def read(text: str, at: int, tools: Sequence[ToolSchema]) -> tuple[list[ToolCall | CallError], int]:
        if apart is not None and (found := apart.match(text, at)) is not None:
            value, end = json_at(text, found.end())
            _require_close(text, end, close)
            return [call(found["name"], value)], end
        calls: list[ToolCall | CallError] = []
        while not calls or text[at : at + 1] in ("{", "["):
            value, end = json_at(text, at)
            if value == []:
                raise Unreadable("expected a list of calls, got an empty one")
            calls += [_call_or_error(item, one) for item in (value if isinstance(value, list) else [value])]
            at = _behind_gap(text, end)
        _require_close(text, at, close)
        return calls, at

    return ToolFormat(re.compile(mark), read, render, close=close)


def _call_or_error(value: Any, one: Callable[[Any], ToolCall]) -> ToolCall | CallError:
    try:
        return one(value)
    except Unreadable as error:
        return CallError(f"The tool call could not be read: {error}.")


def _require_close(text: str, at: int, close: str) -> None:
    """A reply may end before the closing mark: the token that the turn ended with is not in the text."""
    rest = text[at : at + 64].lstrip(" \t\r\n`")
    if rest and not rest.startswith(close):
        raise Unreadable(f"expected {close} after the call")


def _behind_gap(text: str, at: int) -> int:
    found = _GAP.match(text, at)
    return found.end() if found is not None else at


def _pair(value: Any) -> ToolCall:
    """``{"add": {"a": 1}}``."""
    if not isinstance(value, dict) or len(value) != 1:
        raise Unreadable(f"expected a JSON object of one tool's name and its arguments, got {shown(value)}")
    return call(*next(iter(value.items())))


def named(mark: str, head: str, close: str, render: Callable[[Sequence[ToolCall]], str]) -> ToolFormat:
    """The name apart from its arguments."""
    pattern = re.compile(head)

    def read(text: str, at: int, tools: Sequence[ToolSchema]) -> tuple[list[ToolCall | CallError], int]:
        found = pattern.match(text, at)
        if found is None:
            raise Unreadable(f"expected a name and a JSON object, got {shown(text[at : at + 80])}")
        value, end = json_at(text, found.end())
        _require_close(text, end, close)
        return [call(found["name"], value)], end

    return ToolFormat(re.compile(mark), read, render, close=close)


HERMES = objects("<tool_call>", "</tool_call>", written(f"<tool_call>\n{_OBJECT}\n</tool_call>", "\n"))
JSON_FORMATS = {
    "hermes": HERMES,
    "mistral": objects(
        r"\[TOOL_CALLS\]",
        "",
        written(_OBJECT, ", ", "[TOOL_CALLS][", "]"),
        head=r'\s*(?P<name>[A-Za-z0-9_.\-]+)\s*(?:\[CALL_ID\][^\[{]*)?(?:\[ARGS\])?\s*(?=[{"])',
    ),
    "cohere": objects(
        r"<\|START_ACTION\|>",
        "<|END_ACTION|>",
        written(
            '{"tool_call_id": "INDEX", "tool_name": "NAME", "parameters": ARGUMENTS}',
            ",\n    ",
            "<|START_ACTION|>[\n    ",
            "\n]<|END_ACTION|>",
        ),
    ),
    "granite": objects(r"<\|tool_call\|>", "", written(_OBJECT, ", ", "<|tool_call|>[", "]")),
    "apriel": objects("<tool_calls>", "</tool_calls>", written(_OBJECT, ", ", "<tool_calls>[", "]</tool_calls>")),
    "nemotron": objects("<TOOLCALL>", "</TOOLCALL>", written(_OBJECT, ", ", "<TOOLCALL>[", "]</TOOLCALL>")),
    "gigachat": objects(
        r"<\|message_sep\|>\s*function call<\|role_sep\|>|<\|function_call\|>",
        "",
        written(f"<|function_call|>{_OBJECT}"),
    ),
    "apertus": objects(
        r"<\|tools_prefix\|>",
        "<|tools_suffix|>",
        written('{"NAME": ARGUMENTS}', ", ", "<|tools_prefix|>[", "]<|tools_suffix|>"),
        one=_pair,
    ),
    "deepseek": named(
        "(?:<｜tool▁calls▁begin｜>\\s*)?<｜tool▁call▁begin｜>",
        r"\s*(?:function<｜tool▁sep｜>)?(?P<name>[^\s<｜]+)\s*(?:<｜tool▁sep｜>|```json)",
        "<｜tool▁call▁end｜>",
        written(
            "<｜tool▁call▁begin｜>NAME<｜tool▁sep｜>ARGUMENTS<｜tool▁call▁end｜>",
            "",
            "<｜tool▁calls▁begin｜>",
            "<｜tool▁calls▁end｜>",
        ),
    ),
    "kimi": named(
        r"(?:<\|tool_calls_section_begin\|>\s*)?<\|tool_call_begin\|>",
        r"\s*(?:functions\.)?(?P<name>[^\s<]+?)(?::\d+)?\s*<\|tool_call_argument_begin\|>",
        "<|tool_call_end|>",
        written(
            "<|tool_call_begin|>functions.NAME:INDEX<|tool_call_argument_begin|>ARGUMENTS<|tool_call_end|>",
            "",
            "<|tool_calls_section_begin|>",
            "<|tool_calls_section_end|>",
        ),
    ),
    "solar": named(
        r"(?:<\|tool_calls\|>\s*)?<\|tool_call:begin\|>",
        r"[^<]*<\|tool_call:name\|>(?P<name>[^<]+)<\|tool_call:args\|>",
        "<|tool_call:end|>",
        written(
            "<|tool_call:begin|>00000INDEX<|tool_call:name|>NAME<|tool_call:args|>ARGUMENTS<|tool_call:end|>",
            "",
            "<|tool_calls|>",
        ),
    ),
    "functionary": named(
        r"<function=(?=[^>\n]{1,200}>\s{0,8}[{\"])",
        r"(?P<name>[^>\n]+)>",
        "</function>",
        written("<function=NAME>ARGUMENTS</function>"),
    ),
    "harmony": named(
        r"(?:<\|start\|>assistant)?(?:<\|channel\|>\w+)?\s{0,8}to=(?=[\w.\-]{1,200}[^{}]{0,80}<\|message\|>)",
        r"(?:functions\.)?(?P<name>[\w.\-]+)[^{}]*?<\|message\|>",
        "<|call|>",
        written(
            "<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>ARGUMENTS<|call|>",
            "<|start|>assistant",
        ),
    ),
}


_LOOKS_LIKE_A_CALL = re.compile(r'\s*\{\s*"(?:name|type)"\s*:')


def _read_llama(text: str, at: int, tools: Sequence[ToolSchema]) -> tuple[list[ToolCall | CallError], int]:
    """JSON that is no call (no ``name``) is text, unless it stands behind the tag."""
    body = text[at:].partition("<|python_tag|>")[0]
    if not body.lstrip().startswith("{"):
        found = calls_in(f"[{body.strip()}]", tools)
        return [
            ToolCall(c.name.removesuffix(".call"), c.arguments) if isinstance(c, ToolCall) else c for c in found
        ], at + len(body)
    calls: list[ToolCall | CallError] = []
    while not calls or _LOOKS_LIKE_A_CALL.match(text, at):
        try:
            value, at = json_at(text, at)
            calls.append(call_of(value))
        except Unreadable as error:
            calls.append(CallError(f"The tool call could not be read: {error}."))
            break
        at = _behind_gap(text, at)
    return calls, at


JSON_FORMATS["llama"] = ToolFormat(
    re.compile(r"<\|python_tag\|>"),
    _read_llama,
    written('{"name": "NAME", "parameters": ARGUMENTS}', "; "),
    start=_LOOKS_LIKE_A_CALL,
)
