"""Conversation of a trajectory for graders, judges and reward models."""

from __future__ import annotations

import re
from typing import Any

from pipeline.errors import SchemaError
from pipeline.schema import Message, Trajectory

_FIELD = re.compile(r"\{(\w+)\}")


def reply(trajectory: Trajectory, after: str | None = None) -> str:
    """The reply that is graded (:attr:`Trajectory.graded_turn`). ``after``: only what follows the last occurrence of
    that text (``</think>``); nothing where it does not occur."""
    text = trajectory.graded_turn.completion_message.content
    if after is None:
        return text
    _, found, rest = text.rpartition(after)
    return rest if found else ""


def conversation(trajectory: Trajectory) -> list[Message]:
    """Every message in order, the graded reply included; of its branch."""
    last = trajectory.graded_turn.branch
    messages: list[Message] = []
    for turn in trajectory.turns:
        if turn.branch == last:
            messages += [*turn.context_messages, turn.completion_message]
    return messages


def transcript(messages: list[Message]) -> str:
    """One conversation as text: ``role: content`` with an empty line between."""
    return "\n\n".join(f"{message.role}: {message.content}" for message in messages)


def prompt_text(trajectory: Trajectory) -> str:
    """Prompt of the last reply: the text of the user where that is all, else the conversation before it."""
    before = conversation(trajectory)[:-1]
    return before[0].content if len(before) == 1 else transcript(before)


def filled(template: str, trajectory: Trajectory) -> str:
    """``template`` with ``{prompt}``, ``{reply}``, ``{transcript}`` and names of the payload replaced, in one pass:
    what is filled in is not looked at again, and other braces stay.

    A name that the payload lacks raises :class:`SchemaError`, but ``{answer}`` reads ``(not given)``.
    """
    payload = trajectory.task.payload

    def value(match: re.Match[str]) -> str:
        name = match.group(1)
        if name == "reply":
            return reply(trajectory)
        if name == "transcript":
            return transcript(conversation(trajectory))
        if name == "prompt":
            return prompt_text(trajectory)
        if name in payload:
            return _text(payload[name])
        if name == "answer":
            return "(not given)"
        raise SchemaError(
            f"expected {{{name}}} of the template in the payload, which has {', '.join(payload) or 'none'}"
        )

    return _FIELD.sub(value, template)


def _text(value: Any) -> str:
    return " or ".join(map(str, value)) if isinstance(value, list) else str(value)
