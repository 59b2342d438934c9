"""A hostile, very old pool in a run of real processes, guard on: the run lives, and its numbers tell what the guard
did."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable
from contextlib import closing
from functools import partial
from pathlib import Path

import pytest

from benchmarks import stale_pool
from benchmarks.stale_pool import GUARDS, done, record, share_factors, with_pool, write
from pipeline.config.replay import EssGuardConfig
from pipeline.replay.report import examine_run
from tests.support.run_handle import RunHandle

STEPS, MIXING = 36, 14
SECONDS_MAX = 240
"""A guard against hanging; a run takes about 20 s on two free cores."""


def shrunk(run: RunHandle) -> bool:
    """Both metrics of the stage say so."""
    actions = run.metric("replay", "replay_guard_actions_total", 'direction="shrink"')
    return actions >= 1 and run.metric("replay", "replay_guard_factor_ratio") < 1


def guard_actions(run: RunHandle) -> dict[str, int]:
    """By direction, from the stage's counters."""
    with closing(sqlite3.connect(f"file:{run.directory.store_file}?mode=ro", uri=True)) as store:
        rows = store.execute("SELECT name, value FROM counters WHERE name LIKE 'guard.%'").fetchall()
    return {name.removeprefix("guard."): value for name, value in rows}


@pytest.mark.slow
def test_a_stale_pool_with_the_guard_on_neither_stops_nor_wrecks_a_run_and_the_metrics_tell(
    tmp_path: Path, forked_run: partial, afterplay: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stale_pool, "start_run", forked_run)
    monkeypatch.setattr(stale_pool, "afterplay", afterplay)
    pool = record(tmp_path, seed=0)
    config = with_pool(0, STEPS, guard=GUARDS["on"], start_ratio=MIXING / STEPS)
    with forked_run(write(tmp_path, "stale", config, pool), tmp_path, "stale") as run:
        assert run.until("a shrunk share in /metrics", lambda: shrunk(run), SECONDS_MAX)
        steps = done(run)
    assert len(steps) == STEPS
    replayed = [step for step in steps if step["n_replayed"]]
    assert replayed and min(step["replay_age_max"] for step in replayed) >= MIXING - 1
    assert min(step["ess_carried"] for step in replayed) < EssGuardConfig().floor
    for step in steps:
        factor = min(1.0, (step["ess_ratio"] / EssGuardConfig().target) ** 0.5)
        assert step["guard_lr_factor"] == pytest.approx(factor, rel=1e-4)

    factors = share_factors(steps, GUARDS["on"])
    assert min(factors) <= 0.5
    found = examine_run(run.directory.store_file)
    assert found.factor == pytest.approx(factors[-1])
    ways = [(b > a) - (b < a) for a, b in zip([1.0, *factors], factors, strict=False)]
    ledger = run.ledger(rows=True)
    assert ledger.audit() == []
    assert ledger.pool["imported"] == ledger.pool["held"]
    assert ledger.replays["trained"] == sum(step["n_replayed"] for step in steps)
    assert guard_actions(run) == {"shrink": ways.count(-1), "recover": ways.count(1)}

    rewards = [step["reward_mean"] for step in steps]
    assert sum(rewards[-6:]) / 6 >= 0.7 * sum(rewards[MIXING - 6 : MIXING]) / 6, rewards
