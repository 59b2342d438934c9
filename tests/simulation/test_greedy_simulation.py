"""Groups with a greedy rollout under seeded schedules of faults: every plan has its baseline, every account adds up."""

from __future__ import annotations

import random
import sqlite3
from pathlib import Path

import pytest

from pipeline.config import RunConfig
from tests.simulation.schedules import blocks, ledger_at_the_end, play
from tests.support.simulation import Simulation


def config_of(rng: random.Random, seed: int) -> RunConfig:
    replay = {
        "enabled": True, "mode": "mix", "start_ratio": 0.0, "trajectories_per_task": 1,
    }  # fmt: skip
    n = rng.randint(1, 4)
    return RunConfig.model_validate(
        {
            "run": {"total_steps": rng.randint(3, 9), "seed": seed},
            "groups": {"n_rollout": n, "groups_per_step": rng.randint(1, 3), "attempts_max": rng.randint(1, 4)},
            "staleness": {"max": rng.randint(0, 2)},
            "checkpoint": {"every": rng.randint(1, 4)},
            "environments": {"a": {"weight": 2, "tasks": 6, "max_seconds": 5}, "b": {"tasks": 3, "max_seconds": 5}},
            "stage": {"silence_seconds_max": 4.0},
            "advantage": {"estimator": "remax"},
            **({"replay": replay} if n > 1 and rng.random() < 0.5 else {}),
        }
    )


@pytest.mark.parametrize("block", blocks(40))
def test_greedy_rollouts_keep_every_account_under_faults(block: int, tmp_path: Path) -> None:
    play(block, tmp_path, config_of, check)


def check(sim: Simulation) -> None:
    ledger = ledger_at_the_end(sim)
    weights = sim.learner.weights
    trained = {t for _, ids in weights.history for t in ids}
    n = sim.config.groups.n_rollout
    assert not [t for t in trained if int(t.split(".")[1]) == n], "a greedy rollout was trained"
    groups = sum(len(members) for members, _ in weights.history)
    assert ledger.trajectories["baseline"] >= groups, "every trained group had one"
    with sqlite3.connect(sim.path) as connection:
        slots = connection.execute("SELECT DISTINCT slot FROM trajectories WHERE state = 'baseline'").fetchall()
    connection.close()
    assert slots == [(n,)]
