"""A run whose disk is full, or refuses every write, for a while continues by itself, and nothing is lost. One whose
directory is gone ends."""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from tests.support.faulty_disk import faulty_disk
from tests.support.full_disk import keep_full, small_disk
from tests.support.run_handle import start_run

TINY = Path(__file__).parents[2] / "configs" / "tiny.yaml"
FILES_OF_A_PROCESS = (("processes", "json"), ("logs", "log"))
SECONDS = 6.0
"""For how long the disk is full. Longer times: ``python -m benchmarks.damage disk``."""
FINISH_SECONDS_MAX = 240
STEPS = 24
"""So many that the disk is full before the last."""


def test_a_run_waits_for_a_full_disk_and_loses_nothing(tmp_path: Path, forked_run: partial) -> None:
    overrides = [f"run.total_steps={STEPS}", "checkpoint.every=2"]
    with small_disk(tmp_path / "disk", 64) as disk, forked_run(TINY, disk, "full", overrides) as run:
        run.until_step(3, FINISH_SECONDS_MAX)
        before = len(run.steps())
        keep_full(disk, SECONDS)
        assert len(run.steps()) <= before + 2
        assert run.finish(FINISH_SECONDS_MAX) == 0, run.tail()
        assert [step["step"] for step in run.steps()] == list(range(1, STEPS + 1))
        assert run.ledger(rows=True).audit() == []
        assert run.ledger().trajectories["trained"] == STEPS * 16 * 8
        assert run.ledger().trajectories.get("rolled_back", 0) == 0
        states = json.loads(run.directory.processes_file.read_bytes())
        assert {name: state["restarts"] for name, state in states.items() if state["restarts"]} == {}
        assert "waiting for disk" in run.tail()
        assert [path for path in disk.rglob(".*") if path.name.startswith(".writing-")] == []


@pytest.mark.slow
def test_a_run_waits_while_the_file_system_refuses_every_write_and_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    numbers = (errno.EIO, errno.EROFS)
    overrides = [f"run.total_steps={STEPS}", "checkpoint.every=2"]
    with (
        faulty_disk(tmp_path, tmp_path / "runs" / "faulty", monkeypatch) as control,
        start_run(TINY, tmp_path / "runs", "faulty", overrides) as run,
    ):
        for number in numbers:
            run.until_step(len(run.steps()) + 3, FINISH_SECONDS_MAX)
            control.write_text(str(number))
            time.sleep(SECONDS)
            control.unlink()
            file, since = run.directory.processes_file, time.time()
            run.until("the status", lambda: file.stat().st_mtime > since, FINISH_SECONDS_MAX)  # noqa: B023
        assert run.finish(FINISH_SECONDS_MAX) == 0, run.tail()
        assert [step["step"] for step in run.steps()] == list(range(1, STEPS + 1))
        assert run.ledger(rows=True).audit() == []
        assert run.ledger().trajectories["trained"] == STEPS * 16 * 8
        states = json.loads(run.directory.processes_file.read_bytes())
        assert {name: state["restarts"] for name, state in states.items() if state["restarts"]} == {}
        for number in numbers:
            assert f"cannot be written now: {os.strerror(number)}" in run.output.read_text()


OPTIONAL = (
    "processes.json",
    "outcome.json",
    "finished.json",
    "curves.png",
    "traces",
    *(f"{folder}/{name}.{end}" for name in ("replay", "learner", "actor-0") for folder, end in FILES_OF_A_PROCESS),
)
"""Files that a run can do without."""


def test_a_run_does_without_its_status_log_and_process_files(tmp_path: Path, forked_run: partial) -> None:
    with forked_run(TINY, tmp_path, "without", ["run.total_steps=30"]) as run:
        run.until_step(2, FINISH_SECONDS_MAX)
        killed = [run.pid(name) for name in ("actor-0", "learner", "replay")]
        for name in OPTIONAL:
            path = run.directory.path / name
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)
            if name == "traces":
                path.touch()
            else:
                (path / "inside").mkdir(parents=True)
        for pid in killed:
            assert pid is not None
            os.kill(pid, signal.SIGKILL)
        assert run.finish(FINISH_SECONDS_MAX) == 0, run.output.read_text()
        said = run.output.read_text()
        assert [step["step"] for step in run.steps()][-1] == 30
        assert f"waiting for disk: {run.directory.processes_file} cannot be written now: Is a directory" in said
        for name in ("replay", "learner", "actor-0"):
            assert f"what {name} says is lost: {run.directory.log_file(name)} cannot be written" in said
            assert f"{name} ended (killed by SIGKILL); restart 1" in said and "restart 2" not in said


def remove(directory: Path) -> None:
    while directory.exists():
        shutil.rmtree(directory, ignore_errors=True)  # files come meanwhile


def replace(directory: Path) -> None:
    shutil.copytree(directory, directory.with_name("copy"), symlinks=True)
    directory.rename(directory.with_name("moved"))
    directory.with_name("copy").rename(directory)


@pytest.mark.parametrize(
    "become",
    [lambda directory: directory.rename(directory.with_name("elsewhere")), remove, replace],
    ids=["moved", "removed", "replaced"],
)
def test_a_run_whose_directory_is_gone_ends_and_says_so(
    tmp_path: Path, forked_run: partial, become: Callable[[Path], object]
) -> None:
    with forked_run(TINY, tmp_path, "gone", ["run.total_steps=100000"]) as run:
        run.until_step(2, FINISH_SECONDS_MAX)
        started = time.monotonic()
        become(run.directory.path)
        assert run.finish(FINISH_SECONDS_MAX) == 2, run.output.read_text()
        assert time.monotonic() - started < 60
        said = f"{run.directory.path} was moved, removed or replaced while the run used it"
        assert said in run.output.read_text()
        assert run.directory.path.exists() is (become is replace), "nothing is written there again"
