"""A run of real processes that begins rollouts with the turns of stored successes: it trains, and its books balance."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from functools import partial
from pathlib import Path

LOCKS = Path(__file__).parents[2] / "configs" / "replay_tiny.yaml"
SECONDS_MAX = 240
"""A guard against hanging; a run takes a few seconds on two free cores."""
TURNS, STEPS, GROUPS = 3, 12, 4
OVERRIDES = [
    f"run.total_steps={STEPS}",
    f"groups.groups_per_step={GROUPS}",
    "model.tiny.numbers=8",
    f"environments.locks.options.lengths=[{TURNS}]",
    "environments.locks.options.answers=[4]",
    "environments.locks.options.numbers=8",
    "environments.locks.tasks=6",
    f"environments.locks.max_turns={TURNS}",
    "replay.mode=restart",
]
"""Every lock opens in one of eight rollouts from the start, in one of four after a right number."""


def test_a_run_with_restarts_trains_what_follows_the_stored_turns_and_its_books_balance(
    tmp_path: Path, forked_run: partial
) -> None:
    with forked_run(LOCKS, tmp_path, "restart", OVERRIDES) as run:
        assert run.finish(SECONDS_MAX) == 0, run.tail()
        ledger = run.ledger(rows=True)
        assert ledger.audit() == [] and ledger.orders["in_flight"] == 0
        assert ledger.groups["trained"] == STEPS * GROUPS
        assert ledger.restarts["planned"] > 0 and "cancelled.unreproducible" not in ledger.groups
        assert ledger.restarts["successes"] > 0
        assert ledger.pool["saved"] > 0 and ledger.replays.get("trained", 0) == 0
        with closing(sqlite3.connect(run.directory.store_file)) as store:
            played = store.execute(
                "SELECT r.turn, t.n_turns, t.n_sampled, t.reward FROM group_replays r JOIN trajectories t "
                "USING (group_number) WHERE r.restart = 1 AND t.state = 'trained'"
            ).fetchall()
    assert played and all(0 < turn < TURNS and turn + n_turns <= TURNS for turn, n_turns, _, _ in played)
    assert all(n_sampled == n_turns for _, n_turns, n_sampled, _ in played), "one number a turn, its own alone"
    assert all(turn + n_turns == TURNS for turn, n_turns, _, reward in played if reward == 1.0)
