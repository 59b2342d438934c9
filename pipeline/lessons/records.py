"""The words that memory, stage and actor share, and how a trajectory reads without the lessons in its prompt."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from pipeline.errors import WireError
from pipeline.schema import Message, Trajectory

QUERY_CHARACTERS_MAX = 4096
"""Of the task text that a search is made with."""


@dataclass(frozen=True, slots=True)
class Lesson:
    """A short text that may be put into a prompt."""

    lesson_id: str
    text: str


def encode_lessons(order_id: str, lessons: list[Lesson]) -> dict[str, Any]:
    """Header of a LESSONS message."""
    return {"order_id": order_id, "lessons": [{"id": lesson.lesson_id, "text": lesson.text} for lesson in lessons]}


def decode_lessons(header: Mapping[str, Any]) -> list[Lesson]:
    """Raises :class:`WireError`."""
    try:
        return [Lesson(str(lesson["id"]), str(lesson["text"])) for lesson in header["lessons"]]
    except (KeyError, TypeError) as error:
        raise WireError(f"LESSONS header is not understood: {type(error).__name__}: {error}") from error


def first_user(messages: tuple[Message, ...]) -> int | None:
    """Index of the first message of the user; None where there is none."""
    return next((index for index, message in enumerate(messages) if message.role == "user"), None)


def plain_conversation(trajectory: Trajectory) -> list[Message]:
    """Every message of the last branch of a trajectory, as it reads without lessons; the last one is a completion."""
    messages: list[Message] = []
    branch = 0
    for turn in trajectory.turns:
        if turn.branch != branch:
            messages, branch = [], turn.branch
        messages += [*turn.context_messages, turn.completion_message]
    user = first_user(tuple(messages))
    if trajectory.guidance is not None and user is not None:
        messages[user] = replace(messages[user], content=trajectory.guidance.query)
    return messages


def task_text(trajectory: Trajectory) -> str:
    """What the first message of the user asks for, without lessons; empty where there is none."""
    messages = plain_conversation(trajectory)
    user = first_user(tuple(messages))
    return "" if user is None else messages[user].content[:QUERY_CHARACTERS_MAX]
