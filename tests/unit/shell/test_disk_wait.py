"""A write that finds the disk full is tried again until there is room, and leaves nothing behind meanwhile."""

from __future__ import annotations

import errno
from collections.abc import Callable
from functools import partial
from pathlib import Path

import anyio
import anyio.to_thread
import pytest

from learner.recorder import MetricsLog
from pipeline.config import RunConfig
from pipeline.runtime import disk_wait
from pipeline.runtime.atomic_folder import atomic_folder
from pipeline.runtime.disk_wait import is_full, shortage, when_room
from pipeline.runtime.process import RoleContext
from pipeline.store.evaluation_results import read_results, write_results
from tests.support.full_disk import full_writes

FULL = OSError(errno.ENOSPC, "No space left on device")


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk_wait, "RETRY_SECONDS", 0.001)


def failing(times: int, error: Exception = FULL) -> Callable[[], int]:
    """An operation that fails so often; then it returns how often it was called."""
    calls = 0

    def operation() -> int:
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


def test_an_error_that_is_no_full_disk_is_raised_at_once(tmp_path: Path) -> None:
    for error in (OSError(errno.EIO, "Input/output error"), ValueError("no")):
        with pytest.raises(type(error)):
            anyio.run(when_room, failing(1, error), tmp_path, "a file")


def test_quotas_and_libraries_count_as_full_whatever_they_raise(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert is_full(OSError(errno.EDQUOT, "Disk quota exceeded"), tmp_path)
    assert is_full(Exception("I/O error: No space left on device (os error 28)"), tmp_path)
    error = RuntimeError("PytorchStreamWriter failed writing file data/0: file write failed")
    assert not is_full(error, tmp_path)
    monkeypatch.setattr(disk_wait, "free_bytes", lambda where: 0)
    assert is_full(error, tmp_path)
    with pytest.raises(OSError, match="No space left"), atomic_folder(tmp_path / "weights"):
        raise error
    assert list(tmp_path.iterdir()) == []


def test_a_role_that_waits_for_disk_says_what_is_missing_where_and_is_healthy(tmp_path: Path) -> None:
    ctx = RoleContext("replay", 0, RunConfig.model_validate({"environments": {"a": {}}}))
    ctx.report("serving")
    said = []

    def operation() -> None:
        said.append(ctx.health())
        if len(said) < 3:
            raise FULL

    anyio.run(when_room, operation, tmp_path, "the checkpoint of step 7", 2_000_000)
    assert [ready for ready, _ in said] == [True] * 3
    assert said[2][1]["state"] == "waiting for disk"
    assert said[2][1]["waiting_for"].startswith(f"the checkpoint of step 7 needs 2 MB on {tmp_path}, which has")
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
