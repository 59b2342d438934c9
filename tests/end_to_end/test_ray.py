"""A run on a Ray cluster of two nodes goes on when one of them is lost, and its accounts add up."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.ray_cluster import worker_lost
from tests.support.ray_cluster import missing


@pytest.mark.timeout(1800)
def test_a_lost_node_costs_restarts_and_no_trajectory(tmp_path: Path) -> None:
    if reason := missing():
        pytest.skip(f"no Ray cluster: {reason}")
    found = worker_lost(tmp_path)
    assert (found["exit_code"], found["audit"], found["orders"]["in_flight"]) == (0, [], 0)
    assert found["steps"] == 30
    assert found["restarts"], "some process was on the lost node"
    assert not any("10.77.0.2" in nodes for nodes in found["nodes_after"].values())
