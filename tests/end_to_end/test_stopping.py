"""A run with a real vLLM server is stopped by one signal or by two: it ends in time and leaves no process."""

from __future__ import annotations

import pytest

from tests.end_to_end.recorded_runs import StoppedRun

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(1900)]


@pytest.mark.parametrize("recorded", ["float32_run", "quickstart_run"], ids=["1", "2"])
def test_a_stopped_run_ends_within_ten_seconds_and_leaves_no_engine(
    request: pytest.FixtureRequest, recorded: str
) -> None:
    """The first was stopped by one signal, the second by two."""
    found: StoppedRun = request.getfixturevalue(recorded)
    assert found.stop.had_engine
    assert found.stop.seconds < 10
    assert found.stop.survivors == []
    assert sum(found.run.ledger().trajectories.values()) > 0
    assert found.run.ledger().audit() == []
