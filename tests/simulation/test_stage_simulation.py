"""The whole stage under seeded schedules of faults: exactly once, within the bound, and it goes on."""

from __future__ import annotations

import random
import sqlite3
from pathlib import Path

import pytest

from pipeline.config import RunConfig
from tests.simulation.schedules import blocks, ledger_at_the_end, play
from tests.support.simulation import Simulation


def config_of(rng: random.Random, seed: int) -> RunConfig:
    n = rng.randint(1, 4)
    return RunConfig.model_validate(
        {
            "run": {"total_steps": rng.randint(3, 9), "seed": seed},
            "groups": {
                "n_rollout": n,
                "groups_per_step": rng.randint(1, 4),
                "attempts_max": rng.randint(1, 4),
            },
            "staleness": {"max": rng.randint(0, 3)},
            "checkpoint": {"every": rng.randint(1, 4)},
            "environments": {"a": {"weight": 2, "max_seconds": 5}, "b": {"tasks": 3, "max_seconds": 5}},
            "stage": {"silence_seconds_max": 4.0},
        }
    )


@pytest.mark.parametrize("block", blocks(120))
def test_exactly_once_under_faults(block: int, tmp_path: Path) -> None:
    play(block, tmp_path, config_of, check)


def check(sim: Simulation) -> None:
    ledger = ledger_at_the_end(sim)
    weights = sim.learner.weights
    groups = [g for members, _ in weights.history for g in members]
    trajectories = [t for _, ids in weights.history for t in ids]
    assert len(groups) == len(set(groups)) == weights.updates * sim.config.groups.groups_per_step
    assert len(trajectories) == len(set(trajectories)) == len(groups) * sim.config.groups.n_rollout
    with sqlite3.connect(sim.path) as connection:
        stored = [row[0] for row in connection.execute("SELECT trajectory_id FROM trajectories")]
        made = connection.execute("SELECT update_number, group_number FROM groups WHERE state = 'trained'").fetchall()
    connection.close()
    assert sim.acknowledged <= set(stored)
    assert set(trajectories) <= set(stored)
    made_by_learner = [(u, int(g[1:])) for u, (members, _) in enumerate(weights.history) for g in members]
    assert sorted(made) == sorted(made_by_learner)
    assert ledger.groups["trained"] == len(groups)
    assert ledger.trajectories["trained"] == len(trajectories)
    assert ledger.groups["collecting"] == ledger.groups["ready"] == ledger.groups["placed"] == 0
