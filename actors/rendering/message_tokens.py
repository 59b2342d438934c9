"""Conversations whose tokens are messages, for endpoints that take messages and give back text.

The same agent loops and the same recorder run on them: a prompt is a list of numbers, one for each message (the first
one, perhaps, for the tools), a reply is one number, and a table says what each number is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import orjson

from actors.rendering.renderer import RENDERER, Completed, Conversation
from actors.rendering.tool_messages import ToolSchema
from pipeline.errors import PlugInError
from pipeline.schema import Message

FIRST = 2**30
"""Numbers of messages begin here: token ids of a real tokenizer, which a program may send, are smaller."""
CHARACTERS_PER_TOKEN = 4
"""For limits on the length of a text in tokens."""


class MessageTokens:
    """Replaces :class:`Renderer` where the chat template is on the other side."""

    template = "<tool_call>"
    """Tool calls are read in the forms of Hermes and Qwen."""
    tokenizer = None
    end_ids = ()

    def __init__(self) -> None:
        self._known: list[Message | tuple[ToolSchema, ...]] = []
        self._numbers: dict[bytes, int] = {}

    def start(
        self,
        messages: Sequence[Message],
        tools: Sequence[ToolSchema] = (),
        sampled: Sequence[Completed] = (),
        instead: Sequence[Message] | None = None,
    ) -> Conversation:
        """The first prompt."""
        ids = (*([self._number(tuple(tools))] if tools else []), *map(self._number, messages))
        return Conversation(tuple(messages), "", ids, ids, 0, tuple(tools))

    def restart(self, conversation: Conversation, messages: Sequence[Message]) -> Conversation:
        """The next branch, which begins with a rewritten history."""
        return replace(self.start(messages, conversation.tools), branch=conversation.branch + 1)

    def extend(
        self,
        conversation: Conversation,
        completion_ids: Sequence[int],
        completed: Completed,
        new: Sequence[Message],
        *,
        parsed_reply: Message | None = None,
        append: bool = False,
    ) -> Conversation:
        """The next prompt: the one before, the reply as it came, and ``new``."""
        added = tuple(map(self._number, new))
        messages = (*conversation.messages, Message("assistant", completed.text), *new)
        ids = (*conversation.prompt_ids, *completion_ids, *added)
        return replace(conversation, messages=messages, prompt_ids=ids, added_ids=added)

    def reply(self, text: str) -> int:
        """A new number for a reply."""
        self._known.append(Message("assistant", text))
        return FIRST + len(self._known) - 1

    def completed(self, completion_ids: Sequence[int]) -> Completed:
        """The reply with this number."""
        return Completed(self.decode_ids(completion_ids), None)

    def prompt(self, ids: Sequence[int]) -> tuple[list[Message], tuple[ToolSchema, ...]]:
        """Messages and tools of a prompt. Raises :class:`PlugInError` for a number that stands for nothing."""
        parts = [self._part(number) for number in ids]
        tools = tuple(tool for part in parts if isinstance(part, tuple) for tool in part)
        return [part for part in parts if isinstance(part, Message)], tools

    def encode_text(self, text: str) -> tuple[int, ...]:
        """A text alone, in pieces of about a token, for measuring and cutting."""
        n = CHARACTERS_PER_TOKEN
        return tuple(self._number(Message("", text[at : at + n])) for at in range(0, len(text), n))

    def decode_ids(self, ids: Sequence[int]) -> str:
        """The text of messages, one after another."""
        return "".join(part.content for part in map(self._part, ids) if isinstance(part, Message))

    def token_bytes(self, number: int) -> bytes:
        return self.decode_ids([number]).encode("utf-8", "replace")

    def _part(self, number: int) -> Message | tuple[ToolSchema, ...]:
        if not FIRST <= number < FIRST + len(self._known):
            raise PlugInError(RENDERER, "TokenIds", "the program sends token ids, and the endpoint takes messages")
        return self._known[number - FIRST]

    def _number(self, part: Message | tuple[ToolSchema, ...]) -> int:
        stated = part.as_template_input() if isinstance(part, Message) else list(part)
        key = orjson.dumps(stated, default=str, option=orjson.OPT_NON_STR_KEYS)
        number = self._numbers.get(key)
        if number is None:
            self._known.append(part)
            number = self._numbers[key] = FIRST + len(self._known) - 1
        return number
