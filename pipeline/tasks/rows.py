"""A row of the data as the payload of a task: filter, columns, checks. Pure."""

from __future__ import annotations

import hashlib
import operator
import re
from collections.abc import Callable, Mapping
from typing import Any

import orjson

from pipeline.config.tasks import FilterConfig, TasksFromConfig
from pipeline.schema import ROLES
from pipeline.tasks.readers import BadRow, Row

MISSING: Any = object()
_PLACE = re.compile(r"-?[0-9]{1,9}")
_OPTIONS = orjson.OPT_SORT_KEYS | orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_NON_STR_KEYS
_COMPARE: dict[str, Callable[[Any, Any], bool]] = {
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
}
ROW_BYTES_MAX = 256 * 1024
"""Largest payload. It is part of every message about the task."""
QUESTION = ("messages", "prompt")
"""Columns of ours that make a question; the same question always falls into the same split."""


def lookup(row: Row, path: str) -> Any:
    """The value at ``path``, by its whole name or, where there is none, along its dots, where a number is a place in a
    list (-1: the last); :data:`MISSING` if there is none.

    >>> lookup({"a": {"b": 1}}, "a.b"), lookup({"a.b": 2}, "a.b"), lookup({"a": [{"b": 3}]}, "a.-1.b")
    (1, 2, 3)
    """
    if path in row:
        return row[path]
    at: Any = row
    for part in path.split("."):
        if isinstance(at, list) and _PLACE.fullmatch(part) and -len(at) <= int(part) < len(at):
            at = at[int(part)]
        elif isinstance(at, Mapping) and part in at:
            at = at[part]
        else:
            return MISSING
    return at


class Reading:
    """Reads rows by one section of the run file.

    ``question``: every row must ask something, in ``prompt`` or ``messages``.
    """

    def __init__(self, section: TasksFromConfig, question: bool = False) -> None:
        self._question = question
        self._columns = dict(section.columns)
        self._filters = section.filter

    @property
    def columns(self) -> set[str]:
        """Columns that are needed, as :func:`lookup` reads them; empty: all."""
        if not self._columns:
            return set()
        return {*self._columns.values(), *(f.column for f in self._filters)}

    def wanted(self, row: Row) -> bool:
        """True if the row meets every condition. Raises :class:`BadRow` where the values cannot be compared."""
        return all(_meets(row, condition) for condition in self._filters)

    def payload(self, row: Row) -> tuple[dict[str, Any], bytes]:
        """The payload as JSON has it, and its bytes, the same for the same content. Raises :class:`BadRow`."""
        if self._columns:
            chosen = {name: lookup(row, path) for name, path in self._columns.items()}
            missing = [f"{self._columns[name]!r}" for name, value in chosen.items() if value is MISSING]
            if missing:
                raise BadRow(f"expected the column {', '.join(missing)}, got {_names(row)}")
        else:
            chosen = dict(row)
        try:
            content = orjson.dumps(chosen, option=_OPTIONS)
        except (TypeError, ValueError) as error:
            bad = next((name for name, value in chosen.items() if not _is_json(value)), "one")
            raise BadRow(
                f"expected JSON values, got {type(chosen.get(bad)).__name__} as {bad!r} ({error}): name the columns "
                "that are used in tasks_from.columns. Images and audio cannot be trained"
            ) from error
        if len(content) > ROW_BYTES_MAX:
            raise BadRow(f"expected at most {ROW_BYTES_MAX} bytes of JSON, got {len(content)}")
        payload = orjson.loads(content)
        if self._question:
            _check_question(payload)
        return payload, content


def row_hash(content: bytes) -> int:
    """64-bit hash of a payload."""
    return int.from_bytes(hashlib.blake2b(content, digest_size=8).digest(), "little")


def question_hash(payload: Mapping[str, Any]) -> int:
    """64-bit hash of the question; of the whole payload where it has none of :data:`QUESTION`."""
    question = {name: payload[name] for name in QUESTION if name in payload} or payload
    return row_hash(b"question:" + orjson.dumps(question, option=_OPTIONS))


def _check_question(payload: Mapping[str, Any]) -> None:
    if not any(name in payload for name in QUESTION):
        raise BadRow(f"expected prompt or messages, got {_names(payload)}: map one of them in tasks_from.columns")
    for name in QUESTION:
        value = payload.get(name, MISSING)
        if value is MISSING:
            continue
        if isinstance(value, str):
            if not value.strip():
                raise BadRow(f"expected a {name} that says something, got an empty text")
        elif not (isinstance(value, list) and value and all(map(_is_message, value))):
            raise BadRow(
                f"expected {name} as text or as a list of messages with content and one of the roles "
                f"{', '.join(sorted(ROLES))}, got {value!r:.100}{_NO_PARTS if _has_parts(value) else ''}"
            )


_NO_PARTS = ". Content is text: images and audio cannot be trained"


def _has_parts(value: Any) -> bool:
    return isinstance(value, list) and any(isinstance(m, dict) and isinstance(m.get("content"), list) for m in value)


def _is_message(value: Any) -> bool:
    if not isinstance(value, dict) or not isinstance(value.get("role"), str):
        return False
    return value["role"] in ROLES and isinstance(value.get("content"), str)


def _meets(row: Row, condition: FilterConfig) -> bool:
    value, wanted, op = lookup(row, condition.column), condition.value, condition.op
    absent = value is MISSING or value is None
    if op in ("missing", "present"):
        return absent == (op == "missing")
    if value is MISSING:
        raise BadRow(f"expected the column {condition.column!r} of the filter, got {_names(row)}")
    if op in ("==", "!="):
        return bool(value == wanted) == (op == "==")
    if op in ("in", "not_in"):
        return (value in wanted) == (op == "in")
    if absent:
        return False
    try:
        return wanted in value if op == "contains" else bool(_COMPARE[op](value, wanted))
    except TypeError:
        raise BadRow(f"expected {condition.column} {op} {wanted!r} to make sense, got {value!r:.100}") from None


def _names(row: Row) -> str:
    return f"only {', '.join(map(str, row))}" if row else "an empty row"


def _is_json(value: Any) -> bool:
    try:
        orjson.dumps(value, option=_OPTIONS)
    except (TypeError, ValueError):
        return False
    return True
