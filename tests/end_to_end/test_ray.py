"""A run on a Ray cluster of two nodes goes on when one of them is lost or hangs, and its accounts add up."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.ray_cluster import disk_lost, rank_lost, worker_lost, worker_stopped
from tests.support.ray_cluster import missing

pytestmark = pytest.mark.timeout(1800)


@pytest.fixture(autouse=True)
def _needs_a_cluster() -> None:
    if reason := missing():
        pytest.skip(f"no Ray cluster: {reason}")


def test_a_lost_node_costs_restarts_and_no_trajectory(tmp_path: Path) -> None:
    found = worker_lost(tmp_path)
    assert (found["exit_code"], found["audit"], found["orders"]["in_flight"]) == (0, [], 0)
    assert found["steps"] == 30
    assert found["restarts"], "some process was on the lost node"
    assert not any("10.77.0.2" in nodes for nodes in found["nodes_after"].values())


def test_the_processes_of_a_node_that_stands_still_move_and_do_no_harm_when_they_go_on(tmp_path: Path) -> None:
    found = worker_stopped(tmp_path)
    assert (found["exit_code"], found["audit"], found["orders"]["in_flight"]) == (0, [], 0)
    assert found["steps"] == 30
    assert found["staleness_max"] <= 1 or found["groups"].get("rolled_back"), (
        "updates behind a checkpoint are made again"
    )
    assert "10.77.0.2" in found["nodes_before"]["learner"]
    assert not any("10.77.0.2" in nodes for nodes in found["nodes_after"].values())


def test_the_replay_stage_waits_for_the_node_with_its_disk(tmp_path: Path) -> None:
    found = disk_lost(tmp_path)
    assert (found["exit_code"], found["audit"], found["orders"]["in_flight"]) == (0, [], 0)
    assert (found["steps"], found["restarts"]) == (24, {"replay": 1})
    assert found["nodes_before"]["replay"] == found["nodes_after"]["replay"] == ["10.77.0.2"]


def test_a_rank_that_is_killed_or_cut_off_restarts_the_gang_from_its_checkpoint(tmp_path: Path) -> None:
    found = rank_lost(tmp_path)
    assert (found["exit_code"], found["audit"], found["orders"]["in_flight"]) == (0, [], 0)
    assert (found["steps"], found["restarts"]["learner"], found["restarts"]["learner-1"]) == (26, 2, 2)
    assert any(
        "learner ended (killed by SIGKILL, for it cannot continue without learner-1)" in s for s in found["said"]
    )
