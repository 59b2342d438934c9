"""A real run under a real Prometheus with the shipped rules: a role that is stopped, killed or hung raises exactly its
alert, and a run that has finished none. ``python -m benchmarks.role_alerts`` tries every role with every fault."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from benchmarks.role_alerts import ended, watched_run
from tests.support.fork_server import AVAILABLE, ForkServer

FAULTS = (("engine-0", "hung"), ("learner", "hung"), ("replay", "stopped"), ("actor-0", "killed"))

pytestmark = [
    pytest.mark.skipif(shutil.which("prometheus") is None, reason="no prometheus binary on PATH"),
    pytest.mark.skipif(not AVAILABLE, reason="threads hang in processes that are forked"),
]


def test_a_role_that_hangs_is_stopped_or_killed_raises_exactly_its_alert_until_it_is_back(
    tmp_path: Path, fork_server: ForkServer
) -> None:
    with watched_run(tmp_path, fork_server) as watched:
        for role, fault in FAULTS:
            outcome = watched.fault(role, fault)
            assert outcome.right, outcome


def test_a_run_that_has_finished_raises_nothing_when_its_processes_are_gone(
    tmp_path: Path, fork_server: ForkServer
) -> None:
    outcome = ended(tmp_path, fork_server, "finished")
    assert outcome.right, outcome
