"""One run in one directory: the lock, and what ``--fresh`` and ``run.resume`` mean."""

from __future__ import annotations

import fcntl
import os
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager

import orjson

from pipeline.errors import AfterplayError, ConfigurationError
from pipeline.rundir import RunDirectory, read_json


class RunIsAlive(AfterplayError):
    """The directory belongs to a run that lives."""


@contextmanager
def claim(directory: RunDirectory, mark: bool = True) -> Iterator[int]:
    """Hold the directory's lock; yields its file descriptor. The kernel frees it when the last holder is gone.
    ``mark`` writes our process id into it, for the message of the next one.

    Raises :class:`RunIsAlive` that names the process.
    """
    directory.path.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(directory.lock_file, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            holder = read_json(directory.lock_file) or {}
            raise RunIsAlive(
                f"{directory.path} belongs to a run that is alive (supervisor pid {holder.get('pid', 'unknown')}). "
                "Stop it (Ctrl-C there), or give this run another name: --set run.name=NAME"
            ) from error
        if mark:
            os.ftruncate(descriptor, 0)
            os.write(descriptor, orjson.dumps({"pid": os.getpid(), "started_at": time.time()}))
        yield descriptor
    finally:
        os.close(descriptor)


def make_room(directory: RunDirectory, resume: str, fresh: bool) -> None:
    """Empty the directory for ``--fresh``; refuse one with a run in it for ``run.resume: never``.

    The prepared model stays: it is made again only when it does not fit the run file.
    Raises :class:`ConfigurationError`.
    """
    things = [p for p in directory.path.iterdir() if p != directory.lock_file]
    began = any(p.exists() for p in (directory.config_file, directory.metrics_file, directory.store_file))
    if fresh:
        if things and not began:
            raise ConfigurationError(
                f"--fresh: expected a run directory of Afterplay at {directory.path}, got a folder with "
                f"{things[0].name} and no config.yaml. Nothing was removed; give the run another name or directory"
            )
        for path in things:
            if path == directory.model:
                continue
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink()
    elif resume == "never" and began:
        raise ConfigurationError(
            f"run.resume is never: expected {directory.path} to hold no run, got one. "
            "Use --fresh to start anew there, or give the run another name"
        )
