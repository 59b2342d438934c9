"""Forms of a conversation for chat templates with and without support for tools, system messages and plain text.

What a template takes is found by rendering, not assumed (:class:`actors.rendering.renderer.Renderer`). Where it does
not write the schemas it is given as ``tools``, they stand in the system message in the form that Hermes models were
trained on (and Qwen took over). Where it leaves out the answers of tools, those of one turn stand in one message of the
user, each inside ``<tool_response>`` tags. Where it leaves out the calls of a written reply, or the content beside
them, these stand in messages of their own or as the text that the policy would write. Where it has no system message,
its text begins the next message of the user.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from actors.rendering.said import SYSTEM_ROLES, arguments_of
from actors.tools.parsing.base import ToolCall, ToolFormat, ToolSchema
from actors.tools.parsing.formats import HERMES
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

_TOOL_ROLE = re.compile(r"""["'](?:tool|ipython)["']""")
CallsAsText = Callable[[Message], Message]


@dataclass(frozen=True, slots=True)
class Form:
    """One form in which a conversation is given to a chat template."""

    calls: Literal["stated", "apart", "text"] = "stated"
    """``apart``: content and each call in a message of its own, the call's answer right after it."""
    arguments: Literal["object", "text"] = "object"
    """Arguments of stated calls."""
    answers: bool = True
    """Answers of tools have the role ``tool``; otherwise they are the user's."""
    system: bool = True
    """System messages have their role; otherwise they begin the next message of the user."""
    alternating: bool = False
    """The user never speaks twice in a row."""
    parts: bool = False
    """Contents are lists of parts, for templates of models that take images."""

    def messages(self, messages: Sequence[Message], as_text: CallsAsText) -> list[dict[str, Any]]:
        """``messages`` as the template can take them. ``as_text`` puts the calls of a message into its content."""
        shown: Sequence[Message] = messages
        called = answered = False
        for message in messages:
            if message.extra and message.extra.get("tool_calls"):
                called = True
            answered |= message.role == "tool"
        if called and self.calls == "text":
            shown = [as_text(message) for message in shown]
        elif called:
            shown = [self._stated(message) for message in shown]
            shown = with_calls_apart(shown) if self.calls == "apart" else shown
        if answered and not self.answers:
            shown = with_answers_of_the_user(shown)
        if not self.system:
            shown = with_system_of_the_user(shown)
        if self.alternating:
            shown = with_alternating_user(shown)
        given = [message.as_template_input() for message in shown]
        if self.parts:
            given = [message | {"content": [{"type": "text", "text": message["content"]}]} for message in given]
        return given

    def _stated(self, message: Message) -> Message:
        calls = message.extra.get("tool_calls")
        if not calls:
            return message
        stated = []
        for call in calls:
            function = call.get("function", call)
            arguments = arguments_of(function.get("arguments"))
            if self.arguments == "text" and not isinstance(arguments, str):
                arguments = json.dumps(arguments, ensure_ascii=False)
            stated.append({**call, "function": {**function, "arguments": arguments}})
        return replace(message, extra={**message.extra, "tool_calls": stated})


def forms_of_tools(source: str, schemas: bool, base: Form) -> list[Form]:
    """Forms of a conversation with calls or answers of tools, in the order in which they are tried. ``source`` is the
    template's text; ``schemas``: it writes ``tools``. A template that knows nothing of tools may write any role, but
    its model was trained with none of a tool."""
    calls: list[Form] = [replace(base, calls="text")]
    if schemas:
        stated = [
            replace(base, calls=how, arguments=form) for how in ("stated", "apart") for form in ("object", "text")
        ]
        calls = [*stated, *calls]
    answers = [True, False] if schemas or _TOOL_ROLE.search(source) is not None else [False]
    return [replace(form, answers=role) for role in answers for form in calls]


def described(tools: Sequence[ToolSchema]) -> list[ToolSchema]:
    """``tools`` whose descriptions state the parameters, for templates that leave out a part of a JSON schema."""

    def one(tool: ToolSchema) -> ToolSchema:
        function = tool["function"]
        stated = json.dumps(function.get("parameters") or {}, ensure_ascii=False)
        text = f"{function.get('description') or ''}\nParameters: {stated}".lstrip()
        return {**tool, "function": {**function, "description": text}}

    return [one(tool) for tool in tools]


def with_system_text(messages: Sequence[Message], tools: Sequence[ToolSchema]) -> list[Message]:
    """The schemas at the end of the system message, or as a system message of their own."""
    text = SYSTEM_TEXT.format(schemas="\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools))
    if messages and messages[0].role == "system":
        return [replace(messages[0], content=f"{messages[0].content}\n\n{text}"), *messages[1:]]
    return [Message("system", text), *messages]


def with_calls_in_text(message: Message, form: ToolFormat = HERMES) -> Message:
    """A message whose calls are stated apart (in written examples), with the text that the policy would write."""
    if not message.extra.get("tool_calls"):
        return message
    functions = [call.get("function", call) for call in message.extra["tool_calls"]]
    text = form.render([ToolCall(str(f["name"]), arguments_of(f.get("arguments"))) for f in functions])
    rest = {key: value for key, value in message.extra.items() if key != "tool_calls"}
    return Message(message.role, f"{message.content}\n{text}" if message.content else text, rest)


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


def with_calls_apart(messages: Sequence[Message]) -> list[Message]:
    """The content beside calls as a reply of its own, and each call right before its answer, whatever their order."""
    shown: list[Message] = []
    at = 0
    while at < len(messages):
        message = messages[at]
        at += 1
        calls = message.extra.get("tool_calls") or ()
        if not calls or (len(calls) == 1 and not message.content):
            shown.append(message)
            continue
        if message.content:
            rest = {key: value for key, value in message.extra.items() if key != "tool_calls"}
            shown.append(Message(message.role, message.content, rest))
        end = next((i for i in range(at, len(messages)) if messages[i].role != "tool"), len(messages))
        answers, at = messages[at:end], end
        for call in calls:
            shown.append(Message(message.role, "", {"tool_calls": [call]}))
            others = {other.get("id") for other in calls} - {call.get("id")}
            own = next((a for a in answers if a.extra.get("tool_call_id") not in others), None)
            if own is not None:
                shown.append(own)
                answers = [answer for answer in answers if answer is not own]
        shown += answers
    return shown


def with_system_of_the_user(messages: Sequence[Message]) -> list[Message]:
    """System messages at the beginning of the user's next message, or as a message of the user."""
    shown: list[Message] = []
    held: list[str] = []
    for message in messages:
        if message.role in SYSTEM_ROLES:
            held.append(message.content)
            continue
        if held and message.role == "user":
            message = replace(message, content="\n\n".join([*held, message.content]))
        elif held:
            shown.append(Message("user", "\n\n".join(held)))
        shown.append(message)
        held = []
    return [*shown, Message("user", "\n\n".join(held))] if held else shown


def with_alternating_user(messages: Sequence[Message]) -> list[Message]:
    """Messages of the user in a row as one."""
    shown: list[Message] = []
    for message in messages:
        if shown and message.role == shown[-1].role == "user":
            shown[-1] = replace(shown[-1], content=f"{shown[-1].content}\n\n{message.content}")
        else:
            shown.append(message)
    return shown
