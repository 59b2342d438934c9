"""An environment whose rollouts fail is counted with its causes, and ends the run where none ever succeeds."""

from __future__ import annotations

from pathlib import Path

import anyio
import pytest

from pipeline.errors import EnvironmentFailing
from pipeline.schema import TrajectoryStatus
from pipeline.stage.group_records import FAILING_SECONDS, RolloutOutcomes
from pipeline.store.journal import CAUSES_MAX
from pipeline.store.ledger import FAILURES, read_ledger
from tests.support.instant_peers import InstantActor, InstantLearner
from tests.support.memory_transport import MemoryNetwork
from tests.unit.stage.test_replay_core import Stage
from tests.unit.stage.test_replay_role import configuration, playing, stage

VALUE_ERROR = "environment step: ValueError: no such move\nin the maze"


@pytest.fixture(autouse=True)
def failures_max(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pipeline.stage.group_records.FAILURES_MAX", 3)


def a_stage() -> tuple[Stage, RolloutOutcomes]:
    found = Stage(
        environments={"maze": {}, "sums": {}, "held": {"weight": 0}}, groups={"n_rollout": 2, "groups_per_step": 2}
    )
    return found, found.core.groups.outcomes


def test_rates_and_the_commonest_cause_are_counted_by_environment_and_survive_a_restart() -> None:
    core, outcomes = a_stage()
    for reason in (VALUE_ERROR, VALUE_ERROR, "not answered in time"):
        outcomes.failed("maze", reason)
    outcomes.failed("maze", "KeyError: 'x' (mine.py, line 3, in pay)", "score: mine.py:pay raised KeyError")
    outcomes.succeeded("maze")
    outcomes.succeeded("sums")
    core.round()
    scored = "failed.maze/score: mine.py:pay raised KeyError"
    assert {"failed.maze/environment step: ValueError", scored} <= set(core.changes.counters)
    assert core.changes.meta[FAILURES][scored] == "KeyError: 'x' (mine.py, line 3, in pay)"
    maze, sums = (outcomes.summary()[name] for name in ("maze", "sums"))
    assert (maze.succeeded, maze.failed, maze.commonest) == (1, 4, "environment step: ValueError")
    assert maze.describe("maze") == (
        "environment maze: 4 of 5 rollouts failed, most often with environment step: ValueError (2 times); the newest: "
        "no such move in the maze"
    )
    assert (sums.succeeded, sums.failed) == (1, 0)
    assert list(outcomes.header()) == ["maze"]


def test_a_run_ends_when_an_environment_never_succeeded_and_says_why_in_one_sentence() -> None:
    core, outcomes = a_stage()
    outcomes.succeeded("sums")
    for _ in range(3):
        outcomes.failed("maze", VALUE_ERROR)
    assert outcomes.hopeless() == "", "what it needs may still be starting"
    core.round(FAILING_SECONDS)
    assert outcomes.hopeless().startswith(
        "environment maze: all 3 rollouts failed, most often with environment step: ValueError; the newest: no such "
        "move in the maze. Expected at least one that succeeds within 3: fix what fails"
    )


@pytest.mark.parametrize("environment", ["maze", "held"])
def test_a_run_goes_on_where_one_rollout_succeeded_engines_are_away_or_only_an_evaluation_fails(
    environment: str,
) -> None:
    core, outcomes = a_stage()
    for _ in range(100):
        outcomes.failed("sums", "engine: EngineUnavailable: http://127.0.0.1:1 does not answer")
        outcomes.failed(environment, VALUE_ERROR)
    if environment == "maze":
        outcomes.succeeded("maze")
    core.round(FAILING_SECONDS)
    assert outcomes.hopeless() == ""


def test_causes_without_end_are_counted_together() -> None:
    _, outcomes = a_stage()
    for number in range(100):
        outcomes.failed("maze", f"environment step: Error{number}: x")
    causes = outcomes.summary()["maze"].causes
    assert len(causes) == CAUSES_MAX + 1 and causes["other"] == 100 - CAUSES_MAX


async def test_the_stage_ends_with_the_reason_and_what_failed_is_durable_and_no_reward_of_0(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pipeline.stage.group_records.FAILING_SECONDS", 0.0)
    monkeypatch.setattr("pipeline.stage.group_records.FAILURES_MAX", 6)
    config = configuration(tmp_path, groups={"n_rollout": 3, "groups_per_step": 2})
    network, trainer = MemoryNetwork(), InstantLearner(4, 3, 2)
    player = InstantActor(status=TrajectoryStatus.ERROR)
    why = pytest.RaisesExc(EnvironmentFailing, match="environment a: all .* most often with simulation: injected")
    with anyio.fail_after(60), pytest.RaisesGroup(why, flatten_subgroups=True):
        async with stage(config, network), playing(network, trainer, player):
            await anyio.sleep_forever()
    ledger = read_ledger(tmp_path / "r" / "replay.sqlite", rows=True)
    assert ledger.audit() == []
    assert ledger.outcomes["a"].failed >= 6 and ledger.outcomes["a"].succeeded == 0
    assert ledger.trajectories.get("trained", 0) == ledger.trajectories.get("held", 0) == 0
