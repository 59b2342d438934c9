"""A mechanism trains the groups that its name says, and the table has means over seeds with their intervals."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from benchmarks.replay_mechanisms import MECHANISMS, table


def test_each_choice_keeps_fresh_or_replayed_groups() -> None:
    groups = tuple(
        SimpleNamespace(number=i, rollouts=[SimpleNamespace(about={"replay": {}} if replayed else {})])
        for i, replayed in enumerate((False, True, False, False, True))
    )
    kept = {name: [group.number for group in mechanism.choice(groups)] for name, mechanism in MECHANISMS.items()}
    assert kept["recorded"] == kept["two epochs"] == [0, 1, 2, 3, 4]
    assert (kept["without replays"], kept["half of the fresh groups"]) == ([0, 2, 3], [0, 2])
    assert kept["replays alone"] == [1, 4]


def test_the_table_has_means_over_seeds_and_skips_updates_without_groups() -> None:
    gains = {"1": 0.01, "2": 0.03}
    found = {seed: {name: [gain, None, gain] for name in MECHANISMS} for seed, gain in gains.items()}
    found["2"]["two epochs"] = [0.05, 0.05, None]
    rows = {row[16:41].strip(): row for row in table({"groups": found})}
    assert "gain +2.000 (-10.706 to +14.706)" in rows["recorded"], "t interval of 1 and 3 points with one degree"
    assert "more than recorded +1.000" in rows["two epochs"]
    assert rows.keys() == MECHANISMS.keys()
    with pytest.raises(KeyError):
        table({"groups": {"1": {}}})
