"""What an agent loop returned, checked: a loop may be the user's own."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from actors.loop.base import Answer, Opening
from pipeline.errors import PlugInError
from pipeline.schema import Message

AGENT_LOOP = "agent loop"


def checked_opening(opening: Any) -> Opening:
    """With messages that the plug-in cannot change any more. Raises :class:`PlugInError`."""
    if not isinstance(opening, Opening):
        raise wrong("start() to return an Opening", opening)
    if not opening.messages or not _are_messages(opening.messages):
        raise wrong("Opening.messages to be Messages, at least one", opening.messages)
    messages = tuple(replace(message, extra=dict(message.extra)) for message in opening.messages)
    return replace(opening, messages=messages, tools=tuple(opening.tools))


def checked_answer(answer: Any) -> Answer:
    """Raises :class:`PlugInError`."""
    if not isinstance(answer, Answer):
        raise wrong("answer() to return an Answer", answer)
    if not _are_messages(answer.messages):
        raise wrong("Answer.messages to be Messages", answer.messages)
    if not answer.messages and not answer.done and answer.limit is None:
        raise wrong("Answer.messages to say something unless the episode ends", answer.messages)
    if not isinstance(answer.signals, Mapping):
        raise wrong("Answer.signals to be a mapping of names to numbers", answer.signals)
    for name, value in (("reward", answer.reward), *answer.signals.items()):
        if not isinstance(value, int | float) or not math.isfinite(value):
            raise wrong(f"Answer's {name} to be a finite number", value)
    return answer


def checked_history(messages: Any) -> tuple[Message, ...]:
    """Raises :class:`PlugInError`."""
    if not isinstance(messages, list | tuple) or not messages or not _are_messages(messages):
        raise wrong("rewrite() to return Messages, at least one", messages)
    return tuple(messages)


def _are_messages(messages: Any) -> bool:
    return isinstance(messages, list | tuple) and all(
        isinstance(m, Message) and isinstance(m.role, str) and isinstance(m.content, str) for m in messages
    )


def wrong(expected: str, came: Any) -> PlugInError:
    """What a loop gave is not what it has to be."""
    return PlugInError(AGENT_LOOP, "WrongValue", f"expected {expected}, got {repr(came)[:200]}")
