"""A write that finds the disk full is tried again until there is room, and leaves nothing behind meanwhile."""

from __future__ import annotations

import errno
import os
import resource
import shutil
import sqlite3
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
import pytest
import torch
from safetensors.torch import save_file

from learner.process.recorder import MetricsLog
from pipeline.config import RunConfig
from pipeline.errors import ConfigurationError, StoreError
from pipeline.runtime import disk as disk_wait
from pipeline.runtime.children import OrphanReaper
from pipeline.runtime.disk import FULL, STATES, DiskBudget, disk_fault, left_out, shortage, when_room
from pipeline.runtime.folders import atomic_folder
from pipeline.runtime.process import RoleContext
from pipeline.runtime.run_directory import RunDirectory
from pipeline.store.evaluation_results import read_results, write_results
from pipeline.supervisor import shell
from pipeline.supervisor.restarts import RestartLimits
from pipeline.supervisor.shell import bound_log
from pipeline.transport.messages import Kind
from tests.support.full_disk import full_writes
from tests.unit.stage.test_replay_core import started

NO_ROOM = OSError(errno.ENOSPC, "No space left on device")


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk_wait, "RETRY_SECONDS", 0.001)


def failing(times: int, error: Exception = NO_ROOM) -> Callable[..., int]:
    """An operation that fails so often; then it returns how often it was called."""
    calls = 0

    def operation(*_: Any, **__: Any) -> int:
        nonlocal calls
        calls += 1
        if calls <= times:
            raise error
        return calls

    return operation


def test_an_operation_is_tried_again_until_there_is_room(tmp_path: Path) -> None:
    assert anyio.run(when_room, failing(3), tmp_path, "a file") == 4
    assert disk_wait.wait_for_room(failing(3), tmp_path, "a file") == 4
    assert shortage() is None


@pytest.mark.parametrize("number", sorted(STATES), ids=errno.errorcode.get)
def test_whatever_the_file_system_refuses_is_waited_for_and_named(tmp_path: Path, number: int) -> None:
    error = OSError(number, os.strerror(number), str(tmp_path))
    said: list[str] = []

    def operation() -> None:
        if (waiting := shortage()) is not None:
            said.append(waiting.text)
        if len(said) < 2:
            raise error

    anyio.run(when_room, operation, tmp_path, "the checkpoint of step 7")
    assert shortage() is None
    expected = "needs room on" if number in FULL else f"waits for {tmp_path}: {os.strerror(number)} ("
    assert len(set(said)) == 1 and said[0].startswith(f"the checkpoint of step 7 {expected}")
    why = left_out(failing(1, error), tmp_path)
    assert (os.strerror(number) in why) is (number not in FULL) and str(tmp_path) in why
    caused = StoreError("the store could not be written")
    caused.__cause__ = error
    assert disk_fault(caused, tmp_path) is error
    assert disk_fault(Exception(f"I/O error: it failed (os error {number})"), tmp_path).errno == number


@pytest.mark.parametrize(
    "code", ["FULL", "IOERR", "IOERR_FSYNC", "READONLY_DIRECTORY", "CANTOPEN", "BUSY", "BUSY_SNAPSHOT"]
)
def test_errors_of_sqlite_that_may_end_are_waited_for(tmp_path: Path, code: str) -> None:
    error = sqlite3.OperationalError("it says so")
    error.sqlite_errorcode = getattr(sqlite3, f"SQLITE_{code}")
    assert anyio.run(when_room, failing(2, error), tmp_path, "the store") == 3
    for damage in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_CONSTRAINT):
        error.sqlite_errorcode = damage
        assert disk_fault(error, tmp_path) is None


def test_an_error_that_is_none_of_the_file_system_is_raised_at_once(tmp_path: Path) -> None:
    ours = ConfigurationError("the run file is wrong")
    ours.__cause__ = OSError(errno.EIO, "Input/output error")
    for error in (OSError(errno.EINVAL, "Invalid argument"), OSError(errno.EBADF, "Bad file"), ValueError("no"), ours):
        with pytest.raises(type(error)):
            anyio.run(when_room, failing(1, error), tmp_path, "a file")


