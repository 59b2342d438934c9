"""``afterplay chaos`` over a real run: its faults hurt the run and not its books."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.timeout(240)
def test_a_run_under_chaos_goes_on_and_its_books_balance(tmp_path: Path) -> None:
    options = ["--minutes", "0.25", "--seed", "3", "--every", "4"]
    settings = [f"run.directory={tmp_path}", "transport.heartbeat_seconds=0.5", "transport.silence_seconds_max=3"]
    command = [sys.executable, "-m", "pipeline.cli.app", "chaos", str(ROOT / "configs/tiny.yaml"), *options]
    for setting in settings:
        command += ["--set", setting]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=220, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert "every sum adds up" in done.stdout
    folder = tmp_path / "tiny-chaos" / "chaos"
    faults = [json.loads(line)["what"].split()[0] for line in (folder / "faults.jsonl").read_text().splitlines()]
    assert {"kill", "stop"} <= set(faults)
    assert (folder / "resources.png").stat().st_size > 10_000
