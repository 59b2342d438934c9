"""Groups that teach nothing, dropped or replaced, under seeded schedules of faults: every account adds up."""

from __future__ import annotations

import random
import sqlite3
from pathlib import Path
from typing import Any

import pytest

from pipeline.config import RunConfig
from tests.simulation.schedules import PER_TEST, blocks, ledger_at_the_end, play
from tests.support.simulation import Simulation


def config_of(rng: random.Random, seed: int) -> RunConfig:
    n = rng.randint(2, 4)
    replay: dict[str, Any] = {
        "enabled": True, "mode": "mix", "start_ratio": 0.0, "trajectories_per_task": 1,
    }  # fmt: skip
    estimator = rng.choice(("grpo", "grpo", "remax"))
    return RunConfig.model_validate(
        {
            "run": {"total_steps": rng.randint(4, 9), "seed": seed},
            "groups": {
                "n_rollout": n,
                "groups_per_step": rng.randint(1, 4),
                "attempts_max": rng.randint(1, 4),
                "zero_variance": rng.choice(("drop", "refill", "refill")),
                "refill_max": rng.choice((0.5, 1.0, 3.0)),
            },
            "staleness": {"max": rng.randint(0, 3)},
            "checkpoint": {"every": rng.randint(1, 4)},
            "environments": {"a": {"weight": 2, "tasks": 9, "max_seconds": 5}, "b": {"tasks": 5, "max_seconds": 5}},
            "stage": {"silence_seconds_max": 4.0},
            "advantage": {"estimator": estimator},
            **({"replay": replay} if rng.random() < 0.5 else {}),
        }
    )


@pytest.mark.parametrize("block", blocks(80))
def test_left_out_groups_keep_every_account_under_faults(block: int, tmp_path: Path) -> None:
    left_out = sum(play(block, tmp_path, config_of, check))
    assert left_out > PER_TEST, f"only {left_out} groups were left out in {PER_TEST} schedules"


def check(sim: Simulation) -> int:
    """Returns the groups that were left out."""
    ledger = ledger_at_the_end(sim)
    weights, rule = sim.learner.weights, sim.config.groups
    groups = [g for members, _ in weights.history for g in members]
    trained = [t for _, ids in weights.history for t in ids]
    assert len(groups) == len(set(groups)) == weights.updates * rule.groups_per_step
    assert len(trained) == len(set(trained)), "one lease was trained twice"
    with sqlite3.connect(sim.path) as connection:
        rewards: dict[int, list[float]] = {}
        for number, reward in connection.execute(
            "SELECT group_number, reward FROM trajectories WHERE state = 'trained' AND slot < ?", (rule.n_rollout,)
        ):
            rewards.setdefault(number, []).append(reward)
        with_replays = {row[0] for row in connection.execute("SELECT DISTINCT group_number FROM group_replays")}
    connection.close()
    dropped, refilled = ledger.groups.get("zero_variance_dropped", 0), ledger.groups.get("zero_variance_refilled", 0)
    assert ledger.groups.get("cancelled.zero_variance", 0) == refilled
    if rule.zero_variance == "drop" and sim.config.advantage.estimator.name != "remax":
        same = [n for n, values in rewards.items() if len(set(values)) == 1 and n not in with_replays]
        assert not [n for n in same if len(rewards[n]) > 1], "an equal group was trained"
    kept = ledger.groups.get("trained", 0) + ledger.groups.get("zero_variance", 0)
    assert kept == len(groups)
    assert ledger.groups.get("trained", 0) == sum(bool(ids) for ids in _by_group(trained).values())
    fresh = ledger.trajectories.get("dropped.zero_variance", 0)
    assert (fresh > 0) == (dropped + refilled > 0)
    return dropped + refilled


def _by_group(trajectories: list[str]) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for name in trajectories:
        found.setdefault(name.split(".")[0], []).append(name)
    return found
