"""The replay stage as a real process over ZeroMQ, killed fifty times at random moments while it replays.

The processes are forked from one that has imported everything, so a start costs what a restart of the stage costs and
not the imports.
"""

from __future__ import annotations

import random
import signal
import sqlite3
import subprocess
import sys
from pathlib import Path

import anyio
import pytest
import yaml

from pipeline.config import RunConfig
from pipeline.schema import Order
from pipeline.store.ledger import read_ledger
from pipeline.transport.zeromq import open_link
from tests.support.fork_server import Forked, ForkServer
from tests.support.instant_peers import InstantActor, InstantLearner

KILLS = 25
"""In each mode of replay."""


def reward(order: Order) -> float:
    """Of five tasks one always fails, one always succeeds."""
    return float(random.Random(order.order_id).random() < (0.0, 0.2, 0.4, 0.6, 1.0)[order.task.seed % 5])


@pytest.mark.timeout(180)
@pytest.mark.parametrize("mode", ["groups", "mix"])
async def test_a_stage_killed_at_random_moments_keeps_every_account(
    mode: str, tmp_path: Path, fork_server: ForkServer
) -> None:
    raw = {
        "run": {"directory": str(tmp_path), "name": "r", "total_steps": 1_000_000},
        "groups": {"n_rollout": 4, "groups_per_step": 2},
        "environments": {"a": {"name": "arithmetic", "tasks": 100}},
        "replay": {
            "enabled": True,
            "mode": mode,
            "start_ratio": 0.0,
            "capacity": 20,
            "groups": {"capacity": 20},
            "max_trajectories_per_task": 3,
            "retest_ratio": 0.1,
        },
        "stage": {"silence_seconds_max": 2.0},
    }
    run_file = tmp_path / "run.yaml"
    run_file.write_text(yaml.safe_dump(raw))
    config = RunConfig.model_validate(raw)
    actor, learner = InstantActor(reward=reward), InstantLearner(10**9, 4, 2, checkpoint_every=3)
    rng, log = random.Random(7), tmp_path / "stage.log"

    def start() -> Forked | subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "pipeline.cli.app", "replay", str(run_file)]
        with log.open("ab") as output:
            return fork_server.start(command, stdin=subprocess.DEVNULL, stdout=output, stderr=output)

    stage: Forked | subprocess.Popen[bytes] | None = None
    try:
        with anyio.fail_after(150):
            async with anyio.create_task_group() as peers:
                peers.start_soon(actor.run, open_link(config, "actor-0"))
                peers.start_soon(learner.run, open_link(config, "learner"))
                for kill in range(KILLS):
                    stage = start()
                    # every tenth kill may hit the stage while it starts
                    until = learner.updates + (rng.randint(1, 12) if kill % 10 else 0)
                    while learner.updates < until:
                        await learner.progress()
                    await anyio.sleep(rng.uniform(0, 0.05))
                    stage.kill()
                    assert stage.wait() == -signal.SIGKILL
                learner.steps = learner.updates + 20
                stage = start()
                await learner.done.wait()
                peers.cancel_scope.cancel()
            stage.terminate()
            assert stage.wait() == 0, log.read_text()[-3000:]
    finally:
        if stage is not None:
            stage.kill()
    check(tmp_path / "r" / "replay.sqlite", actor, learner, mode)


def check(path: Path, actor: InstantActor, learner: InstantLearner, mode: str) -> None:
    assert len(learner.trained) == len(set(learner.trained)), "one lease was trained twice"
    assert len(learner.replayed) > 20, "little was replayed"
    ledger = read_ledger(path, rows=True)
    assert ledger.audit() == []
    assert ledger.updates == learner.updates
    assert ledger.trajectories["trained"] == len(learner.trained)
    assert ledger.replays["trained"] == len(learner.replayed)
    connection = sqlite3.connect(path)
    try:
        assert connection.execute("PRAGMA integrity_check").fetchone() == ("ok",)

        def column(query: str) -> list[object]:
            return [row[0] for row in connection.execute(query)]

        stored = column("SELECT trajectory_id FROM trajectories")
        assert len(stored) == len(set(stored))
        assert set(actor.acknowledged) <= set(stored)
        pool = column("SELECT row_id FROM pool")
        assert (0 < len(pool) <= 20) if mode == "mix" else not pool
        assert max(column("SELECT count(*) FROM pool GROUP BY task_id"), default=0) <= 3  # type: ignore[type-var]
        assert column("SELECT task_id FROM pool WHERE task_id IN (SELECT task_id FROM tasks WHERE retired = 1)") == []
        assert column("SELECT task_id FROM pool WHERE task_id NOT IN (SELECT task_id FROM tasks)") == []
        stored_groups = len(column("SELECT group_number FROM stored_groups"))
        assert stored_groups <= (20 if mode == "groups" else 0)  # each comes back twice at most: there may be none left
        needed = {
            *pool,
            *column("SELECT m.value FROM stored_groups, json_each(members) m"),
            *column(
                "SELECT row_id FROM trajectories JOIN groups USING (group_number) "
                "WHERE kept = 1 AND trajectories.state IN ('held', 'trained')"
            ),
            *column(
                "SELECT row_id FROM group_replays JOIN groups USING (group_number) "
                "WHERE kept = 1 AND state != 'cancelled'"
            ),
        }
        assert set(column("SELECT row_id FROM payloads")) == needed
    finally:
        connection.close()
