"""The whole loop through real processes: embedded engine, actor, replay stage and learner under the supervisor."""

from __future__ import annotations

import json
import os
import re
import signal
import sqlite3
from contextlib import closing
from functools import partial
from pathlib import Path

import psutil
import pytest

from grafana.targets import targets_of_run
from pipeline.config.load import load
from pipeline.runtime.process import ExitCode
from pipeline.supervisor.forecast import forecast, measure
from tests.support.damage import flip
from tests.support.repeated import repeated
from tests.support.run_handle import RunHandle, start_run

TINY = Path(__file__).parents[2] / "configs" / "tiny.yaml"
ROLES = ("replay", "learner", "actor", "engine")
START_SECONDS_MAX = 180
LEARN_SECONDS_MAX = 240
"""Guards against hanging, far above what a run takes."""


def family(pid: int) -> list[psutil.Process]:
    return psutil.Process(pid).children(recursive=True)


def assert_accounts_add_up(run: RunHandle) -> None:
    ledger = run.ledger(rows=True)
    assert ledger.audit() == []
    assert ledger.orders["in_flight"] == 0


@pytest.mark.smoke
def test_tiny_model_doubles_its_success_rate_while_generation_and_training_overlap(tmp_path: Path) -> None:
    with start_run(TINY, tmp_path, "learn", ["run.total_steps=30"]) as run:
        run.until_step(3, START_SECONDS_MAX)
        assert {target.job for target in targets_of_run(run.directory.path)} >= {f"afterplay-{r}" for r in ROLES}
        assert run.metric("replay", "replay_orders_issued_total") >= 3 * 16 * 8
        assert run.metric("actor-0", "actor_trajectories_total", 'outcome="complete"') >= 3 * 16 * 8
        assert run.metric("learner", "learner_updates_total") >= 3
        assert run.metric("learner", "learner_policy_version") >= 2
        assert run.finish(LEARN_SECONDS_MAX) == 0, run.tail()
        solved = [step["signals"]["solved"] for step in run.steps()]
        assert sum(solved[-5:]) / 5 >= 2 * sum(solved[:3]) / 3, solved
        assert_accounts_add_up(run)
        assert run.directory.curves_file.stat().st_size > 10_000
        assert max(step["staleness_max"] for step in run.steps()) <= 1
        trained = [(step["started"], step["finished"]) for step in run.steps()]
        with closing(sqlite3.connect(run.directory.store_file)) as store:
            received = [row[0] for row in store.execute("SELECT received_at FROM trajectories")]
    assert any(start < at < stop for start, stop in trained for at in received)
    config = load(run.directory.config_file, environment={})
    speeds, measured = measure(config, run.directory)
    outlook, _ = forecast(config, speeds, measured.updates_left)
    assert 1 / 3 < outlook.update_seconds / measured.update_seconds < 3, "on shared cores, too"
    assert outlook.staleness == pytest.approx(measured.staleness, abs=1)


def test_staleness_bound_zero_trains_strictly_on_policy(tmp_path: Path, forked_run: partial) -> None:
    overrides = ["staleness.max=0", "run.total_steps=8", "groups.groups_per_step=8"]
    with forked_run(TINY, tmp_path, "onpolicy", overrides) as run:
        assert run.finish(LEARN_SECONDS_MAX) == 0, run.tail()
        for step in run.steps():
            assert step["staleness_max"] == 0
            assert step["ratio_min"] == pytest.approx(1.0, abs=1e-3)
            assert step["ratio_max"] == pytest.approx(1.0, abs=1e-3)
            assert step["ess_ratio"] == pytest.approx(1.0, abs=1e-3)


STEPS = 30
"""Of the run with kills: enough that training goes on after the last one."""


def test_killed_roles_restart_alone_and_the_accounts_add_up(tmp_path: Path, forked_run: partial) -> None:
    overrides = [f"run.total_steps={STEPS}", "groups.groups_per_step=8", "checkpoint.every=5"]
    with forked_run(TINY, tmp_path, "kill", overrides) as run:
        step = run.until_step(3, START_SECONDS_MAX)["step"]
        for name in ("actor-0", "replay", "learner"):
            before = {role: run.pid(role) for role in ("actor-0", "replay", "learner")}
            victim = before[name]
            assert victim is not None
            os.kill(victim, signal.SIGKILL)
            run.until(f"a new {name}", lambda n=name, v=victim: run.pid(n) not in (None, v), START_SECONDS_MAX)
            updates = run.ledger().updates
            run.until("training going on", lambda u=updates: run.ledger().updates >= u + 2, START_SECONDS_MAX)
            after = {role: run.pid(role) for role in ("actor-0", "replay", "learner")}
            assert {r for r in before if before[r] != after[r]} == {name}
        assert run.finish(LEARN_SECONDS_MAX) == 0, run.tail()
        steps = [s["step"] for s in run.steps()]
        assert steps == sorted(set(steps)) and len(steps) == STEPS and step >= 3
        assert_accounts_add_up(run)
        ledger = run.ledger()
        assert ledger.groups["trained"] == STEPS * 8
        assert ledger.trajectories["trained"] == STEPS * 8 * 8


