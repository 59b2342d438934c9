"""The replay stage as a real process over ZeroMQ, killed fifty times at random moments while it replays.

The processes are forked from one that has imported everything and holds nothing, so a start costs what a restart of
the stage costs and not the imports.
"""

from __future__ import annotations

import os
import random
import signal
import socket
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
from tests.support.instant_peers import InstantActor, InstantLearner

KILLS = 50
FORKER = """
import os, sys
from pipeline.config.load import load
from pipeline.stage.role import main
from pipeline.runtime.process import run_role
from pathlib import Path
config = load(Path(sys.argv[1]), environment={})
for _ in sys.stdin:
    child = os.fork()
    if child == 0:
        os._exit(run_role("replay", 0, config, main))
    print(child, flush=True)
    print(os.waitpid(child, 0)[1], flush=True)
"""


def reward(order: Order) -> float:
    """Of five tasks one always fails, one always succeeds."""
    return float(random.Random(order.order_id).random() < (0.0, 0.2, 0.4, 0.6, 1.0)[order.task.seed % 5])


class Stage:
    """The process under test."""

    def __init__(self, run_file: Path, log: Path) -> None:
        self._log = log.open("wb")
        command = [sys.executable, "-c", FORKER, str(run_file)]
        self._forker = subprocess.Popen(
            command, cwd=Path(__file__).parents[2], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._log
        )
        self.pid = 0

    def start(self) -> None:
        assert self._forker.stdin is not None and self._forker.stdout is not None
        self._forker.stdin.write(b"start\n")
        self._forker.stdin.flush()
        self.pid = int(self._forker.stdout.readline())

    def end(self, number: int) -> int:
        """Send a signal and wait; the wait status."""
        assert self._forker.stdout is not None
        os.kill(self.pid, number)
        status = int(self._forker.stdout.readline())
        self.pid = 0
        return status

    def close(self) -> None:
        if self.pid:
            self.end(signal.SIGKILL)
        self._forker.communicate(timeout=20)
        self._log.close()


@pytest.mark.timeout(180)
async def test_a_stage_killed_at_random_moments_keeps_every_account(tmp_path: Path) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    raw = {
        "run": {"directory": str(tmp_path), "name": "r", "total_steps": 1_000_000},
        "groups": {"n_rollout": 4, "groups_per_step": 2},
        "environments": {"a": {"tasks": 100}},
        "replay": {
            "address": f"tcp://127.0.0.1:{port}",
            "enabled": True,
            "start_ratio": 0.0,
            "capacity": 20,
            "max_trajectories_per_task": 3,
            "retest_ratio": 0.1,
        },
        "transport": {"heartbeat_seconds": 0.2, "silence_seconds_max": 2.0},
    }
    run_file = tmp_path / "run.yaml"
    run_file.write_text(yaml.safe_dump(raw))
    config = RunConfig.model_validate(raw)
    actor, learner = InstantActor(reward=reward), InstantLearner(10**9, 4, 2, checkpoint_every=3)
    rng, stage = random.Random(7), Stage(run_file, tmp_path / "stage.log")
    try:
        with anyio.fail_after(150):
            async with anyio.create_task_group() as peers:
                peers.start_soon(actor.run, open_link(config, "actor-0"))
                peers.start_soon(learner.run, open_link(config, "learner"))
                for kill in range(KILLS):
                    stage.start()
                    # every tenth kill may hit the stage while it starts
                    until = learner.updates + (rng.randint(1, 12) if kill % 10 else 0)
                    while learner.updates < until:
                        await learner.progress()
                    await anyio.sleep(rng.uniform(0, 0.05))
                    assert os.WIFSIGNALED(stage.end(signal.SIGKILL))
                learner.steps = learner.updates + 20
                stage.start()
                await learner.done.wait()
                peers.cancel_scope.cancel()
            assert stage.end(signal.SIGTERM) == 0, (tmp_path / "stage.log").read_text()[-3000:]
    finally:
        stage.close()
    check(tmp_path / "r" / "replay.sqlite", actor, learner)


def check(path: Path, actor: InstantActor, learner: InstantLearner) -> None:
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
        assert 0 < len(pool) <= 20
        assert max(column("SELECT count(*) FROM pool GROUP BY task_id")) <= 3  # type: ignore[type-var]
        assert column("SELECT task_id FROM pool WHERE task_id IN (SELECT task_id FROM tasks WHERE retired = 1)") == []
        assert column("SELECT task_id FROM pool WHERE task_id NOT IN (SELECT task_id FROM tasks)") == []
        needed = {
            *pool,
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
