"""Groups that were trained stay in the store for the updates that may be repeated."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from pipeline.store.ledger import read_ledger
from pipeline.store.records import GroupState
from tests.unit.stage.test_store_that_went_back import StoredStage

UPDATES = 6
ALL = {"every": 1, "keep": UPDATES}
"""Section of checkpoints that are all kept, one after each update."""


def updates_in(stage: StoredStage) -> dict[int, list[str]]:
    """Updates whose groups all have their payloads, with the groups."""
    found: dict[int, list[str]] = {}
    for group in stage.core.records.values():
        if group.state is GroupState.TRAINED and group.update is not None:
            row_ids = [slot.trajectory.row_id for slot in group.slots if slot.trajectory is not None]
            assert stage.store.payloads(row_ids).keys() == {*row_ids} != set()
            found.setdefault(group.update, []).append(group.group_id)
    return {update: sorted(groups) for update, groups in sorted(found.items())}


def trained(path: Path, **replay: Any) -> StoredStage:
    """A stage after updates that are all covered by a checkpoint."""
    stage = StoredStage(path, replay=replay, checkpoint=ALL)
    stage.train(UPDATES, durable=True)
    stage.round()
    return stage


@pytest.mark.parametrize("keep", [0, 1, 4, 10])
def test_the_newest_covered_updates_stay_whole(keep: int, tmp_path: Path) -> None:
    stage = trained(tmp_path / "s.sqlite", keep_trained=keep)
    expected = range(max(0, UPDATES - keep), UPDATES)
    assert updates_in(stage) == {u: stage.trained[2 * u : 2 * u + 2] for u in expected}
    stage.store.close()
    again = StoredStage(tmp_path / "s.sqlite", updates=UPDATES, replay={"keep_trained": keep}, checkpoint=ALL)
    assert list(updates_in(again)) == list(expected), "a restart forgets none"
    again.store.close()
    assert read_ledger(tmp_path / "s.sqlite", rows=True).audit() == []


@pytest.mark.parametrize(("keep", "kept"), [(1, range(3, 8)), (4, range(3, 8)), (5, range(3, 8)), (9, range(8))])
def test_what_stays_begins_with_a_checkpoint_that_is_there(keep: int, kept: range, tmp_path: Path) -> None:
    stage = StoredStage(tmp_path / "s.sqlite", replay={"keep_trained": keep}, checkpoint={"every": 4, "keep": 2})
    for durable in (3, 8):
        stage.train(durable - 1)
        stage.train(durable, durable=True)
    stage.round()
    assert list(updates_in(stage)) == list(kept), "and 0 is the initial model, while the groups behind it are there"
    stage.store.close()


def test_the_oldest_updates_go_first_beyond_the_bytes_and_all_where_the_disk_is_full(tmp_path: Path) -> None:
    stage = trained(tmp_path / "s.sqlite", keep_trained=10)
    n_bytes = {
        update: sum(stage.core.records[int(group[1:])].n_bytes for group in groups)
        for update, groups in updates_in(stage).items()
    }
    stage.store.close()
    bound = n_bytes[UPDATES - 1] + n_bytes[UPDATES - 2] + n_bytes[UPDATES - 3] - 1
    less = trained(tmp_path / "less.sqlite", keep_trained=10, capacity_bytes=bound)
    assert list(updates_in(less)) == [UPDATES - 2, UPDATES - 1], "no update is kept in part"
    less.core.groups.paused = "room"
    less.round()
    assert updates_in(less) == {}
    less.store.close()
    with closing(sqlite3.connect(tmp_path / "less.sqlite")) as connection:
        assert connection.execute("PRAGMA freelist_count").fetchone() == (0,), "the file has got smaller"


def test_a_learner_that_goes_back_behind_a_checkpoint_trains_the_kept_groups_again(tmp_path: Path) -> None:
    stage = trained(tmp_path / "s.sqlite", keep_trained=10)
    before = updates_in(stage)
    stage.rollback(2)
    stage.train(UPDATES, durable=True)
    stage.round()
    assert updates_in(stage) == before
    stage.store.close()
    assert read_ledger(tmp_path / "s.sqlite", rows=True).audit() == []