def test_interrupted_run_ends_within_ten_seconds_leaves_no_process_and_goes_on(
    tmp_path: Path, forked_run: partial
) -> None:
    overrides = ["checkpoint.every=100000"]
    with forked_run(TINY, tmp_path, "interrupt", [*overrides, "run.total_steps=100000"]) as run:
        run.until_step(3, START_SECONDS_MAX)
        children = family(run.process.pid)
        assert len(children) >= 4
        assert run.interrupt() < 10
        assert [c for c in children if c.is_running() and c.status() != psutil.STATUS_ZOMBIE] == []
        assert run.ledger().audit() == []
        step = run.steps()[-1]["step"]
        assert f"the checkpoint has step {step}: the run continues with step {step + 1}" in run.output.read_text()
    changes = [f"run.total_steps={step + 5}", "learner.learning_rate=1e-3"]
    with forked_run(TINY, tmp_path, "interrupt", [*overrides, *changes]) as run:
        assert run.finish(LEARN_SECONDS_MAX) == 0, run.tail()
        assert "  learner.learning_rate: 0.003 -> 0.001\n" in run.output.read_text()
        first, changed = map(json.loads, run.directory.history_file.read_text().splitlines())
        assert first["step"] == 0
        assert changed["changes"] == {
            "run.total_steps": [100000, step + 5],
            "learner.learning_rate": [3e-3, 1e-3],
        }
        assert changed["step"] == step >= 3
        assert run.ledger().groups.get("rolled_back", 0) == 0, "no update was made again"
        assert [s["step"] for s in run.steps()] == list(range(1, step + 6))
        assert_accounts_add_up(run)
        from transformers import AutoModelForCausalLM

        newest = max(p for p in run.directory.checkpoints.iterdir() if (p / "model").is_dir())
        AutoModelForCausalLM.from_pretrained(newest / "model")


def test_a_run_goes_on_from_the_checkpoint_before_a_damaged_one_and_its_books_are_right(
    tmp_path: Path, forked_run: partial
) -> None:
    overrides = [
        f"run.total_steps={(steps := 30)}", "checkpoint.every=2", "groups.groups_per_step=8",
        "replay.keep_trained=1000",
    ]  # fmt: skip
    with forked_run(TINY, tmp_path, "damaged", overrides) as run:
        run.until_step(5, START_SECONDS_MAX)
        run.interrupt()
    newest, older = sorted(run.directory.checkpoints.glob("u??????"), reverse=True)
    flip(newest / "training.pt")
    with forked_run(TINY, tmp_path, "damaged", overrides) as run:
        assert run.finish(LEARN_SECONDS_MAX) == 0, run.tail()
        assert f"so training resumes from {older.name}" in run.directory.log_file("learner").read_text()
        assert_accounts_add_up(run)
        ledger = run.ledger()
        with closing(sqlite3.connect(run.directory.store_file)) as store:
            made = dict(store.execute("SELECT update_number, count(*) FROM groups WHERE state = 'trained' GROUP BY 1"))
        assert made == dict.fromkeys(range(steps), 8)
        assert ledger.trajectories["trained"] == steps * 8 * 8
        assert ledger.groups.get("cancelled.lost", 0) == 0, "replay.keep_trained keeps groups back to the older one"
    assert repeated(run.directory.path) == dict.fromkeys(range(1, steps + 1), ()), (
        "bit for bit, before the damage and behind it"
    )


def test_a_run_with_a_wrong_plug_in_ends_with_a_sentence(tmp_path: Path, forked_run: partial) -> None:
    with forked_run(TINY, tmp_path, "wrong", ["environments.guess.name=number_gess"]) as run:
        assert run.finish(START_SECONDS_MAX) == ExitCode.CONFIGURATION, run.tail()
        said = run.output.read_text()
        assert re.search(r"^(preflight|actor-0) stopped the run after ", said, re.MULTILINE), "whichever finds it first"
        assert "Traceback" not in said
        assert "\nenvironments.guess: there is no environment 'number_gess'; there are" in said


def test_supervisor_and_reaper_killed_in_one_instant_leave_no_process_and_the_run_goes_on(tmp_path: Path) -> None:
    overrides = ["run.total_steps=1000", "checkpoint.every=1"]
    with start_run(TINY, tmp_path, "orphan", overrides) as run:
        run.until_step(2, START_SECONDS_MAX)
        children = family(run.process.pid)
        [reaper] = [child for child in children if any("children.py" in word for word in child.cmdline())
                    and child.ppid() == run.process.pid]  # fmt: skip
        run.process.send_signal(signal.SIGSTOP)  # it would start another reaper
        reaper.kill()
        run.process.kill()
        run.process.wait()
        _, alive = psutil.wait_procs(children, timeout=15)
        assert alive == []
        step = run.steps()[-1]["step"]
    with start_run(TINY, tmp_path, "orphan", overrides) as run:
        run.until_step(step + 1, START_SECONDS_MAX)
        run.interrupt()
        assert run.ledger().audit() == []


def test_supervisor_killed_leaves_no_process(tmp_path: Path, forked_run: partial) -> None:
    with forked_run(TINY, tmp_path, "orphan", ["run.total_steps=1000"]) as run:
        run.until_step(1, START_SECONDS_MAX)
        children = family(run.process.pid)
        run.process.kill()
        run.process.wait()
        _, alive = psutil.wait_procs(children, timeout=15)
        assert alive == []
