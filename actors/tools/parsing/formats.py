"""Forms of calls whose arguments are JSON.

The forms are those of the chat templates that the models are published with (all of Qwen 2.5 and 3, Llama 3, Mistral,
Granite, Command R, DeepSeek, Kimi, gpt-oss and others). Three kinds:

* objects between marks, ``<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>``, one or several, or a list;
* the name apart from its arguments, ``[TOOL_CALLS]add[ARGS]{"a": 1}``;
* Llama's, an object as the whole reply, several separated by ``;``, and behind ``<|python_tag|>`` also a call of a
  built-in tool, ``search.call(query="x")``.

Forms of calls that are expressions: Python's, and Gemma's.

``[add(a=1, b=2), look(where="x")]`` is a Python list of calls, read with ``ast`` and never run. Llama 3.2 (small)
writes it as the whole reply, Llama 4 between ``<|python_start|>`` and ``<|python_end|>``, LFM2 between
``<|tool_call_start|>`` and ``<|tool_call_end|>``.

``<|tool_call>call:add{a:1,where:<|"|>x<|"|>}<tool_call|>`` is Gemma 4's: JSON without quotes around keys, and with
marks in place of the quotes around text.
"""

from __future__ import annotations

import ast
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
    schema_in,
    shown,
    skip_space,
)

CHARACTERS_MAX = 100_000

_ENDS = ("<|python_end|>", "<|tool_call_end|>")

_JSON_NAMES = {"true": True, "false": False, "null": None}

_OPENING = re.compile(r"=\s{0,8}(['\"])")

_CLOSING = re.compile(r"['\"](?=\s{0,8}(?:,\s{0,8}\w+\s{0,8}=|\)\s{0,8}(?:,\s{0,8}[\w.]+\(|\]\s{0,8}$)))")


def _read_pythonic(text: str, at: int, tools: Sequence[ToolSchema]) -> tuple[list[ToolCall | CallError], int]:
    end = min((found for mark in _ENDS if (found := text.find(mark, at)) >= 0), default=len(text))
    body = text[at:end].strip()
    try:
        return calls_in(body, tools), end
    except Unreadable:
        return calls_in(_quoted(body), tools), end


def _quoted(text: str) -> str:
    """Arguments that stand between two quotes as they are, as some templates of LFM2 write text, made Python's: a text
    ends at a quote behind which the next argument, the next call or the end of the list comes."""
    parts: list[str] = []
    at = 0
    closing = iter([*_CLOSING.finditer(text)])
    close = next(closing, None)
    while (opening := _OPENING.search(text, at)) is not None:
        while close is not None and (close.start() < opening.end() or close[0] != opening[1]):
            close = next(closing, None)
        if close is None:
            break
        parts += [text[at : opening.start(1)], repr(text[opening.end() : close.start()])]
        at = close.end()
    return "".join([*parts, text[at:]])


def calls_in(text: str, tools: Sequence[ToolSchema] = ()) -> list[ToolCall | CallError]:
    """The calls of a list expression. Raises :class:`Unreadable` when it is none."""
    if len(text) > CHARACTERS_MAX:
        raise Unreadable(f"expected at most {CHARACTERS_MAX} characters, got {len(text)}")
    try:
        tree = ast.parse(text, mode="eval").body
    except (SyntaxError, ValueError, MemoryError, RecursionError) as error:
        raise Unreadable(f"not a Python list of calls: {type(error).__name__}") from None
    if not isinstance(tree, ast.List) or not tree.elts:
        raise Unreadable("expected a list of calls like [name(argument=1)]")
    return [_one(node, tools) for node in tree.elts]


def render_pythonic(calls: Sequence[ToolCall]) -> str:
    """Arguments by name."""
    shown = (f"{c.name}({', '.join(f'{key}={value!r}' for key, value in c.arguments.items())})" for c in calls)
    return f"[{', '.join(shown)}]"


def _one(node: ast.expr, tools: Sequence[ToolSchema]) -> ToolCall | CallError:
    try:
        if not isinstance(node, ast.Call):
            raise Unreadable("expected a call like name(argument=1)")
        name = _name(node.func)
        names = _order(tools, name, len(node.args))
        arguments: dict[str, Any] = dict(zip(names, map(plain_value, node.args), strict=False))
        for keyword in node.keywords:
            if keyword.arg is None:
                raise Unreadable("expected arguments by name, got **")
            arguments[keyword.arg] = plain_value(keyword.value)
        return call(name, arguments)
    except RecursionError:
        return CallError.of("it is nested too deeply")
    except Unreadable as error:
        return CallError.of(error)


def _order(tools: Sequence[ToolSchema], name: str, n: int) -> list[str]:
    """Names of the first ``n`` parameters, for arguments without a name."""
    names = list((schema_in(tools, name) or {}).get("properties", {}))
    if n > len(names):
        raise Unreadable(f"expected the arguments of {name} by name")
    return names[:n]


def _name(node: ast.expr) -> str:
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        return f"{_name(node.value)}.{node.attr}"
    raise Unreadable("expected the name of a tool before the parenthesis")


