"""The house grows by decision: keys, lines and rooms against tests/size.txt."""

from __future__ import annotations

from scripts.size import TRAJECTORY, grown, measured, written


def test_nothing_is_larger_than_the_table_in_the_repository() -> None:
    now = measured()
    print("\n".join(f"{number:7,}  {name}" for name, number in now.items()))
    assert grown(written(), now) == [], "if that is worth it, run scripts/size.py --write and commit tests/size.txt too"


def test_the_table_names_only_what_is_there() -> None:
    assert set(written()) == {TRAJECTORY, *measured()}


def test_a_new_room_and_a_raised_number_are_noticed() -> None:
    assert grown({"lines": 2}, {"lines": 2}) == []
    assert grown({"lines": 2}, {"lines": 3, "lines of new/": 1}) == [
        "lines: at most 2 by tests/size.txt, 3 now",
        "lines of new/: 1, new",
    ]
