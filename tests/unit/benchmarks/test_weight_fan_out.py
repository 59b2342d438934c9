"""Numbers of docs/SCALE.md on weights to many engines: those of the raw file, and their arithmetic."""

import math
from pathlib import Path

import orjson
import pytest

from learner.weights.fan_out import GROUPS_MAX, divide

ROOT = Path(__file__).resolve().parents[3]
PAGE = (ROOT / "docs" / "SCALE.md").read_text()
RAW = orjson.loads((ROOT / "benchmarks" / "results" / "weight-fan-out-2026-11-29.json").read_bytes())
ROWS = {(row["engines"], row["form"]): row for row in RAW["rows"]}


def cells(row):
    one = ROWS[1, "together"]["median_seconds"]
    held, time = 100 * row["bytes_max"] / row["bytes"], row["median_seconds"] / one
    return f"| {row['engines']}, {row['form']} | {row['passes']} | {row['copies']:.0f} | {held:.0f} % | {time:.1f} |"


@pytest.mark.parametrize("case", list(ROWS), ids=str)
def test_the_page_has_the_row_of_the_raw_file(case):
    assert cells(ROWS[case]) in PAGE


def test_one_pass_feeds_up_to_64_engines_with_bounded_copies_and_memory():
    together = [row for (_, form), row in ROWS.items() if form == "together"]
    assert {row["passes"] for row in together} == {1} and max(row["engines"] for row in together) == 64
    assert all(row["copies"] == min(row["engines"], GROUPS_MAX) and row["equal"] for row in together)
    assert len({row["bytes_max"] for row in together}) == 1


@pytest.mark.parametrize("fault", ["dies", "hangs"])
def test_a_fault_of_one_engine_costs_the_others_at_most_one_more_pass(fault):
    found = [row for (_, form), row in ROWS.items() if form == fault]
    assert found and all(row["lost"] == 1 and row["equal"] and row["passes"] <= 2 for row in found)


def test_times_of_a_70b_model_follow_from_its_bytes_and_the_groups():
    copy_seconds = 70e9 * 2 / 50e9
    groups = divide(map(str, range(48)))
    assert {len(group) for group in groups} == {12} and len(groups) == 4
    for seconds in (copy_seconds, 48 * copy_seconds, len(groups) * copy_seconds):
        assert f"{seconds:.1f} s" in PAGE
    assert math.isclose(48 * copy_seconds, 134.4)
