"""``docker compose up --wait`` on this machine: see scripts/compose_test.sh, which prints each step."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "scripts" / "compose_test.sh"
CANNOT = 75
SECONDS_MAX = 900


@pytest.mark.container
@pytest.mark.slow
@pytest.mark.timeout(SECONDS_MAX + 60)
def test_every_service_is_healthy_and_trajectories_reach_the_learner(capsys: pytest.CaptureFixture[str]) -> None:
    process = subprocess.Popen(
        ["bash", str(SCRIPT)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "PYTHON": sys.executable},
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=SECONDS_MAX)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGTERM)
        output, _ = process.communicate(timeout=60)
    with capsys.disabled():
        print(f"\n{output}")
    if process.returncode == CANNOT:
        reason = next((line for line in output.splitlines() if line.startswith("CANNOT")), "CANNOT RUN CONTAINERS HERE")
        pytest.skip(reason)
    assert process.returncode == 0, output[-6000:]
    assert "COMPOSE OK" in output
