"""Rows of groups that ended long ago become totals, and the accounts stay the same."""

from __future__ import annotations

import sqlite3
import tempfile
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from pipeline.replay.transfer import PoolWriter
from pipeline.schema import Order, Task, TrajectoryStatus
from pipeline.stage import core
from pipeline.store.ledger import Ledger, read_ledger
from pipeline.store.store import ReplayStore
from pipeline.transport.messages import Kind
from tests.support.simulated_roles import rollout
from tests.unit.stage.test_store_that_went_back import StoredStage

FALLBACKS = st.lists(st.sampled_from(["train", "durable", "restart", "learner lost", "damaged"]), max_size=12)
ACTS = st.lists(st.sampled_from(["train", "train", "durable", "fail", "leave", "restart", "learner lost"]), max_size=14)
TABLES = ("groups", "orders", "trajectories", "group_replays")


def history(path: Path, acts: list[str]) -> Ledger:
    """The accounts after these acts, which depend on nothing else."""
    replay = {"enabled": True, "mode": "mix", "start_ratio": 0.0, "keep_trained": len(acts) % 3}
    sections = {"replay": replay, "run": {"total_steps": 1000}}
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
        whole = history(Path(folder) / "whole", acts)
        patch.setattr(core, "RETAIN_GROUPS", 1)
        rolled = history(Path(folder) / "rolled", acts)
        assert rolled == whole
        assert rolled.audit() == []
        assert rolled.rows["replays"] == whole.rows["replays"]
        kept = {path: counted(Path(folder) / path) for path in ("rolled", "whole")}
        assert all(kept["rolled"][table] <= kept["whole"][table] for table in TABLES)


@settings(max_examples=15, deadline=None)
@given(FALLBACKS, st.sampled_from(["keep", "drop"]))
@example(["durable", "train", "durable", "train", "damaged", "train"], "keep")
def test_each_update_has_its_groups_and_nothing_else_counts_as_trained_after_any_fallback(
    acts: list[str], zero_variance: str
) -> None:
    """The learner is the witness: groups of the updates that its weights have."""
    sections = {"replay": {"enabled": True, "mode": "mix", "start_ratio": 0.0, "keep_trained": len(acts) % 3}}
    sections["groups"] = {"n_rollout": 2, "groups_per_step": 2, "zero_variance": zero_variance}
    made: list[set[str]] = []
    checkpoints = [0]
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr(core, "RETAIN_GROUPS", 1)
        patch.setattr(core, "ROLL_UP_GROUPS", 1)
        path = Path(folder) / "replay.sqlite"
        stage = StoredStage(path, **sections)
        for act in [*acts, "train"]:
            match act:
                case "train" | "durable":
                    stage.train(len(made) + 1, durable=act == "durable")
                    made.append(set(stage.trained[-2:]))
                    checkpoints += [len(made)] * (act == "durable")
                case "restart":
                    stage.store.close()
                    stage = StoredStage(path, updates=len(made), **sections)
                case _:
                    checkpoints = checkpoints[: -1 if act == "damaged" else None] or [0]
                    del made[checkpoints[-1] :]
                    stage.rollback(checkpoints[-1])
            stage.round()
        stage.store.close()
        with closing(sqlite3.connect(path)) as connection:
            rows = connection.execute(
                "SELECT update_number, group_number FROM groups WHERE state IN ('trained', 'zero_variance')"
            ).fetchall()
        assert sorted(rows) == sorted((u, int(g[1:])) for u, groups in enumerate(made) for g in groups)
        assert read_ledger(path, rows=True).audit() == []
        ReplayStore(path).close()  # every row has its digest


def counted(path: Path) -> dict[str, int]:
    connection = sqlite3.connect(path)
    try:
        return {table: connection.execute(f"SELECT count(*) FROM {table}").fetchone()[0] for table in TABLES}
    finally:
        connection.close()


def test_imports_that_left_the_pool_are_rolled_up_as_what_they_were_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(core, "ROLL_UP_GROUPS", 1)
    monkeypatch.setattr(core, "RETAIN_GROUPS", 1)
    path = tmp_path / "replay.sqlite"
    replay = {"enabled": True, "mode": "mix", "capacity": 1}
    sections: dict[str, Any] = {"replay": replay, "checkpoint": {"keep": 1, "every": 1}}
    stage = StoredStage(path, **sections)
    stage.store.close()
    answers = (rollout(Order(f"x{n}", "x", Task(f"a/{n}", "a", n), 0, 0, 0, 10.0), 0) for n in range(3))
    with ReplayStore(path) as store:
        PoolWriter(stage.config, store, 0).add([(answer.scored(1.0, {}), None) for answer in answers])
    stage = StoredStage(path, **sections)
    stage.train(6, durable=True)
    stage.store.close()
    ledger = read_ledger(path, rows=True)
    assert ledger.pool["imported"] == ledger.rows["pool.imported"] == 3
    assert ledger.audit() == []


def test_groups_that_were_freed_for_room_are_not_rolled_up_while_a_learner_may_go_back_behind_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(core, "ROLL_UP_GROUPS", 1)
    monkeypatch.setattr(core, "RETAIN_GROUPS", 1)
    stage = StoredStage(tmp_path / "replay.sqlite", replay={"keep_trained": 3}, run={"total_steps": 1000})
    stage.train(2, durable=True)
    stage.core.groups.paused = "the disk is full"
    stage.round()
    stage.core.groups.paused = ""
    stage.rollback(0)
    stage.train(1)
    stage.store.close()
    ledger = read_ledger(tmp_path / "replay.sqlite", rows=True)
    assert ledger.groups["trained"] == 2
    assert ledger.audit() == []


def test_rows_that_the_oldest_checkpoint_lacks_stay_also_where_checkpoints_are_made_more_often_since(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(core, "ROLL_UP_GROUPS", 1)
    monkeypatch.setattr(core, "RETAIN_GROUPS", 1)
    path = tmp_path / "replay.sqlite"
    sections: dict[str, Any] = {"run": {"total_steps": 1000}}
    stage = StoredStage(path, checkpoint={"keep": 2, "every": 3}, **sections)
    for updates in (3, 6):
        stage.train(updates)
        stage.tell(Kind.CHECKPOINTED, updates=updates)
        stage.round()
    stage.store.close()
    stage = StoredStage(path, updates=6, checkpoint={"keep": 2, "every": 1}, **sections)
    for _ in range(12):
        stage.round()
    stage.rollback(3)
    stage.train(7)
    stage.store.close()
    ledger = read_ledger(path, rows=True)
    assert ledger.groups["trained"] == 2 * 7
    assert ledger.audit() == []


def test_rows_stop_growing_and_pages_are_used_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(core, "ROLL_UP_GROUPS", 4)
    monkeypatch.setattr(core, "RETAIN_GROUPS", 8)
    path = tmp_path / "replay.sqlite"
    every = {"keep": 1, "every": 1}
    stage = StoredStage(path, run={"total_steps": 1000}, checkpoint=every)
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