def test_quotas_and_libraries_count_as_full_whatever_they_raise(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    error = RuntimeError("PytorchStreamWriter failed writing file data/0: file write failed")
    assert disk_fault(error, tmp_path).errno == errno.EIO, "torch does not tell which"
    assert disk_fault(RuntimeError("it does not fit"), tmp_path) is None
    monkeypatch.setattr(disk_wait, "free_bytes", lambda where: 0)
    assert disk_fault(error, tmp_path).errno == errno.ENOSPC
    with pytest.raises(OSError, match="No space left"), atomic_folder(tmp_path / "weights"):
        raise error
    assert list(tmp_path.iterdir()) == []


def test_torch_may_fail_at_any_byte_of_a_file(tmp_path: Path) -> None:
    state, file = {"weights": torch.zeros(5_000), "name": "x" * 3_000}, tmp_path / "training.pt"
    torch.save(state, file)
    most = resource.getrlimit(resource.RLIMIT_FSIZE)
    for n_bytes in range(0, file.stat().st_size, 509):
        resource.setrlimit(resource.RLIMIT_FSIZE, (n_bytes, most[1]))
        try:
            with pytest.raises(RuntimeError) as raised:
                torch.save(state, file)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, most)
        assert (fault := disk_fault(raised.value, tmp_path)) and fault.errno == errno.EIO, raised.value


@pytest.mark.parametrize("fails", [False, True])
def test_what_a_library_makes_again_below_a_run_directory_that_is_gone_does_not_stay(
    tmp_path: Path, fails: bool
) -> None:
    run = tmp_path / "run"
    run.mkdir()
    with pytest.raises(FileNotFoundError), atomic_folder(run / "weights" / "v000001") as folder:
        run.rename(tmp_path / "elsewhere")
        folder.mkdir(parents=True)
        (folder / "model.safetensors").touch()
        if fails:
            raise FileNotFoundError
    assert [path.name for path in tmp_path.iterdir()] == ["elsewhere"]


@pytest.mark.parametrize(
    ("umask", "folder_mode", "file_mode"), [(0o022, 0o755, 0o644), (0o027, 0o750, 0o640), (0o077, 0o700, 0o600)]
)
def test_a_folder_that_others_may_read_has_files_that_they_may_read(
    tmp_path: Path, umask: int, folder_mode: int, file_mode: int
) -> None:
    """safetensors makes files for their owner alone, and engines may run as another user."""
    before = os.umask(umask)
    try:
        with atomic_folder(tmp_path / "weights" / "v000001") as folder:
            save_file({"w": torch.zeros(2)}, folder / "model.safetensors")
            (folder / "model").mkdir()
            (folder / "model" / "config.json").write_text("{}")
            (folder / "run.sh").touch(0o700)
    finally:
        os.umask(before)
    written = tmp_path / "weights" / "v000001"
    modes = {path.name: path.stat().st_mode & 0o777 for path in (written, *written.rglob("*"))}
    files = {"model.safetensors": file_mode, "config.json": file_mode, "run.sh": file_mode | 0o100}
    assert modes == {"v000001": folder_mode, "model": folder_mode, **files}


def test_a_role_that_waits_for_disk_says_what_is_missing_where_and_is_healthy(tmp_path: Path) -> None:
    ctx = RoleContext("replay", 0, RunConfig.model_validate({"environments": {"a": {}}}))
    ctx.report("serving")
    said = []

    def operation() -> None:
        said.append(ctx.health())
        if len(said) < 3:
            raise NO_ROOM

    anyio.run(when_room, operation, tmp_path, "the checkpoint of step 7", 2_000_000)
    assert [ready for ready, _ in said] == [True] * 3
    assert said[2][1]["state"] == "waiting for disk"
    assert said[2][1]["reason"].startswith(f"the checkpoint of step 7 needs 2 MB on {tmp_path}, which has")
    assert ctx.health()[1]["state"] == "serving"


def test_a_wait_for_disk_ends_when_it_is_cancelled(tmp_path: Path) -> None:
    async def stop() -> None:
        with anyio.move_on_after(0.01) as scope:
            await when_room(failing(10**9), tmp_path, "a file")
        assert scope.cancelled_caught

    anyio.run(stop)
    assert shortage() is None


@pytest.mark.parametrize("bytes_left", [0, 1, 7])
def test_a_line_is_written_whole_or_not_at_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bytes_left: int
) -> None:
    with MetricsLog(tmp_path / "metrics.jsonl", 0) as log:
        log.write({"step": 1})
        with full_writes(monkeypatch, bytes_left), pytest.raises(OSError, match="No space left"):
            log.write({"step": 2})
        assert (tmp_path / "metrics.jsonl").read_bytes() == b'{"step":1}\n'
        log.write({"step": 2})
    assert (tmp_path / "metrics.jsonl").read_bytes() == b'{"step":1}\n{"step":2}\n'
    path = tmp_path / "evaluations.jsonl"
    write = partial(write_results, path, [{"evaluation": 0, "score": 1.0}])
    with full_writes(monkeypatch, bytes_left), pytest.raises(OSError, match="No space left"):
        write()
    assert path.read_bytes() == b""
    write()
    assert len(read_results(path)) == 1


