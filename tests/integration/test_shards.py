"""Two replay stages as real processes: killed one by one, and no group is lost or trained twice."""

from __future__ import annotations

import os
import signal
import sqlite3
from collections import Counter
from contextlib import closing
from pathlib import Path

import orjson

from pipeline.replay.sharding import Shard
from pipeline.supervisor.handle import RunHandle, start_run

TINY = Path(__file__).parents[2] / "configs" / "tiny.yaml"
STEPS, GROUPS, ROLLOUTS = 10, 8, 4
OVERRIDES = [
    f"run.total_steps={STEPS}",
    f"groups.groups_per_step={GROUPS}",
    f"groups.n_rollout={ROLLOUTS}",
    "replay.shards=2",
    "checkpoint.every=4",
    "replay.enabled=true",
    "replay.start_ratio=0",
]
START_SECONDS_MAX = 60
SECONDS_MAX = 120


def groups_of(path: Path) -> list[tuple[int, str, str, int]]:
    """Number, task id, state and update of every group of one stage."""
    with closing(sqlite3.connect(path)) as store:
        rows = store.execute("SELECT number, task, state, update_number FROM groups").fetchall()
    return [(number, orjson.loads(task)["task_id"], state, update) for number, task, state, update in rows]


def roles(run: RunHandle) -> dict[str, int | None]:
    return {name: run.pid(name) for name in ("replay-0", "replay-1", "learner", "actor-0")}


def test_a_killed_stage_restarts_alone_and_every_group_is_trained_once(tmp_path: Path) -> None:
    with start_run(TINY, tmp_path, "shards", OVERRIDES) as run:
        run.until_step(2, START_SECONDS_MAX)
        before = roles(run)
        victim = before["replay-1"]
        assert victim is not None and None not in before.values()
        os.kill(victim, signal.SIGKILL)
        run.until("a new stage", lambda: run.pid("replay-1") not in (None, victim), START_SECONDS_MAX)
        updates = run.ledger().updates
        run.until("training going on", lambda: run.ledger().updates >= updates + 2, START_SECONDS_MAX)
        assert {name for name, pid in roles(run).items() if pid != before[name]} == {"replay-1"}
        assert run.finish(SECONDS_MAX) == 0, run.tail()
        assert [step["step"] for step in run.steps()] == list(range(1, STEPS + 1))
        assert all(step["n_trajectories"] == GROUPS * ROLLOUTS for step in run.steps())
        ledgers = run.ledgers(rows=True)
        files = run.directory.store_files

    assert [path.name for path in files] == ["replay.sqlite", "replay-1.sqlite"]
    share = STEPS * GROUPS // 2
    for ledger in ledgers:
        assert ledger.audit() == []
        assert ledger.updates == STEPS and ledger.orders["in_flight"] == 0
        assert ledger.groups["trained"] == share
        assert ledger.trajectories["trained"] + ledger.replays["trained"] == share * ROLLOUTS
    assert sum(ledger.replays["trained"] for ledger in ledgers) > 0
    trained: Counter[str] = Counter()
    for index, path in enumerate(files):
        shard, groups = Shard(index, 2), groups_of(path)
        assert all(number % 2 == index and shard.owns(task) for number, task, _, _ in groups)
        updates_of = Counter(update for _, _, state, update in groups if state == "trained")
        assert updates_of == dict.fromkeys(range(STEPS), GROUPS // 2)
        trained.update(task for _, task, state, _ in groups if state == "trained")
    assert trained.total() == STEPS * GROUPS
