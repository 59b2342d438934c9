"""Renderings of conversations that are made up: they show how a chat template writes tools, calls and thoughts."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from actors.tools.parsing.base import REASONING, Parsed, Thinking, ToolCall, ToolSchema, call_number, stated_call

_QUESTION, _SAID, _THOUGHT = "Probe question.", "Probe reply.", "Probe thought."
_PROPERTIES: Mapping[str, Any] = {
    name: {"type": kind, "description": "A value."}
    for name, kind in {"text": "string", "count": "integer", "ratio": "number", "flag": "boolean"}.items()
}
"""Scalars alone: some templates render no other types. The arguments have other values too."""
_NAMES = ("probe_first", "probe_second")
_TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": "A tool.",
            "parameters": {"type": "object", "properties": _PROPERTIES, "required": ["text"]},
        },
    }
    for name in _NAMES
]
_ARGUMENTS: Mapping[str, Any] = {
    "text": 'It\'s "é" & <b>\n{x}, [y]',
    "count": 7,
    "ratio": -1.5,
    "flag": True,
    "items": ["u v", "w"],
    "table": {"k": 1, "q": "r"},
    "maybe": None,
}
_CALLS = (
    (ToolCall(_NAMES[0], _ARGUMENTS),),
    (ToolCall(_NAMES[0], {"text": "a"}), ToolCall(_NAMES[1], {"text": "b", "count": 12})),
    (ToolCall(_NAMES[1], {}),),
)
_OPENING = re.compile(r"([\w=]*<[^<>\s]+>\w*|\[[A-Z_]+\])\s*$")
_CLOSING = re.compile(r"\s*(<[^<>\s]+>|\[/[A-Z_]+\])")


@dataclass(frozen=True, slots=True)
class WrittenReply:
    """A reply as a template writes it."""

    text: str
    calls: tuple[ToolCall, ...]
    """The calls in it."""
    continues: bool
    """True if it continues the prompt of a reply. A template may write earlier replies differently."""

    def is_read_by(self, parse: Callable[[str, Sequence[ToolSchema], Thinking], Parsed], thinking: Thinking) -> bool:
        """True if the parser finds exactly these calls, with these values."""
        thinking = thinking if self.continues else replace(thinking, begun="")
        return repr(_sorted(parse(self.text, _TOOLS, thinking).calls)) == repr(_sorted(self.calls))


def _sorted(calls: Sequence[Any]) -> list[Any]:
    """For a comparison in which ``True`` is not 1 and the order of arguments does not count."""
    return [(c.name, json.dumps(c.arguments, sort_keys=True)) if isinstance(c, ToolCall) else c for c in calls]


class TemplateProbe:
    """Renderings of one tokenizer's chat template."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._tools: list[dict[str, Any]] | None = _TOOLS
        self.failure = ""
        """Error of the template when it refused a conversation last."""

    @cached_property
    def prompt(self) -> str:
        """The prompt of a reply, with tools unless the template refuses them."""
        text = self._text(None)
        if not text:
            self._tools = None
            text = self._text(None)
        return text

    @property
    def tells_tools(self) -> bool:
        """The template writes the tools that it is given."""
        return _NAMES[0] in self.prompt

    @cached_property
    def thinking(self) -> Thinking:
        """The marks around thoughts, and whether a prompt ends inside of them."""
        marks = dict(Thinking().marks)
        prompt = self.prompt
        for key in REASONING:
            for more in ({"content": _SAID}, {"content": "", "tool_calls": _stated(_CALLS[1][:1], as_text=False)}):
                before, thought, after = self._text(more | {key: _THOUGHT}).rpartition(_THOUGHT)
                added = before.removeprefix(prompt)
                opening, closing = _OPENING.search(added if added.strip() else before), _CLOSING.match(after)
                if thought and opening is not None and closing is not None:
                    marks[opening[1]] = closing[1]
        end = prompt.rpartition(_QUESTION)[2]
        begun = [close for mark, close in marks.items() if end.rfind(mark) > end.rfind(close)]
        return Thinking(tuple(marks.items()), begun[-1] if begun else "")

    def replies(self) -> list[WrittenReply]:
        """Replies with one call, with two, with a call without arguments, with arguments as a dictionary or, where the
        template refuses that, as JSON text, and with a call in what is thought. None for a template that writes no
        calls."""
        found: list[WrittenReply] = []
        for calls in _CALLS:
            for as_text in (False, True):
                reply = self._reply(calls, {"content": "", "tool_calls": _stated(calls, as_text)})
                found += [reply] if reply is not None else []
        for key in REASONING if found else ():
            stated = {"content": "", "tool_calls": _stated(_CALLS[1][:1], as_text=False)}
            thought = found[0].text
            for mark in (mark for pair in self.thinking.marks for mark in pair):
                thought = thought.replace(mark, "")
            reply = self._reply(_CALLS[1][:1], stated | {key: thought})
            found += [reply] if reply is not None else []
        return found

    def _reply(self, calls: Sequence[ToolCall], message: dict[str, Any]) -> WrittenReply | None:
        prompt = self.prompt
        whole = self._text(message)
        continues = whole.startswith(prompt)
        question = whole.rfind(_QUESTION) + len(_QUESTION)
        shorter = min(len(whole), len(prompt))
        at = next((i for i in range(shorter) if prompt[i] != whole[i]), shorter)
        if not continues:  # the two part inside a mark, or behind one that opens a thought
            while at > question and whole[at - 1] not in " \n>]":
                at -= 1
            at = min([at, *(found for mark, _ in self.thinking.marks if (found := whole.find(mark, question)) >= 0)])
        text = whole[max(at, question) :].rstrip().removesuffix(self._end)
        written = tuple(call for call in calls if call.name in text)
        return WrittenReply(text, written, continues) if written else None

    @cached_property
    def _end(self) -> str:
        """The text behind a reply."""
        return self._text({"content": _SAID}).rpartition(_SAID)[2].rstrip()

    def _text(self, reply: Mapping[str, Any] | None) -> str:
        """A question and ``reply``, or the prompt of a reply; empty where the template refuses."""
        messages = [{"role": "user", "content": _QUESTION}, *([{"role": "assistant", **reply}] if reply else [])]
        options = {"tools": self._tools, "tokenize": False, "add_generation_prompt": reply is None}
        try:
            return str(self._tokenizer.apply_chat_template(messages, **options))
        except Exception as error:
            self.failure = f"{type(error).__name__}: {error}"
            return ""


def _stated(calls: Sequence[ToolCall], as_text: bool) -> list[dict[str, Any]]:
    """Calls as templates take them."""
    dump: Callable[[Any], Any] = json.dumps if as_text else dict
    return [stated_call(call_number(0, i), call.name, dump(call.arguments)) for i, call in enumerate(calls)]
