"""Experience replay under seeded schedules of faults: the pool, its payloads and the accounts stay whole."""

from __future__ import annotations

import random
import sqlite3
from pathlib import Path
from typing import Any

import pytest

from pipeline.config import RunConfig
from tests.simulation.schedules import PER_TEST, blocks, ledger_at_the_end, play
from tests.support.simulation import Simulation


def config_of(rng: random.Random, _: int) -> RunConfig:
    n, eta = rng.randint(2, 5), rng.randint(0, 2)
    k = rng.randint(1, n - 1)
    replay: dict[str, Any] = {
        "enabled": True,
        "mode": "mix",
        "start_ratio": rng.choice((0.0, 0.0, 0.3)),
        "start_solve_rate": rng.choice((None, None, None, 0.2)),
        "task_ratio": rng.choice((0.25, 0.5, 1.0)),
        "trajectories_per_task": k,
        "max_trajectories_per_task": rng.randint(k, 6),
        "capacity": rng.choice((2, 6, 10_000)),
        "select": rng.choice(("argmin", "argmax", "random")),
        "entropy": rng.choice(("current", "stored")),
        "task_sampling": rng.choice(("uniform", "normal", "priority")),
        "max_age": rng.choice((None, None, eta + 2, eta + 6)),
        "retest_ratio": rng.choice((0.0, 0.2)),
        "bias_correction": rng.random() < 0.5,
        "ess_guard": {"enabled": rng.random() < 0.5},
        "capacity_bytes": rng.choice((4_000, 16 * 1024**3, 16 * 1024**3)),
    }
    if replay["max_age"] is not None:
        replay["max_age"] = max(1, replay["max_age"])
    return RunConfig.model_validate(
        {
            "run": {"total_steps": rng.randint(8, 24)},
            "groups": {
                "n_rollout": n,
                "groups_per_step": rng.randint(1, 4),
                "attempts_max": rng.randint(1, 4),
            },
            "staleness": {"max": eta},
            "checkpoint": {"every": rng.randint(1, 4)},
            "environments": {"a": {"weight": 2, "tasks": 8, "max_seconds": 5}, "b": {"tasks": 4, "max_seconds": 5}},
            "stage": {"silence_seconds_max": 4.0},
            "replay": replay,
        }
    )


def config_with_groups(rng: random.Random, number: int) -> RunConfig:
    """As :func:`config_of`, with groups that come back whole."""
    config = config_of(rng, number).model_dump()
    config["replay"] |= {
        "mode": "groups",
        "groups": {
            "capacity": rng.choice((1, 3, 512)),
            "uses_max": rng.randint(1, 3),
            "select": rng.choice(("priority", "uniform", "newest")),
            "tau": rng.choice((0.5, 8.0)),
        },
        "task_ratio": rng.choice((0.25, 0.5, 0.75)),
    }
    return RunConfig.model_validate(config)


@pytest.mark.parametrize("block", blocks(40))
def test_stored_groups_keep_every_account_under_faults(block: int, tmp_path: Path) -> None:
    replayed = sum(play(block, tmp_path, config_with_groups, check))
    assert replayed > PER_TEST, f"only {replayed} trajectories were replayed in {PER_TEST} schedules"


@pytest.mark.parametrize("block", blocks(60))
def test_replay_keeps_every_account_under_faults(block: int, tmp_path: Path) -> None:
    replayed = sum(play(block, tmp_path, config_of, check))
    assert replayed > PER_TEST, f"only {replayed} trajectories were replayed in {PER_TEST} schedules"


def check(sim: Simulation) -> int:
    """Returns the trajectories that were replayed."""
    ledger = ledger_at_the_end(sim)
    weights, core = sim.learner.weights, sim.core
    assert core is not None
    groups = [g for members, _ in weights.history for g in members]
    fresh = [t for _, ids in weights.history for t in ids]
    assert len(groups) == len(set(groups)) == weights.updates * sim.config.groups.groups_per_step
    assert len(fresh) == len(set(fresh)), "one lease was trained twice"
    with sqlite3.connect(sim.path) as connection:
        stored = [row[0] for row in connection.execute("SELECT trajectory_id FROM trajectories")]
        payloads = {row[0] for row in connection.execute("SELECT row_id FROM payloads")}
        pool = {row[0] for row in connection.execute("SELECT row_id FROM pool")}
        members = "SELECT group_number, m.value FROM stored_groups, json_each(members) m"
        whole = {tuple(row) for row in connection.execute(members)}
        n_bytes = connection.execute(
            "SELECT coalesce(sum(length(header)+length(token_ids)+length(logprobs)+length(spans)), 0) FROM payloads"
        ).fetchone()[0]
    connection.close()
    assert pool == {entry.row_id for entry in core.replay.pool} and pool <= payloads
    held = {(group.group_number, entry.row_id) for group in core.replay.groups for entry in group.members}
    assert whole == held and {row_id for _, row_id in whole} <= payloads
    assert core.journal.counters["payload.bytes"] == n_bytes
    assert sim.acknowledged <= set(stored) and set(fresh) <= set(stored)
    assert ledger.groups["trained"] == len(groups)
    assert ledger.trajectories["trained"] == len(fresh)
    return sim.replayed_total
