"""A reply of the policy as a program gets it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from actors.engine.base import Generation
from actors.gateway.conversation import Key, key_of
from actors.tools.parsing.base import Thinking
from pipeline.schema import Message


@dataclass(frozen=True, slots=True)
class ChatReply:
    """Its parts."""

    content: str
    """Its text, with what the policy thinks and without the calls."""
    tool_calls: tuple[Mapping[str, Any], ...]
    """``{"id", "type", "function": {"name", "arguments"}}`` with arguments as objects."""
    finish_reason: str
    """``stop``, ``length`` or ``tool_calls``."""
    stop: str = ""
    """The stop text of the program that the reply is truncated before."""
    thought: str = ""
    """The thought with which the content begins, where that is closed."""
    thought_end: int = 0
    """Characters of the content that are the thought and its marks."""

    @property
    def said(self) -> str:
        """The content behind the thought."""
        return self.content[self.thought_end :]

    @property
    def message(self) -> Message:
        """The reply as a message, with its calls apart."""
        calls = {"tool_calls": [dict(call) for call in self.tool_calls]} if self.tool_calls else {}
        return Message("assistant", self.content, calls)

    @property
    def key(self) -> Key:
        """Key of the reply where a later call states it."""
        return key_of("assistant", self.content, self.tool_calls)


@dataclass(frozen=True, slots=True, eq=False)
class Choice:
    """One reply to a call, or its beginning while it is sampled."""

    reply: ChatReply
    generation: Generation


def thought_of(prompt: str, content: str) -> tuple[str, int]:
    """The closed thought with which ``content`` begins, and where its mark ends; ("", 0) where there is none. The text
    of the prompt, without white space at its end, may open it.

    >>> thought_of("", "<think>a</think>b"), thought_of("<think>", "a</think>b"), thought_of("", "<think>a")
    (('a', 16), ('a', 9), ('', 0))
    """
    for opening, closing in Thinking().marks:
        begun, end = prompt.endswith(opening), content.find(closing)
        start = 0 if begun else len(opening)
        if end >= start and (begun or content.startswith(opening)):
            return content[start:end], end + len(closing)
    return "", 0
