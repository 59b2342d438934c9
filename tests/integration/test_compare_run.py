"""``afterplay compare`` with real runs, ended in the middle and continued."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import orjson

from tests.support.fork_server import ForkServer

TINY = Path(__file__).parents[2] / "configs" / "tiny.yaml"
SECONDS_MAX = 400
"""A guard against hanging."""


def test_stopped_comparison_continues_and_leaves_finished_runs_as_they_are(
    tmp_path: Path, fork_server: ForkServer, afterplay: Callable[..., str]
) -> None:
    sets = ["run.total_steps=2", "groups.groups_per_step=2", "model.tiny.hidden_size=16", "checkpoint.every=1"]
    arguments = [
        "compare", f"a={TINY}", f"b={TINY}", "--seeds=1,2", "--reach=0", "--window=1", "--metric=reward",
        f"--out={tmp_path}",
        *(f"--set={one}" for one in sets), "--set-arm=b:learner.learning_rate=0.001",
    ]  # fmt: skip
    first = tmp_path / "a" / "seed-1" / "finished.json"
    with (tmp_path / "first.out").open("wb") as output:
        command = [sys.executable, "-m", "pipeline.cli.app", *arguments]
        process = fork_server.start(
            command, forks=True, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT
        )
        deadline = time.monotonic() + SECONDS_MAX
        while not first.exists() and process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.05)
        os.kill(process.pid, signal.SIGTERM)
        code = process.wait(SECONDS_MAX)
    said = (tmp_path / "first.out").read_text()
    assert first.exists(), said
    assert code == 1 and "of 4 runs are done" in said, said
    made = first.stat().st_mtime_ns

    said = afterplay(*arguments, "--jobs=2")
    assert first.stat().st_mtime_ns == made, "a finished run was started again"
    assert "a seed 1" not in said and "2 seeds, paired" in said, said
    found = orjson.loads((tmp_path / "compare.json").read_bytes())
    assert [[run["seed"] for run in runs] for runs in found["arms"].values()] == [[1, 2], [1, 2]]
    for run in (run for runs in found["arms"].values() for run in runs):
        assert run["finished"] and [p["updates"] for p in run["points"]] == [1, 2]
        assert run["points"][1]["tokens"] >= run["points"][0]["tokens"] > 0
