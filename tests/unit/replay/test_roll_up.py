"""Rows of groups that ended long ago become totals, and the accounts stay the same."""

from __future__ import annotations

import sqlite3
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.schema import TrajectoryStatus
from pipeline.stage import core
from pipeline.store.ledger import Ledger, read_ledger
from tests.unit.replay.test_store_that_went_back import StoredStage

ACTS = st.lists(st.sampled_from(["train", "train", "durable", "fail", "leave", "restart", "learner lost"]), max_size=14)
TABLES = ("groups", "orders", "trajectories", "group_replays")


def history(path: Path, acts: list[str], **replay: Any) -> Ledger:
    """The accounts after these acts, which depend on nothing else."""
    sections = {"replay": {"enabled": True, "mode": "mix", "start_ratio": 0.0, **replay}, "run": {"total_steps": 1000}}
    stage = StoredStage(path, **sections)
    trained, durable = 0, 0
    for act in acts:
        match act:
            case "train":
                trained += 1
                stage.train(trained)
            case "durable":
                trained += 1
                stage.train(trained, durable=True)
                durable = trained
            case "fail":
                if (order := open_order(stage)) is not None:
                    stage.answer(order, status=TrajectoryStatus.ERROR)
            case "leave":
                stage.core.peer_down("actor-0", left=True)
                stage.actor()
            case "restart":
                stage.store.close()
                stage = StoredStage(path, updates=trained, **sections)
            case "learner lost":
                trained = durable
                stage.rollback(durable)
        stage.round()
    stage.store.close()
    return read_ledger(path, rows=True)


def open_order(stage: StoredStage) -> Any:
    """A rollout in flight; None where all groups that may be admitted are complete."""
    for order in stage.orders():
        group = stage.core.records.get(int(order.group_id[1:]))
        if group is not None and group.slots[order.slot].leased:
            return order
    return None


@settings(max_examples=8, deadline=None)
@given(ACTS)
def test_a_history_with_roll_up_ends_in_the_same_accounts(acts: list[str]) -> None:
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr(core, "ROLL_UP_GROUPS", 1)
        rolled = history(Path(folder) / "rolled", acts, retain_groups=1)
        whole = history(Path(folder) / "whole", acts)
        assert rolled == whole
        assert rolled.audit() == []
        assert rolled.rows["replays"] == whole.rows["replays"]
        kept = {path: counted(Path(folder) / path) for path in ("rolled", "whole")}
        assert all(kept["rolled"][table] <= kept["whole"][table] for table in TABLES)


def counted(path: Path) -> dict[str, int]:
    connection = sqlite3.connect(path)
    try:
        return {table: connection.execute(f"SELECT count(*) FROM {table}").fetchone()[0] for table in TABLES}
    finally:
        connection.close()


def test_rows_stop_growing_and_pages_are_used_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(core, "ROLL_UP_GROUPS", 4)
    path = tmp_path / "replay.sqlite"
    stage = StoredStage(path, replay={"retain_groups": 8}, run={"total_steps": 1000})
    sizes, rows = [], []
    for update in range(10, 61, 10):
        stage.train(update, durable=True)
        rows.append(counted(path))
        sizes.append(stage.store.load().counters["groups.planned"])
    stage.store.close()
    assert sizes[-1] > 100
    assert all(counts["groups"] <= 8 + 2 * 4 + 4 for counts in rows), rows
    assert rows[-1]["orders"] <= 2 * rows[-1]["groups"]
    assert read_ledger(path, rows=True).audit() == []
