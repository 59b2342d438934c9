"""The right answer in the payload, and the part of the reply that is compared with it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pipeline.errors import SchemaError
from pipeline.schema import Trajectory
from pipeline.scorer.conversation import reply

CHARACTERS_MAX = 1_000_000
"""Of a reply; graders look at its end only."""


def payload_value(trajectory: Trajectory, name: str) -> Any:
    """Raises :class:`SchemaError` that says what to map where the payload lacks it."""
    value = trajectory.task.payload.get(name)
    if value is None:
        raise SchemaError(
            f"expected {name!r} in the payload of task {trajectory.task.task_id}, which has "
            f"{', '.join(trajectory.task.payload) or 'nothing'}: map a column to it in tasks_from.columns"
        )
    return value


def right_answers(trajectory: Trajectory, name: str) -> list[str]:
    """One or several texts, any of which is right."""
    value = payload_value(trajectory, name)
    values = value if isinstance(value, list) else [value]
    if not values or any(v is None or isinstance(v, dict | list) for v in values):
        raise SchemaError(f"expected {name!r} as text, number or a list of them, got {value!r:.200}")
    return [str(v) for v in values]


def given(trajectory: Trajectory, after: str | None = None, between: Sequence[str] | None = None) -> str:
    """The reply; with ``after``, what follows it; with ``between: [start, end]``, what lies between the last such pair
    (nothing where there is none)."""
    text = reply(trajectory, after)[-CHARACTERS_MAX:]
    if between is None:
        return text
    if len(between) != 2:
        raise SchemaError(f"expected between as [start, end], got {between!r}")
    start, end = between
    stop = text.rfind(end)
    begin = text.rfind(start, 0, stop) if stop >= 0 else -1
    return text[begin + len(start) : stop] if begin >= 0 else ""
