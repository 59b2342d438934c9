"""Evaluation beside training through real processes, with kills, and ``afterplay.evaluate`` of what is left."""

from __future__ import annotations

import os
import signal
import sqlite3
from contextlib import closing
from functools import partial
from pathlib import Path

import afterplay
from pipeline.store.evaluation_results import read_results

TINY = Path(__file__).parents[2] / "configs" / "tiny.yaml"
SECONDS_MAX = 400
"""A guard against hanging, far above what a run takes."""
SECTIONS = [
    "run.total_steps=12", "model.tiny.hidden_size=32", "groups.groups_per_step=4", "checkpoint.every=100",
    "environments.guess.held_out.eval=24", "evaluation.every=4", "evaluation.tasks=16", "evaluation.temperature=1",
    "evaluation.samples=2", "evaluation.pass_at=[1,2]", "evaluation.keep_best=score", "evaluation.strict=true",
]  # fmt: skip


def test_evaluations_survive_kills_and_the_best_checkpoint_can_be_evaluated_again(
    tmp_path: Path, forked_run: partial
) -> None:
    with forked_run(TINY, tmp_path, "evaluated", SECTIONS) as run:
        run.until_step(3, SECONDS_MAX)
        for name in ("replay", "actor-0"):
            victim = run.pid(name)
            assert victim is not None
            os.kill(victim, signal.SIGKILL)
            run.until(f"a new {name}", lambda n=name, v=victim: run.pid(n) not in (None, v), SECONDS_MAX)
        assert run.finish(SECONDS_MAX) == 0, run.tail()
        ledger = run.ledger(rows=True)
        assert ledger.audit() == [] and ledger.orders["in_flight"] == 0
        results = read_results(run.directory.evaluations_file)
        assert [r["updates"] for r in results] == [0, 4, 8, 12], "strict: none falls out"
        for result in results:
            told = result["environments"]["guess"]
            assert result["status"] == "complete" and told["rollouts"] + told["missing"] == 32
            assert result["versions"] == [result["policy_version"]] * 2, "strict: of these weights only"
        assert ledger.trajectories["evaluated"] == sum(r["environments"]["guess"]["rollouts"] for r in results)
        with closing(sqlite3.connect(run.directory.store_file)) as store:
            trained = store.execute(
                "SELECT count(*) FROM trajectories t JOIN groups g ON g.group_number = t.group_number "
                "WHERE t.state = 'trained' AND CAST(g.task AS TEXT) LIKE '%guess/eval/%'"
            ).fetchone()[0]
        assert trained == 0
        best = max(results, key=lambda r: (r["score"], -r["updates"]))
        folder = (run.directory.checkpoints / "best").resolve()
        assert folder.name == f"best-u{best['updates']:06d}"
        run_folder = run.directory.path
    result = afterplay.evaluate(run_folder, checkpoint="best", tasks=8, engine__threads=1)
    assert result["environments"]["guess"]["rollouts"] == 16 and set(result["pass_at"]) == {"1", "2"}
    assert [result] == read_results(next((run_folder / "evaluations").iterdir()) / "evaluations.jsonl")
    assert (result["updates"], result["reason"]) == (best["updates"], "command")
    assert result["policy_version"] == best["policy_version"]
