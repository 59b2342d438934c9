"""The pure parts of ``afterplay chaos``: its schedule, the damage that it does, and how it reads the audit."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.store.ledger import Ledger
from pipeline.supervisor.chaos import LedgerAudit, Processes, damaged, schedule, useful_time


def test_a_seed_gives_one_schedule() -> None:
    assert schedule(3, 600, 10, 10) == schedule(3, 600, 10, 10) != schedule(4, 600, 10, 10)


def test_faults_come_in_order_within_the_time_and_at_the_wanted_rate() -> None:
    faults = schedule(1, 36_000, 10, 10)
    assert faults == sorted(faults, key=lambda fault: fault.at)
    assert faults[0].at > 0 and faults[-1].at < 36_000
    assert 3_400 < len(faults) < 3_800
    assert all(0 <= fault.draw < 1 and 0.5 <= fault.seconds <= 20 for fault in faults)


@given(st.binary(min_size=1, max_size=20_000).filter(any), st.floats(0, 1, exclude_max=True))
def test_damage_never_leaves_a_file_longer_and_is_the_same_for_the_same_draw(data: bytes, draw: float) -> None:
    assert damaged(data, draw) == damaged(data, draw)
    came, what = damaged(data, draw)
    assert len(came) <= len(data) and re.search(r" byte \d+", what)
    if draw < 1 / 3 or draw >= 2 / 3:
        assert came != data


def test_time_without_anything_new_begins_with_the_first_update_and_ends_with_a_trajectory_or_another() -> None:
    audit = LedgerAudit()
    for now, received, steps in (
        (90, 0, 0),
        (180, 5, 0),
        (181, 5, 1),
        (184, 9, 1),
        (190, 9, 1),
        (191, 9, 2),
        (193, 9, 2),
    ):
        audit.look(Ledger(trajectories={"received": received}), steps, now)
    assert (audit.longest, audit.longest_from) == (6.0, 184.0)


def test_a_count_that_goes_back_is_a_loss() -> None:
    audit = LedgerAudit()
    for received in (10, 7):
        audit.look(Ledger(trajectories={"received": received}), 1, 0.0)
    assert audit.lost == 3
    audit.count(Ledger(trajectories={"received": 12}))
    assert (audit.received, audit.lost) == (12, 3)


@pytest.mark.parametrize(
    ("steps", "updates", "trained", "problem"),
    [
        ((1, 2), 2, 14, None),
        ((1, 3), 2, 14, "steps 1 to 2"),
        ((1, 2), 3, 14, "the store 3"),
        ((1, 2), 2, 15, "14 fresh trajectories"),
    ],
)
def test_learner_and_store_must_agree_on_what_was_trained(
    steps: tuple[int, ...], updates: int, trained: int, problem: str | None
) -> None:
    audit = LedgerAudit()
    lines = [{"step": step, "n_trajectories": 8, "n_replayed": 1} for step in steps]
    ledger = Ledger(trajectories={"received": trained, "trained": trained}, updates=updates)
    audit.close(ledger, lines)
    assert (problem is None) == (audit.problems == [])
    assert problem is None or problem in audit.problems[0]


def test_repeated_updates_restarts_and_waits_are_not_useful_time() -> None:
    # the third update waited for 6 s; then a restart took 10 s and what was made before is gone
    ends = (100.0, 102.0, 110.0, 112.0, 130.0, 132.0, 134.0, 136.0, 138.0, 140.0)
    seconds = (30.0, 2.0, 8.0, *[2.0] * 7)
    lines = [{"finished": end, "seconds": {"step": step}} for end, step in zip(ends, seconds, strict=True)]
    assert useful_time(lines).startswith("0.450 (ETTR): 9 kept updates of 2 s")
    assert useful_time(lines[:9]) == "unknown: 9 kept updates, fewer than 10"


def test_memory_of_a_role_has_its_children_but_not_another_role() -> None:
    tree = Processes({1: [2, 3], 2: [4], 3: [5]}, {1: 10, 2: 20, 3: 30, 4: 40, 5: 50})
    assert tree.memory({"supervisor": 1, "actor-0": 2}) == {"supervisor": 90, "actor-0": 60}
