"""A run with a real vLLM server is stopped by one signal or by two: it ends in time and leaves no process."""

from __future__ import annotations

import signal
import time
from pathlib import Path

import psutil
import pytest

from actors.servers.vllm import vllm_available
from tests.support.run_handle import RunHandle, start_run

QUICKSTART = Path(__file__).parents[2] / "configs" / "quickstart.yaml"

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]


def playing(run: RunHandle) -> bool:
    """Whether the engine is up and the first rollouts have arrived."""
    return run.directory.store_file.is_file() and sum(run.ledger().trajectories.values()) > 0


@pytest.mark.parametrize("signals", [1, 2])
def test_a_stopped_run_ends_within_ten_seconds_and_leaves_no_engine(tmp_path: Path, signals: int) -> None:
    usable, reason = vllm_available()
    if not usable:
        pytest.skip(f"NO vLLM TESTS HERE: {reason}")
    with start_run(QUICKSTART, tmp_path, "stopped") as run:
        run.until("the first trajectory", lambda: playing(run), 400)
        children = psutil.Process(run.process.pid).children(recursive=True)
        assert any("api_server" in " ".join(child.cmdline()) for child in children)
        begun = time.monotonic()
        for _ in range(signals):
            run.process.send_signal(signal.SIGINT)
        run.process.wait(60)
        assert time.monotonic() - begun < 10
        _, alive = psutil.wait_procs(children, timeout=5)
        assert alive == []
        assert run.ledger().audit() == []
