"""Engine and learner take turns on one device, through real processes: engine, actor, replay stage, learner."""

from __future__ import annotations

import os
import re
import signal
from functools import partial
from pathlib import Path

from pipeline.runtime.run_directory import read_json
from tests.support.run_handle import RunHandle

TINY = Path(__file__).parents[2] / "configs" / "tiny.yaml"
RUN_SECONDS_MAX = 120
TURN = re.compile(r"(asleep \(level \d\)|awake) after (\d+) forward passes")
SLEEP = (
    "engine.colocate=sleep",
    "learner.offload=true",
    "groups.groups_per_step=4",
    "actor.concurrency=32",
    "checkpoint.every=2",
)


def turns(run: RunHandle) -> list[tuple[bool, int]]:
    """(asleep, forward passes of the engine until then) of each change, from the engine's log."""
    text = (run.directory.logs / "engine-0.log").read_text()
    return [(word.startswith("asleep"), int(count)) for word, count in TURN.findall(text)]


def restarts(run: RunHandle) -> dict[str, int]:
    states = read_json(run.directory.processes_file) or {}
    return {name: state["restarts"] for name, state in states.items()}


def assert_nothing_was_sampled_asleep(run: RunHandle, updates: int) -> None:
    changes = turns(run)
    assert [asleep for asleep, _ in changes[:2]] == [True, False]
    pairs = list(zip(changes[::2], changes[1::2], strict=True))
    assert all(fell[0] and not woke[0] and fell[1] == woke[1] for fell, woke in pairs), changes
    assert len(pairs) >= 1 + updates
    assert changes[-1][1] > changes[0][1]


def assert_accounts_add_up(run: RunHandle, updates: int) -> None:
    ledger = run.ledger(rows=True)
    assert ledger.audit() == []
    assert ledger.orders["in_flight"] == 0
    assert ledger.groups["trained"] == updates * 4
    assert ledger.groups.get("cancelled", 0) == 0


def test_engine_sleeps_through_every_update_and_keeps_its_requests(tmp_path: Path, forked_run: partial) -> None:
    with forked_run(TINY, tmp_path, "turns", [*SLEEP, "run.total_steps=3", "engine.sleep_level=2"]) as run:
        assert run.finish(RUN_SECONDS_MAX) == 0, run.tail()
        steps = run.steps()
        assert [step["step"] for step in steps] == [1, 2, 3]
        assert set(restarts(run).values()) == {0}
        assert_nothing_was_sampled_asleep(run, 3)
        assert_accounts_add_up(run, 3)
        log = (run.directory.logs / "learner.log").read_text()
        assert [f"version {version} is live in 1 engines" in log for version in range(5)] == [True] * 4 + [False]


def test_learner_killed_in_its_turn_leaves_no_engine_asleep(tmp_path: Path, forked_run: partial) -> None:
    with forked_run(TINY, tmp_path, "killed", [*SLEEP, "run.total_steps=20"]) as run:
        run.until_step(1, RUN_SECONDS_MAX)
        run.until("the engine to sleep again", lambda: len(turns(run)) >= 4 and turns(run)[-1][0], RUN_SECONDS_MAX)
        victim = run.pid("learner")
        assert victim is not None
        os.kill(victim, signal.SIGKILL)
        assert run.finish(RUN_SECONDS_MAX) == 0, run.tail()
        assert {name: count for name, count in restarts(run).items() if count} == {"learner": 1}
        assert [step["step"] for step in run.steps()] == list(range(1, 21))
        assert_nothing_was_sampled_asleep(run, 20)
        assert_accounts_add_up(run, 20)
