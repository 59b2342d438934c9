"""Two real vLLM servers: most conversations stay where their prefix is, and all move when their engine dies."""

from __future__ import annotations

import pytest

from pipeline.config.load import load
from tests.end_to_end.recorded_runs import TWO_ENGINES_STEPS, TwoEnginesRun

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(1900)]


def test_turns_stay_on_their_engine_and_find_their_prefix(two_engines_run: TwoEnginesRun) -> None:
    config = load(two_engines_run.run.directory.config_file, environment={})
    block, trajectories = config.engine.block_size, two_engines_run.before
    assert block is not None
    assert len(trajectories) > config.groups.groups_per_step * config.groups.n_rollout, "more than the first step"
    stayed = [t for t in trajectories if len(t.engine.engine_ids) == 1]
    assert 4 * len(stayed) > len(trajectories), "others move to an engine that came up, answers again or is less busy"
    assert len({url for t in trajectories for url in t.engine.engine_ids}) == 2
    reusable = 0
    for trajectory in stayed:
        seen = 0
        for turn in trajectory.turns:
            reusable += (seen // block) * block  # whole blocks of what this conversation sent or sampled before
            seen += len(turn.context) + len(turn.completion)
    assert two_engines_run.hits >= 0.9 * reusable, (two_engines_run.hits, reusable)


def test_a_killed_engine_loses_no_order(two_engines_run: TwoEnginesRun) -> None:
    run = two_engines_run.run
    config = load(run.directory.config_file, environment={})
    assert two_engines_run.exit_code == 0, run.tail()
    ledger = run.ledger(rows=True)
    assert ledger.audit() == []
    assert ledger.groups["trained"] == TWO_ENGINES_STEPS * config.groups.groups_per_step
    assert not [name for name in ledger.groups if name.startswith("cancelled") and ledger.groups[name]]
    assert run.directory.curves_file.is_file()
