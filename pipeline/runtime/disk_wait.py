"""Waiting for disk: a write that finds the disk full is tried again until there is room.

A full disk, or a used-up quota, is a state of a process and not a failure of it. :func:`when_room` and
:func:`wait_for_room` try an operation again; the operation leaves nothing behind when it fails. Meanwhile
:func:`shortage` says what waits, ``/healthz`` reports the state ``waiting for disk``, and whoever needs the result
waits too: nothing is acknowledged, reported or counted before it is written.
"""

from __future__ import annotations

import errno
import logging
import os
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

import anyio
import anyio.to_thread

from pipeline.schema.state import RoleState

log = logging.getLogger("afterplay.disk")

RETRY_SECONDS = 0.5
"""Between two attempts."""
FREE_BYTES_MIN = 128 * 1024
"""With less free than this, an error of SQLite or torch that does not tell its cause counts as a full disk."""
_ERRORS = (errno.ENOSPC, errno.EDQUOT)
_SQLITE_FULL = 13
_TEXTS = tuple(f"os error {number}" for number in _ERRORS)
"""End of the messages that libraries in Rust (safetensors) give these errors."""

T = TypeVar("T")


@dataclass(slots=True, eq=False)
class Shortage:
    """An operation that waits for room. ``n_bytes``: what it is about to write, where that is known."""

    where: Path
    what: str
    n_bytes: int | None = None
    since: float = field(default_factory=time.monotonic)

    @property
    def text(self) -> str:
        """A clause: what waits, where, how much is missing."""
        free = free_bytes(self.where)
        needs = f"needs {size(self.n_bytes)} on" if self.n_bytes else "needs room on"
        return f"{self.what} {needs} {self.where}, which has {size(free)} free"


_SHORTAGES: list[Shortage] = []
"""Operations of this process that wait, oldest first."""
_ON_ATTEMPT: list[Callable[[], None]] = []


def on_attempt(call: Callable[[], None]) -> None:
    """``call`` is called after each attempt that found the disk full: whoever waits for disk does not hang."""
    _ON_ATTEMPT.append(call)


def shortage() -> Shortage | None:
    """The operation that has waited longest for room in this process; None: nothing waits."""
    found = list(_SHORTAGES)
    return found[0] if found else None


def shortage_seconds() -> float:
    """Seconds that a write has waited for room; 0: none waits."""
    found = shortage()
    return time.monotonic() - found.since if found is not None else 0.0


def is_full(error: BaseException | None, where: Path) -> bool:
    """True if ``error``, or what caused it, is that a write below ``where`` found no room."""
    while error is not None:
        if isinstance(error, OSError) and error.errno in _ERRORS:
            return True
        if (code := getattr(error, "sqlite_errorcode", None)) == _SQLITE_FULL:
            return True
        if any(text in str(error) for text in _TEXTS):
            return True
        if (code is not None or isinstance(error, RuntimeError)) and free_bytes(where) < FREE_BYTES_MIN:
            return True
        error = error.__cause__
    return False


async def when_room(
    operation: Callable[[], T], where: Path, what: str, n_bytes: int | None = None, *, abandon: bool = False
) -> T:
    """The result of ``operation``, which runs in a worker thread, once the disk of ``where`` has room for it.

    An attempt that has begun is finished, cancelled or not (unless ``abandon``); the wait between two ends when it is
    cancelled. ``what`` is the subject of a sentence: ``the checkpoint of step 7``.
    """
    with _attempts(where, what, n_bytes) as full:
        while True:
            try:
                with anyio.CancelScope(shield=not abandon):
                    return await anyio.to_thread.run_sync(operation, abandon_on_cancel=abandon)
            except Exception as error:
                full(error)
            await anyio.sleep(RETRY_SECONDS)


def wait_for_room(operation: Callable[[], T], where: Path, what: str, n_bytes: int | None = None) -> T:
    """The same in the calling thread, which sleeps meanwhile."""
    with _attempts(where, what, n_bytes) as full:
        while True:
            try:
                return operation()
            except Exception as error:
                full(error)
            time.sleep(RETRY_SECONDS)


@contextmanager
def _attempts(where: Path, what: str, n_bytes: int | None) -> Iterator[Callable[[BaseException], None]]:
    """Yields a function that notes a failed attempt; it raises the error of one that is not a full disk."""
    waiting: Shortage | None = None

    def full(error: BaseException) -> None:
        nonlocal waiting
        if not is_full(error, where):
            raise error
        if waiting is None:
            waiting = Shortage(where, what, n_bytes)
            _SHORTAGES.append(waiting)
            log.error("%s: %s (%s)", RoleState.WAITING_FOR_DISK, waiting.text, error)
        for call in _ON_ATTEMPT:
            call()

    try:
        yield full
    finally:
        if waiting is not None:
            _SHORTAGES.remove(waiting)
            log.info("%s waited %.1f s for disk", what, time.monotonic() - waiting.since)


def unless_full(operation: Callable[[], object], where: Path) -> bool:
    """Run an operation that may be left out; False if there was no room for it."""
    try:
        operation()
    except Exception as error:
        if not is_full(error, where):
            raise
        return False
    return True


def free_bytes(where: Path) -> int:
    """Bytes that a process may still write below ``where``, which need not exist yet."""
    for path in (where, *where.parents):
        with suppress(OSError):
            return shutil.disk_usage(path).free
    return 0


@contextmanager
def whole_or_nothing(descriptor: int) -> Iterator[None]:
    """Writes inside are appended to a file whole, or cut off again when one fails."""
    end = os.fstat(descriptor).st_size
    try:
        yield
    except BaseException:
        os.ftruncate(descriptor, end)
        raise


def size(n_bytes: int) -> str:
    """``812 MB``; 1 MB is 10^6 bytes.

    >>> [size(n) for n in (0, 999, 1_500, 269_100_000, 1_640_000_000)]
    ['0 B', '999 B', '2 kB', '269 MB', '1.64 GB']
    """
    if n_bytes >= 10**9:
        return f"{n_bytes / 10**9:.2f} GB"
    for unit, factor in (("MB", 10**6), ("kB", 10**3)):
        if n_bytes >= factor:
            return f"{n_bytes / factor:.0f} {unit}"
    return f"{n_bytes} B"
