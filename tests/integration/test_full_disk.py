"""A run whose disk is full for a while continues by itself, and nothing is lost."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

from tests.support.full_disk import keep_full, small_disk

TINY = Path(__file__).parents[2] / "configs" / "tiny.yaml"
SECONDS = 6.0
"""For how long the disk is full. Longer times: ``python -m benchmarks.damage disk``."""
FINISH_SECONDS_MAX = 240


def test_a_run_waits_for_a_full_disk_and_loses_nothing(tmp_path: Path, forked_run: partial) -> None:
    overrides = ["run.total_steps=14", "checkpoint.every=2"]
    with small_disk(tmp_path / "disk", 64) as disk, forked_run(TINY, disk, "full", overrides) as run:
        run.until_step(3, FINISH_SECONDS_MAX)
        before = len(run.steps())
        keep_full(disk, SECONDS)
        assert len(run.steps()) <= before + 2
        assert run.finish(FINISH_SECONDS_MAX) == 0, run.tail()
        assert [step["step"] for step in run.steps()] == list(range(1, 15))
        assert run.ledger(rows=True).audit() == []
        assert run.ledger().trajectories["trained"] == 14 * 16 * 8
        assert run.ledger().trajectories.get("rolled_back", 0) == 0
        states = json.loads(run.directory.processes_file.read_bytes())
        assert {name: state["restarts"] for name, state in states.items() if state["restarts"]} == {}
        assert "waiting for disk" in run.tail()
        assert [path for path in disk.rglob(".*") if path.name.startswith(".writing-")] == []
