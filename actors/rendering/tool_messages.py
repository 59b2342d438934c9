"""Rendering of tools for chat templates with and without support for them.

Two facts are found by rendering, not assumed: whether the template writes the schemas it is given as ``tools``, and
whether it handles the role ``tool``. Without the first, the schemas stand in the system message in the form that Hermes
models were trained on (and Qwen took over); without the second, the answers of one turn stand in one message of the
user, each inside ``<tool_response>`` tags.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from pipeline.schema import Message

SYSTEM_TEXT = """# Tools

You may call one or more functions to assist with the user query.

You are provided with function signatures within <tools></tools> XML tags:
<tools>
{schemas}
</tools>

For each function call, return a json object with function name and arguments within <tool_call></tool_call> XML tags:
<tool_call>
{{"name": <function-name>, "arguments": <args-json-object>}}
</tool_call>"""
"""The form of github.com/NousResearch/Hermes-Function-Calling, in the words of Qwen 2.5's published chat template, so
that a model which knows either meets what it knows."""

_MARK = "afterplay_mark"
_TOOL_ROLE = re.compile(r"""["'](?:tool|ipython)["']""")
ToolSchema = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class ToolStyle:
    """Tool support of one chat template."""

    schemas: bool
    """The template writes ``tools``."""
    role: bool
    """The template handles the role ``tool``."""

    def messages(self, messages: Sequence[Message], tools: Sequence[ToolSchema]) -> list[Message]:
        """``messages`` as the template can take them."""
        shown = list(messages)
        if not self.schemas:
            shown = with_calls_in_text(shown)
            shown = with_system_text(shown, tools) if tools else shown
        if not self.role and any(message.role == "tool" for message in shown):
            shown = with_answers_of_the_user(shown)
        return shown

    def tools(self, tools: Sequence[ToolSchema]) -> list[ToolSchema] | None:
        """Value of ``tools`` for the template."""
        return list(tools) if tools and self.schemas else None


def style_of(source: str, apply: Callable[[list[dict[str, Any]], list[ToolSchema] | None], str]) -> ToolStyle:
    """``source`` is the template's text, ``apply`` renders it and may raise."""
    schema = {"name": _MARK, "description": "", "parameters": {"type": "object", "properties": {}}}
    user = {"role": "user", "content": "x"}
    try:
        schemas = _MARK in apply([user], [{"type": "function", "function": schema}])
    except Exception:
        schemas = False
    return ToolStyle(schemas, _TOOL_ROLE.search(source) is not None)


def with_system_text(messages: Sequence[Message], tools: Sequence[ToolSchema]) -> list[Message]:
    """The schemas at the end of the system message, or as a system message of their own."""
    text = SYSTEM_TEXT.format(schemas="\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools))
    if messages and messages[0].role == "system":
        return [replace(messages[0], content=f"{messages[0].content}\n\n{text}"), *messages[1:]]
    return [Message("system", text), *messages]


def with_calls_in_text(messages: Sequence[Message]) -> list[Message]:
    """Calls that are stated apart (in written examples), as the text that the policy would have written."""
    return [_called(message) if message.extra.get("tool_calls") else message for message in messages]


def _called(message: Message) -> Message:
    """A message with its calls in the form that the system text asks for."""
    calls = [call["function"] for call in message.extra["tool_calls"]]
    blocks = [
        f"<tool_call>\n{json.dumps({'name': c['name'], 'arguments': c['arguments']}, ensure_ascii=False)}\n</tool_call>"
        for c in calls
    ]
    return Message(message.role, "\n".join([message.content, *blocks] if message.content else blocks))


def with_answers_of_the_user(messages: Sequence[Message]) -> list[Message]:
    """Tool answers in a row, and what the user says right after them, as one message of the user."""
    shown: list[Message] = []
    answering = False
    for message in messages:
        is_answer = message.role == "tool"
        text = f"<tool_response>\n{message.content}\n</tool_response>" if is_answer else message.content
        if answering and (is_answer or message.role == "user"):
            shown[-1] = replace(shown[-1], content=f"{shown[-1].content}\n{text}")
        else:
            shown.append(Message("user", text) if is_answer else message)
        answering = is_answer
    return shown
