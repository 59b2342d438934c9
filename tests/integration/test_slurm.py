"""A run on a real SLURM cluster keeps its promises when a node is lost, and when the job is preempted."""

from __future__ import annotations

import pytest

from benchmarks.slurm import problems, prove
from tests.support.slurm_cluster import missing_programs

MISSING = missing_programs()


pytestmark = [
    pytest.mark.timeout(1800),
    pytest.mark.skipif(bool(MISSING), reason=f"SLURM is not installed: no {', '.join(MISSING)} (slurm-wlm, munge)"),
]


def test_a_lost_node_and_a_preemption_lose_nothing(tmp_path_factory: pytest.TempPathFactory) -> None:
    found = prove(tmp_path_factory.mktemp("slurm"))  # a short path: SLURM has unix sockets below it
    assert problems(found) == [], found
