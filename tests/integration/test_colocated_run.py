"""Engines and learner take turns on their devices, through real processes: engines, actor, replay stage, learner."""

from __future__ import annotations

import os
import re
import signal
from functools import partial
from pathlib import Path

import psutil
import pytest

from pipeline.runtime.run_directory import read_json
from tests.support.run_handle import RunHandle

TINY = Path(__file__).parents[2] / "configs" / "tiny.yaml"
RUN_SECONDS_MAX = 240
TURN = re.compile(r"(asleep \(level \d\)|awake) after (\d+) forward passes")
SLEEP = (
    "engine.colocate=sleep",
    "learner.offload=true",
    "groups.groups_per_step=4",
    "actor.concurrency=32",
    "checkpoint.every=2",
)


def turns(run: RunHandle, engine: int = 0) -> list[tuple[bool, int]]:
    """(asleep, forward passes of the engine until then) of each change, from the engine's log."""
    text = (run.directory.logs / f"engine-{engine}.log").read_text()
    return [(word.startswith("asleep"), int(count)) for word, count in TURN.findall(text)]


def restarts(run: RunHandle) -> dict[str, int]:
    states = read_json(run.directory.processes_file) or {}
    return {name: state["restarts"] for name, state in states.items()}


def assert_nothing_was_sampled_asleep(run: RunHandle, updates: int, engine: int = 0) -> None:
    changes = turns(run, engine)
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


@pytest.mark.slow
def test_two_engines_and_two_ranks_take_turns_also_after_a_rank_was_killed(tmp_path: Path, forked_run: partial) -> None:
    several = ("engine.replicas=2", "learner.ranks=2", "run.total_steps=6")
    with forked_run(TINY, tmp_path, "ranks", [*SLEEP, *several]) as run:
        run.until_step(2, RUN_SECONDS_MAX)
        learner = psutil.Process(run.pid("learner"))
        (rank,) = [each for each in learner.children() if "learner.process.rank_processes" in each.cmdline()]
        rank.kill()
        assert run.finish(RUN_SECONDS_MAX) == 0, run.tail()
        assert {name: count for name, count in restarts(run).items() if count} == {"learner": 1}
        assert [step["step"] for step in run.steps()] == list(range(1, 7))
        for engine in range(2):
            assert_nothing_was_sampled_asleep(run, 6, engine)
        assert_accounts_add_up(run, 6)
