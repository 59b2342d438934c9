"""``configs/babyai_tiny.yaml`` in a short form, through real processes and the real minigrid package."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from functools import partial
from pathlib import Path

import pytest

from actors.adapters.catalogue import ADAPTERS
from pipeline.store.evaluation_results import read_results

BABYAI = Path(__file__).parents[2] / "configs" / "babyai_tiny.yaml"
SECONDS_MAX = 400
"""A guard against hanging, far above what a run takes."""
SHORT = [
    "run.total_steps=4", "model.tiny.hidden_size=32", "groups.groups_per_step=4", "checkpoint.every=100",
    "evaluation.every=4", "evaluation.tasks=12",
]  # fmt: skip


@pytest.mark.skipif(ADAPTERS["babyai"].missing is not None, reason=f"babyai: {ADAPTERS['babyai'].missing}")
def test_every_level_played_is_trained_once_or_evaluated_and_none_is_both(tmp_path: Path, forked_run: partial) -> None:
    with forked_run(BABYAI, tmp_path, "ball", SHORT) as run:
        assert run.finish(SECONDS_MAX) == 0, run.tail()
        steps, ledger = run.steps(), run.ledger(rows=True)
        assert ledger.audit() == [] and ledger.orders["in_flight"] == 0
        assert [(step["n_groups"], step["n_trajectories"]) for step in steps] == [(4, 32)] * 4
        assert all(set(step["signals"]) == {"solved", "unknown_action"} for step in steps)
        results = read_results(run.directory.evaluations_file)
        assert [(r["updates"], r["status"]) for r in results] == [(0, "complete"), (4, "complete")]
        assert [r["environments"]["ball"]["rollouts"] for r in results] == [12, 12]
        with closing(sqlite3.connect(run.directory.store_file)) as store:
            trained = store.execute(
                "SELECT CAST(g.task AS TEXT) FROM trajectories t JOIN groups g ON g.group_number = t.group_number "
                "WHERE t.state = 'trained'"
            ).fetchall()
        assert len(trained) == 128 and not any("/eval/" in task for (task,) in trained)
