"""Folders that appear complete or not at all: write beside, fsync, rename."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from pipeline.runtime.disk_wait import disk_fault
from pipeline.runtime.rundir import sync

_TEMPORARY = ".writing-"


@contextmanager
def atomic_folder(target: Path) -> Iterator[Path]:
    """A scratch folder beside ``target`` that takes its name when the block ends without an error.

    All files are on disk before the rename. What was at ``target`` before is replaced. An error removes the scratch
    folder. Raises :class:`OSError` where the file system refuses it, whatever the libraries inside raise for that. The
    folder above ``target`` is made if it is missing, and none above that: a run directory that is gone stays gone.
    """
    scratch = target.with_name(f"{_TEMPORARY}{target.name}.{os.getpid()}")
    shutil.rmtree(scratch, ignore_errors=True)
    target.parent.mkdir(exist_ok=True)
    scratch.mkdir()
    try:
        yield scratch
        _open_to_readers(scratch)
        sync_tree(scratch)
        if target.exists():
            old = target.with_name(f"{_TEMPORARY}old-{target.name}.{os.getpid()}")
            os.rename(target, old)
            os.rename(scratch, target)
            shutil.rmtree(old, ignore_errors=True)
        else:
            os.rename(scratch, target)
        sync(target.parent)
    except Exception as error:
        fault = disk_fault(error, target.parent)  # before the scratch folder makes room again
        if fault is None or isinstance(error, OSError):
            raise
        number = fault.errno or 0
        raise OSError(number, f"{os.strerror(number)} ({error})", str(target)) from error
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _open_to_readers(folder: Path) -> None:
    """Let whoever may read ``folder`` read its files too: safetensors makes files that only their owner may read, and
    engines may run as another user."""
    readable = folder.stat().st_mode & 0o444
    for path in folder.rglob("*"):
        mode = path.stat().st_mode & 0o7777
        if path.is_file() and mode | readable != mode:
            path.chmod(mode | readable)


def remove_leftovers(parent: Path) -> None:
    """Remove scratch folders of processes that were killed. Only the one writer of ``parent`` may call it."""
    if parent.is_dir():
        for path in parent.glob(f"{_TEMPORARY}*"):
            shutil.rmtree(path, ignore_errors=True)


def sync_tree(folder: Path) -> None:
    """fsync every file and folder below ``folder``, and itself."""
    for root, _, names in os.walk(folder):
        for name in names:
            sync(Path(root) / name)
        sync(Path(root))