def plain_value(node: ast.expr) -> Any:
    """A JSON value. Raises :class:`Unreadable` for anything that would have to be computed."""
    if isinstance(node, ast.Constant) and (node.value is None or isinstance(node.value, str | int | float | bool)):
        return node.value
    if isinstance(node, ast.List | ast.Tuple):
        return [plain_value(item) for item in node.elts]
    if isinstance(node, ast.Dict):
        keys = [plain_value(key) if key is not None else None for key in node.keys]
        if not all(isinstance(key, str) for key in keys):
            raise Unreadable("expected text as keys of a dictionary")
        return dict(zip(keys, map(plain_value, node.values), strict=True))
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub | ast.UAdd):
        value = plain_value(node.operand)
        if isinstance(value, int | float) and not isinstance(value, bool):
            return -value if isinstance(node.op, ast.USub) else value
    if isinstance(node, ast.Name) and node.id in _JSON_NAMES:
        return _JSON_NAMES[node.id]
    raise Unreadable("expected plain values as arguments (numbers, text, lists, dictionaries)")


PYTHONIC = ToolFormat(
    re.compile(r"<\|python_start\|>|<\|tool_call_start\|>"),
    _read_pythonic,
    render_pythonic,
    start=re.compile(r"\s*\[\s*[A-Za-z_][\w.]*\s*\("),
)

_KEY = re.compile(r'\s*(?:<\|"\|>(.*?)<\|"\|>|"([^"]*)"|([^\s:{}\[\],]+))\s*:', re.S)

_QUOTE = '<|"|>'

_WORD = re.compile(r"[^,\]}\s]+")

_WORDS = _JSON_NAMES | {"True": True, "False": False, "None": None}

_GEMMA_NAME = re.compile(r"\s*(?:call:)?\s*([\w.\-]+)\s*(?=\{)")

DEPTH_MAX = 100


def _read_gemma(text: str, at: int, tools: Sequence[ToolSchema]) -> tuple[list[ToolCall | CallError], int]:
    found = _GEMMA_NAME.match(text, at)
    if found is None:
        raise Unreadable(f"expected call:name{{...}}, got {shown(text[at : at + 80])}")
    if text.startswith("{{", found.end()):  # a template that was given the arguments as JSON text
        arguments, end = json_at(text, found.end() + 1)
        end = text.find("}", end) + 1 or end
    else:
        arguments, end = _gemma_value(text, found.end(), 0)
    return [call(found[1], arguments)], end


def _gemma_value(text: str, at: int, depth: int) -> tuple[Any, int]:
    at = skip_space(text, at)
    if depth > DEPTH_MAX:
        raise Unreadable("it is nested too deeply")
    if text.startswith(_QUOTE, at):
        end = text.find(_QUOTE, at + len(_QUOTE))
        if end < 0:
            raise Unreadable(f"expected {_QUOTE} after a text")
        return text[at + len(_QUOTE) : end], end + len(_QUOTE)
    if text[at : at + 1] not in ("{", "["):
        word = _WORD.match(text, at)
        if word is not None and word[0] in _WORDS:
            return _WORDS[word[0]], word.end()
        return json_at(text, at)
    closing = "}" if text[at] == "{" else "]"
    table: dict[str, Any] = {}
    items: list[Any] = []
    at = skip_space(text, at + 1)
    while not text.startswith(closing, at):
        if table or items:
            if not text.startswith(",", at):
                raise Unreadable(f"expected , or {closing}, got {shown(text[at : at + 80])}")
            at += 1
        if closing == "}":
            key = _KEY.match(text, at)
            if key is None:
                raise Unreadable(f"expected a key and :, got {shown(text[at : at + 80])}")
            name = next(group for group in key.groups() if group is not None)
            table[name], at = _gemma_value(text, key.end(), depth + 1)
        else:
            item, at = _gemma_value(text, at, depth + 1)
            items.append(item)
        at = skip_space(text, at)
    return (table if closing == "}" else items), at + 1


def render_gemma(calls: Sequence[ToolCall]) -> str:
    """Calls as Gemma 4's template writes them, with quotes around odd keys."""
    return "".join(f"<|tool_call>call:{c.name}{_gemma_text(dict(c.arguments))}<tool_call|>" for c in calls)


def _gemma_text(value: Any) -> str:
    if isinstance(value, str):
        return f"{_QUOTE}{value}{_QUOTE}"
    if isinstance(value, dict):
        pairs = (
            (key if re.fullmatch(r"[\w\-]+", key) else f"{_QUOTE}{key}{_QUOTE}", _gemma_text(item))
            for key, item in value.items()
        )
        return "{" + ",".join(f"{key}:{text}" for key, text in pairs) + "}"
    if isinstance(value, list):
        return "[" + ",".join(map(_gemma_text, value)) + "]"
    return json.dumps(value)


GEMMA = ToolFormat(re.compile(r"<\|tool_call>"), _read_gemma, render_gemma, close="<tool_call|>")

_GAP = re.compile(r"[ \t\r\n,;]*")

_OBJECT = '{"name": "NAME", "arguments": ARGUMENTS}'


def written(each: str, between: str = "", before: str = "", after: str = "") -> Callable[[Sequence[ToolCall]], str]:
    """Writes calls: ``each`` with NAME, INDEX and ARGUMENTS filled in, in a frame of ``before`` and ``after``."""

    def one(index: int, call: ToolCall) -> str:
        arguments = json.dumps(call.arguments, ensure_ascii=False, default=dict)
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
        return CallError.of(error)


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
            calls.append(CallError.of(error))
            break
        at = _behind_gap(text, at)
    return calls, at


JSON_FORMATS["llama"] = ToolFormat(
    re.compile(r"<\|python_tag\|>"),
    _read_llama,
    written('{"name": "NAME", "parameters": ARGUMENTS}', "; "),
    start=_LOOKS_LIKE_A_CALL,
)
