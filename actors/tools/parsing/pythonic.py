"""``[add(a=1, b=2), look(where="x")]``: a Python list of calls as the whole reply, read with ``ast`` and never run.

Llama 3.2 (small) and Llama 4 write it, the latter between ``<|python_start|>`` and ``<|python_end|>``.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Sequence
from typing import Any

from actors.tools.parsing.base import CALLS_MAX, CallError, Parsed, ToolCall, ToolFormat, ToolSchema, Unreadable, call

CHARACTERS_MAX = 100_000
_START, _END = "<|python_start|>", "<|python_end|>"
_LIST_OF_CALLS = re.compile(r"\s*\[\s*[A-Za-z_][\w.]*\s*\(")
_JSON_NAMES = {"true": True, "false": False, "null": None}


def parse_pythonic(text: str, tools: Sequence[ToolSchema] = ()) -> Parsed:
    """A reply that does not begin like a list of calls is text."""
    content, tag, body = text.partition(_START)
    if tag:
        body = body.partition(_END)[0]
    else:
        content, body = "", text
    if not _LIST_OF_CALLS.match(body):
        return Parsed(text)
    try:
        return Parsed(content.rstrip(), tuple(calls_in(body.strip(), tools)[:CALLS_MAX]))
    except Unreadable as error:
        return Parsed(content.rstrip(), (CallError(f"The tool calls could not be read: {error}."),))


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
        arguments: dict[str, Any] = dict(zip(_order(tools, name, len(node.args)), map(_value, node.args), strict=False))
        for keyword in node.keywords:
            if keyword.arg is None:
                raise Unreadable("expected arguments by name, got **")
            arguments[keyword.arg] = _value(keyword.value)
        return call(name, arguments)
    except RecursionError:
        return CallError("The tool call could not be read: it is nested too deeply.")
    except Unreadable as error:
        return CallError(f"The tool call could not be read: {error}.")


def _order(tools: Sequence[ToolSchema], name: str, n: int) -> list[str]:
    """Names of the first ``n`` parameters, for arguments without a name."""
    if n == 0:
        return []
    for tool in tools:
        function = tool.get("function", {})
        if function.get("name") == name:
            names = list(function.get("parameters", {}).get("properties", {}))
            if n <= len(names):
                return names[:n]
    raise Unreadable(f"expected the arguments of {name} by name")


def _name(node: ast.expr) -> str:
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        return f"{_name(node.value)}.{node.attr}"
    raise Unreadable("expected the name of a tool before the parenthesis")


def _value(node: ast.expr) -> Any:
    """A JSON value. Raises :class:`Unreadable` for anything that would have to be computed."""
    if isinstance(node, ast.Constant) and (node.value is None or isinstance(node.value, str | int | float | bool)):
        return node.value
    if isinstance(node, ast.List | ast.Tuple):
        return [_value(item) for item in node.elts]
    if isinstance(node, ast.Dict):
        keys = [_value(key) if key is not None else None for key in node.keys]
        if not all(isinstance(key, str) for key in keys):
            raise Unreadable("expected text as keys of a dictionary")
        return dict(zip(keys, map(_value, node.values), strict=True))
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub | ast.UAdd):
        value = _value(node.operand)
        if isinstance(value, int | float) and not isinstance(value, bool):
            return -value if isinstance(node.op, ast.USub) else value
    if isinstance(node, ast.Name) and node.id in _JSON_NAMES:
        return _JSON_NAMES[node.id]
    raise Unreadable("expected plain values as arguments (numbers, text, lists, dictionaries)")


PYTHONIC = ToolFormat(parse_pythonic, render_pythonic)
