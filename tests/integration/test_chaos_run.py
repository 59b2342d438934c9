"""``afterplay chaos`` over a real run: its faults hurt the run and not its ledger, and what the store cannot know is
found by what actors and learner recorded."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
MUTANTS = ROOT / "tests" / "support" / "chaos_mutants"


def chaos(tmp_path: Path, *settings: str, mutants: str = "") -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join(filter(None, (str(MUTANTS), str(ROOT), os.environ.get("PYTHONPATH", ""))))
    environment = {"PYTHONPATH": path, "AFTERPLAY_TEST_MUTANTS": mutants} if mutants else {}
    options = ["--minutes", "0.25", "--seed", "3", "--every", "4"]
    settings += (
        f"run.directory={tmp_path}",
        "stage.silence_seconds_max=3",
    )
    command = [sys.executable, "-m", "pipeline.cli.app", "chaos", str(ROOT / "configs/tiny.yaml"), *options]
    for setting in settings:
        command += ["--set", setting]
    return subprocess.run(
        command, capture_output=True, text=True, cwd=ROOT, timeout=280, check=False, env={**os.environ, **environment}
    )


@pytest.mark.timeout(300)
def test_a_run_under_chaos_goes_on_and_its_books_balance(tmp_path: Path) -> None:
    done = chaos(tmp_path)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert "every sum adds up" in done.stdout and "share of useful time" in done.stdout
    folder = tmp_path / "tiny-chaos" / "chaos"
    faults = [json.loads(line)["what"].split()[0] for line in (folder / "faults.jsonl").read_text().splitlines()]
    assert {"kill", "stop"} <= set(faults)
    assert (folder / "resources.png").stat().st_size > 10_000


@pytest.mark.timeout(300)
def test_what_the_store_cannot_know_is_found(tmp_path: Path) -> None:
    """All mutants in one run: each is found by a sentence of its own."""
    names = "ack_not_stored,swap_rewards,alter_tokens,skip_rows,train_twice"
    # short leases: orders whose answers were thrown away are soon ordered again
    settings = ("environments.guess.max_seconds=1", "engine.start_seconds_max=90", "supervisor.stuck_seconds_max=30")
    done = chaos(tmp_path, *settings, mutants=names)
    said = " ".join(done.stdout.split())
    assert done.returncode == 1, said + done.stderr[-3000:]
    for problem in (
        "trajectories acknowledged and not in the store",
        "trained with another reward than their score gives",
        "trained with other tokens than their actor sent",
        "trajectories of an update whose tokens were not in its loss",
        "groups trained twice in one update",
        "groups that the store counts as trained and that are in no update",
    ):
        assert problem in said


@pytest.mark.timeout(500)
def test_a_run_that_stands_still_is_audited(tmp_path: Path) -> None:
    settings = ("engine.start_seconds_max=40", "supervisor.stuck_seconds_max=5")
    done = chaos(tmp_path, *settings, mutants="ack_not_stored:1")
    said = " ".join(done.stdout.split())
    assert done.returncode == 1, said + done.stderr[-3000:]
    assert "the run did not come to its first update within 45 s" in said
    assert "trajectories acknowledged and not in the store" in said
