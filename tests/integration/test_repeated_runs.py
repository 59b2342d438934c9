"""Updates of whole runs, through real processes, are made again bit for bit."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from tests.support.repeated import repeated

ROOT = Path(__file__).parents[2]
PLUGIN = ROOT / "tests" / "support" / "number_tools.py"
RUN_SECONDS_MAX = 600
"""A guard against hanging, far above what a run takes."""
BUTTONS = (
    f"environments={{buttons: {{name: '{PLUGIN}:Buttons', tasks: 8, max_turns: 4, loop: {{name: "
    f"'{PLUGIN}:NumberTools', options: {{tell_schemas: false}}}}}}}}"
)


def test_updates_of_rollouts_with_tools_that_earned_rewards_are_the_same(tmp_path: Path, forked_run: partial) -> None:
    overrides = [BUTTONS, "run.total_steps=4", "checkpoint.every=2", "groups.groups_per_step=4"]
    with forked_run(ROOT / "configs" / "tiny.yaml", tmp_path, "tools", overrides) as run:
        assert run.finish(RUN_SECONDS_MAX) == 0, run.tail()
        for step in run.steps():
            assert step["signals"]["tool_calls"] > 0 and step["reward_std"] > 0 and step["grad_norm"] > 0
        assert run.ledger(rows=True).audit() == []
    assert repeated(run.directory.path) == dict.fromkeys(range(1, 5), ())


def test_updates_of_the_run_file_with_replay_are_the_same(tmp_path: Path, forked_run: partial) -> None:
    with forked_run(ROOT / "configs" / "replay_tiny.yaml", tmp_path, "replay", ["run.total_steps=8"]) as run:
        assert run.finish(RUN_SECONDS_MAX) == 0, run.tail()
        assert any(step["n_replayed"] > 0 and step["grad_norm"] > 0 for step in run.steps())
    assert repeated(run.directory.path) == dict.fromkeys(range(1, 9), ())
