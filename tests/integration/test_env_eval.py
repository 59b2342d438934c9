"""``afterplay env eval`` against the embedded engine's real server: killed, continued, and reported."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from learner.models.prepare import prepare_model
from pipeline.config import RunConfig
from pipeline.runtime.run_directory import RunDirectory
from tests.support.fork_server import ForkServer
from tests.support.running_engine import running_engine

SECONDS_MAX = 120


def lines(file: Path) -> list[bytes]:
    return file.read_bytes().splitlines() if file.exists() else []


@pytest.mark.slow
def test_an_evaluation_that_was_killed_goes_on_and_reports_every_rollout_once(
    tmp_path: Path, fork_server: ForkServer, afterplay: Callable[..., str]
) -> None:
    config = RunConfig.model_validate(
        {
            "run": {"name": "run", "directory": str(tmp_path)},
            "model": {"source": "tiny", "max_length": 128},
            "engine": {"kind": "embedded", "port": 0, "threads": 1, "start_seconds_max": SECONDS_MAX},
        }
    )
    prepare_model(config, RunDirectory(config.run.path).model)
    out = tmp_path / "evaluation"
    with running_engine(config) as engine:
        options = [
            "--url",
            engine.url,
            "--set",
            "compact=true",
            "--set",
            "turns=4",
            "--max-tokens",
            "2",
            "--out",
            str(out),
        ]
        command = ["env", "eval", "number_guess", *options, "--concurrency", "2", "--tasks", "6", "--samples"]
        first = fork_server.start(
            [sys.executable, "-m", "pipeline.cli.app", *command, "4"],
            forks=True,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        deadline = time.monotonic() + SECONDS_MAX
        while len(lines(out / "rollouts.jsonl")) < 3 and first.poll() is None and time.monotonic() < deadline:
            time.sleep(0.02)
        first.kill()
        first.wait()
        kept = len(lines(out / "rollouts.jsonl"))
        assert kept >= 3
        printed = afterplay(*command, "4")
    rows = [json.loads(line) for line in lines(out / "rollouts.jsonl")]
    assert Counter((row["task_id"], row["sample"]) for row in rows) == {
        (f"number_guess/{seed}", sample): 1 for seed in range(6) for sample in range(4)
    }
    assert all(row["n_sampled"] > 0 and row["reward"] is not None for row in rows)
    found = json.loads((out / "summary.json").read_text())
    assert (found["scored"], found["left"], found["failures"], found["stopped"]) == (24, 0, {}, None)
    means = Counter[str]()
    for row in rows:
        means[row["task_id"]] += row["reward"] / 4
    assert found["score"] == pytest.approx(sum(means.values()) / 6)
    assert f"pass@4         {found['pass_at']['4']['value']:.3f}" in printed
    assert found["words"][-1] in printed and "only these tasks give advantages" in printed
    assert "number_guess/5" in (out / "rollouts.html").read_text()
