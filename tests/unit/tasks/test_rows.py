"""Payloads made of rows: filters compare and never run anything, columns are mapped, bad rows give a reason."""

from __future__ import annotations

import datetime as dt
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.config.tasks import FilterConfig, TasksFromConfig
from pipeline.schema import ROLES
from pipeline.tasks.readers import BadRow
from pipeline.tasks.rows import MISSING, Reading, lookup, question_hash


def reading(question: bool = True, **section: Any) -> Reading:
    return Reading(TasksFromConfig.model_validate({"kind": "jsonl", "path": "x", **section}), question)


ROW = {"q": "1 + 1?", "level": 3, "tags": ["a", "b"], "extra": {"split": "dev"}, "nothing": None}


@pytest.mark.parametrize(
    ("column", "op", "value", "wanted"),
    [
        ("level", "==", 3, True), ("level", "!=", 3, False), ("level", ">=", 3, True), ("level", "<", 3, False),
        ("level", "in", [1, 3], True), ("level", "not_in", [1, 3], False), ("tags", "contains", "b", True),
        ("q", "contains", "+", True), ("extra.split", "==", "dev", True), ("nothing", "missing", None, True),
        ("nowhere", "missing", None, True), ("q", "present", None, True), ("nothing", ">", 1, False),
        ("nothing", "==", None, True), ("level", "<=", 2, False), ("level", ">", 2, True),
    ],
)  # fmt: skip
def test_a_condition_is_met_or_not(column: str, op: str, value: Any, wanted: bool) -> None:
    condition = FilterConfig.model_validate({"column": column, "op": op, "value": value})
    assert reading(filter=[condition.model_dump()]).wanted(ROW) is wanted


@pytest.mark.parametrize(
    ("condition", "says"),
    [
        ({"column": "level", "op": "<", "value": "many"}, "to make sense, got 3"),
        ({"column": "nowhere", "value": 1}, "expected the column 'nowhere' of the filter, got only q, level"),
    ],
)
def test_a_condition_that_cannot_be_tested_is_a_bad_row(condition: dict[str, Any], says: str) -> None:
    with pytest.raises(BadRow, match=says):
        reading(filter=[condition]).wanted(ROW)


def test_columns_are_renamed_and_others_left_out() -> None:
    payload, _ = reading(columns={"prompt": "q", "split": "extra.split"}).payload(ROW)
    assert payload == {"prompt": "1 + 1?", "split": "dev"}
    assert reading(columns={"prompt": "q", "split": "extra.split"}).columns == {"q", "extra.split"}


@pytest.mark.parametrize(
    ("path", "value"),
    [("said.0.value", "hi"), ("said.-1.value", "ho"), ("said.2.value", None), ("said.x", None), ("said.0.from", None)],
)
def test_a_number_in_a_path_is_a_place_in_a_list(path: str, value: Any) -> None:
    row = {"said": [{"value": "hi"}, {"value": "ho"}]}
    assert (None if lookup(row, path) is MISSING else lookup(row, path)) == value


@pytest.mark.parametrize(
    ("row", "says"),
    [
        ({"question": "?"}, "expected the column 'q', got only question"),
        ({"q": ""}, "an empty text"),
        ({"q": 3}, "as text or as a list of messages"),
        ({"q": [{"role": "user"}]}, "as text or as a list of messages"),
        *[({"q": [{"role": role, "content": "x"}]}, "one of the roles .*, user, got")
          for role in ("human", "gpt", "User", "", 3, ["user"], None)],
        ({"q": b"\x00"}, "expected JSON values, got bytes as 'prompt'.*Images and audio cannot be trained"),
        ({"q": [{"role": "user", "content": [{"type": "image_url"}]}]}, "Content is text: images and audio cannot"),
        ({"q": "x" * 300_000}, "at most 262144 bytes"),
    ],
)  # fmt: skip
def test_a_bad_row_says_what_was_expected_and_what_came(row: dict[str, Any], says: str) -> None:
    with pytest.raises(BadRow, match=says):
        reading(columns={"prompt": "q"}).payload(row)


@pytest.mark.parametrize("role", sorted(ROLES))
def test_messages_of_known_roles_are_taken(role: str) -> None:
    payload, _ = reading().payload({"messages": [{"role": role, "content": "x"}]})
    assert payload == {"messages": [{"role": role, "content": "x"}]}


def test_values_of_arrow_become_json() -> None:
    payload, _ = reading(question=False).payload({"day": dt.date(2026, 1, 2), "n": float("nan"), "t": (1, 2)})
    assert payload == {"day": "2026-01-02", "n": None, "t": [1, 2]}


json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.text(max_size=5),
    lambda v: st.lists(v, max_size=3) | st.dictionaries(st.text(max_size=4), v, max_size=3),
    max_leaves=8,
)


@given(st.dictionaries(st.text(min_size=1, max_size=4), json_values, max_size=4))
def test_the_order_of_columns_changes_neither_payload_nor_hash(row: dict[str, Any]) -> None:
    plain = reading(question=False)
    backwards = dict(reversed(row.items()))
    assert plain.payload(row) == plain.payload(backwards)
    assert question_hash(plain.payload(row)[0]) == question_hash(plain.payload(backwards)[0])


def test_one_question_with_two_answers_is_one_question() -> None:
    assert question_hash({"prompt": "?", "answer": 1}) == question_hash({"prompt": "?", "answer": 2})