def test_a_log_is_emptied_at_its_bound_and_its_process_continues_in_the_same_file(tmp_path: Path) -> None:
    path = tmp_path / "actor-0.log"
    with path.open("ab", buffering=0) as log:
        for number in range(1000):
            log.write(b"line %04d\n" % number)
            bound_log(path, 500)
    older = (tmp_path / "actor-0.log.1").read_bytes()
    assert path.stat().st_size <= 510 and len(older) <= 510
    assert (older + path.read_bytes()).endswith(b"line 0998\nline 0999\n")
    assert b"\0" not in path.read_bytes()
    bound_log(tmp_path / "missing.log", 500)


def test_a_full_disk_empties_a_log_without_its_older_half(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "replay.log"
    path.write_bytes(bytes(1000))

    def full(*_: object) -> None:
        raise NO_ROOM

    monkeypatch.setattr(shutil, "copyfile", full)
    bound_log(path, 500)
    assert path.stat().st_size == 0
    assert list(tmp_path.iterdir()) == [path]


def filled(directory: RunDirectory) -> None:
    """Of 1000 bytes each: a model, three files of traces, a log and its older half."""
    names = [*(f"traces/failed-{n:08d}.traces" for n in range(3)), "logs/replay.log", "logs/replay.log.1", "model/w"]
    for name in names:
        path = directory.path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(bytes(1000))


@pytest.mark.parametrize(
    ("bytes_max", "left", "exceeded"),
    [(None, 6, False), (6000, 6, False), (5000, 5, False), (3500, 3, False), (2000, 3, True)],
)
def test_a_directory_over_its_budget_gives_up_what_may_go_and_then_pauses(
    tmp_path: Path, bytes_max: int | None, left: int, exceeded: bool
) -> None:
    directory = RunDirectory(tmp_path)
    filled(directory)
    budget = DiskBudget(directory, bytes_max)
    budget.look()
    files = sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file())
    assert len(files) == left
    assert {"logs/replay.log", "model/w", "traces/failed-00000002.traces"} <= set(files)
    assert bool(budget.exceeded) is exceeded
    assert budget.used == 1000 * left
    if exceeded:
        assert "run.disk_bytes_max" in budget.exceeded and "3 kB of 2 kB" in budget.exceeded
        (tmp_path / "model" / "w").write_bytes(b"")
        budget.look()
        assert budget.exceeded, "the directory has as much as its budget: not yet"
        (tmp_path / "logs" / "replay.log").write_bytes(b"")
        budget.look()
        assert not budget.exceeded


def test_no_group_is_admitted_while_the_budget_is_exceeded_and_open_ones_are_finished() -> None:
    stage = started()
    planned = stage.ledger().groups["planned"]
    stage.core.groups.paused = "room below run.disk_bytes_max"
    stage.answer_all()
    stage.round()
    groups = {s.header["group_id"] for s in stage.sent if s.kind is Kind.PLAN and s.header["update"] == 0}
    stage.tell(Kind.CONSUMED, update=0, group_ids=sorted(groups))
    stage.tell(Kind.VERSION, policy_version=1, updates=1)
    stage.round()
    assert stage.ledger().groups["planned"] == planned
    assert stage.ledger().groups["trained"] == len(groups) == 2
    assert stage.ledger().orders["in_flight"] == 0
    stage.core.groups.paused = ""
    stage.round()
    assert stage.ledger().groups["planned"] == planned + 2


def test_the_supervisor_continues_without_its_status_file_while_the_disk_is_full(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    supervisor = shell.Supervisor([], RestartLimits(), RunDirectory(tmp_path), OrphanReaper())
    supervisor._say = said.append
    monkeypatch.setattr(shell, "write_json_atomically", failing(2))
    for _ in range(3):
        supervisor._write_states()
    assert len(said) == 1 and said[0].startswith(f"waiting for disk: {tmp_path / 'processes.json'} has")
    assert not supervisor._unwritten
    monkeypatch.setattr(shell, "write_json_atomically", failing(1, OSError(errno.EIO, "Input/output error")))
    supervisor._write_states()
    assert said[1:] == [
        f"waiting for disk: {tmp_path / 'processes.json'} cannot be written now: Input/output error (EIO)"
    ]
