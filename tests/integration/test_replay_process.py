"""The replay stage as a real process, killed again and again while it works."""

from __future__ import annotations

import random
import subprocess
import sys
from pathlib import Path

import anyio
import pytest
import yaml

from pipeline.config import RunConfig
from pipeline.store.ledger import read_ledger
from pipeline.transport.zeromq import open_link
from tests.support.fork_server import Forked, ForkServer
from tests.support.instant_peers import InstantActor, InstantLearner


@pytest.mark.timeout(120)
async def test_nothing_is_lost_or_trained_twice_when_the_stage_is_killed(
    tmp_path: Path, fork_server: ForkServer
) -> None:
    run_file = tmp_path / "run.yaml"
    raw = {
        "run": {"directory": str(tmp_path), "name": "r", "total_steps": 200},
        "groups": {"n_rollout": 4, "groups_per_step": 2},
        "environments": {"a": {"name": "arithmetic"}},
        "stage": {"silence_seconds_max": 2.0},
    }
    run_file.write_text(yaml.safe_dump(raw))
    config = RunConfig.model_validate(raw)
    actor, learner = InstantActor(), InstantLearner(200, 4, 2)
    rng = random.Random(3)

    def start() -> Forked | subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "pipeline.cli.app", "replay", str(run_file)]
        return fork_server.start(command, stderr=subprocess.DEVNULL)

    process = start()
    try:
        with anyio.fail_after(100):
            async with anyio.create_task_group() as peers:
                peers.start_soon(actor.run, open_link(config, "actor-0"))
                peers.start_soon(learner.run, open_link(config, "learner"))
                for _ in range(3):
                    until = learner.updates + rng.randint(10, 60)
                    while learner.updates < until:
                        await learner.progress()
                    process.kill()
                    process.wait()
                    process = start()
                await learner.done.wait()
                peers.cancel_scope.cancel()
    finally:
        process.terminate()
        assert process.wait(20) == 0
    assert len(learner.trained) == len(set(learner.trained)) == 200 * 2 * 4
    ledger = read_ledger(tmp_path / "r" / "replay.sqlite", rows=True)
    assert ledger.audit() == []
    assert ledger.updates == 200 and ledger.trajectories["trained"] == 1600
