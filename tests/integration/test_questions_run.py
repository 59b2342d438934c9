"""A file of questions trains without any code: ``configs/questions.yaml`` through real processes, with a tiny model."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from functools import partial
from pathlib import Path

import orjson

ROOT = Path(__file__).parents[2]
QUESTIONS = ROOT / "configs" / "questions.yaml"
DATA = ROOT / "configs" / "data" / "questions.jsonl"
TINY = [
    "model.source=tiny", "model.max_length=128", "model.tiny.hidden_size=32", "model.tiny.layers=1",
    "model.tiny.numbers=100", "engine.kind=embedded", "engine.dtype=float32", "engine.threads=1",
    "sampling.max_tokens=4",
    "learner.threads=1", "learner.compute_dtype=float32", "groups.n_rollout=4", "groups.groups_per_step=3",
]  # fmt: skip
RUN_SECONDS_MAX = 600
"""A guard against hanging, far above what a run takes."""


def overrides(steps: int, data: Path = DATA) -> list[str]:
    return [*TINY, f"run.total_steps={steps}", f"environments.questions.tasks_from.path={data}"]


def test_questions_train_and_go_on_with_the_rows_that_would_have_come(tmp_path: Path, forked_run: partial) -> None:
    with forked_run(QUESTIONS, tmp_path, "q", overrides(2)) as run:
        assert run.finish(RUN_SECONDS_MAX) == 0, run.tail()
        assert len(run.steps()) == 2
        assert run.ledger(rows=True).audit() == []
        store = run.directory.store_file
        with closing(sqlite3.connect(store)) as connection:
            rewards = [orjson.loads(row[0]) for row in connection.execute("SELECT rewards FROM trajectories")]
    assert rewards and all(set(parts) == {"environment", "right"} for parts in rewards if parts)
    changed = tmp_path / "questions.jsonl"
    changed.write_bytes(DATA.read_bytes().replace(b"birds", b"crows"))
    with forked_run(QUESTIONS, tmp_path, "q", overrides(3, changed)) as run:
        assert run.finish(RUN_SECONDS_MAX) == 2, run.tail()
        assert "expected the data that this run began with" in run.tail()
    with forked_run(QUESTIONS, tmp_path, "q", overrides(3)) as run:
        assert run.finish(RUN_SECONDS_MAX) == 0, run.tail()
        assert run.ledger(rows=True).audit() == []
