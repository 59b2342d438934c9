"""Waiting for disk: a write that the file system refuses is tried again until it succeeds.

A full disk, a used-up quota, a file system that is read-only or does not answer, a folder in the place of a file: these
are states of a process and not failures of it (:data:`STATES`). :func:`when_room` and :func:`wait_for_room` try an
operation again; the operation leaves nothing behind when it fails. Meanwhile :func:`shortage` says what waits and why,
``/healthz`` reports the state ``waiting for disk``, and whoever needs the result waits too: nothing is acknowledged,
reported or counted before it is written. What the run can do without is left out (:func:`left_out`).

The bytes that a run directory may have are bounded by ``run.disk_bytes_max``: first what only people read makes room,
then admission pauses until there is room again.
"""

from __future__ import annotations

import errno
import logging
import os
import re
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

import anyio
import anyio.to_thread

from pipeline.errors import ConfigurationError, DamagedFiles, FormatMismatch
from pipeline.runtime.progress import RoleState
from pipeline.runtime.run_directory import RunDirectory

log = logging.getLogger(__name__)

RETRY_SECONDS = 0.5
"""Between two attempts."""

FREE_BYTES_MIN = 128 * 1024
"""With less free than this, an error of SQLite or torch that does not tell its cause counts as a full disk."""

FULL = frozenset({errno.ENOSPC, errno.EDQUOT})
"""Errors of a full disk, and of a used-up quota."""

_NAMES = (
    *("ENOSPC", "EDQUOT", "EFBIG"),  # no room
    *("EIO", "EREMOTEIO", "EUCLEAN", "EBADMSG", "ENODEV", "ENXIO", "ENOTCONN", "ESHUTDOWN", "EHOSTDOWN"),  # broken
    *("ESTALE", "ETIMEDOUT", "ENOLCK", "EHOSTUNREACH", "ENETDOWN", "ENETUNREACH", "ECONNABORTED"),  # of a network
    *("EROFS", "EACCES", "EPERM", "EBUSY", "ETXTBSY"),  # not allowed
    *("ENOENT", "ENOTDIR", "EISDIR", "EEXIST", "ENOTEMPTY", "ELOOP"),  # something else is there, or nothing
    *("EMFILE", "ENFILE", "ENOMEM"),  # used up
)

STATES = frozenset(number for name in _NAMES if (number := getattr(errno, name, None)) is not None)
"""Errors of a file system that may end without a change of the program; others (EINVAL, EBADF) are faults of it."""

_SQLITE = {
    3: errno.EACCES,  # SQLITE_PERM
    5: errno.EBUSY,  # SQLITE_BUSY
    6: errno.EBUSY,  # SQLITE_LOCKED
    7: errno.ENOMEM,  # SQLITE_NOMEM
    8: errno.EROFS,  # SQLITE_READONLY
    10: errno.EIO,  # SQLITE_IOERR
    13: errno.ENOSPC,  # SQLITE_FULL
    14: errno.ENOENT,  # SQLITE_CANTOPEN
    15: errno.ENOLCK,  # SQLITE_PROTOCOL
}
"""Primary result codes of SQLite, and the error that each stands for."""

_RUST_ERROR = re.compile(r"os error (\d+)")
"""Part of the messages that libraries in Rust (safetensors) give to errors of the system."""

_TORCH_ERRORS = (
    *("cannot be opened", "Parent directory"),
    *("PytorchStreamWriter failed", "iostream error", "unexpected pos"),  # the last: closed after a write that failed
)
"""Parts of the messages of ``torch.save``, which do not tell the error of the system."""

T = TypeVar("T")


@dataclass(slots=True, eq=False)
class Shortage:
    """An operation that waits. ``n_bytes``: what it is about to write, where that is known."""

    where: Path
    what: str
    error: OSError
    n_bytes: int | None = None
    since: float = field(default_factory=time.monotonic)

    @property
    def text(self) -> str:
        """A clause: what waits, where, and why or how much is missing."""
        if self.error.errno not in FULL:
            return f"{self.what} waits for {self.where}: {describe(self.error)}"
        free = free_bytes(self.where)
        needs = f"needs {size(self.n_bytes)} on" if self.n_bytes else "needs room on"
        return f"{self.what} {needs} {self.where}, which has {size(free)} free"


_SHORTAGES: list[Shortage] = []
"""Operations of this process that wait, oldest first."""

_TORN: dict[tuple[int, int], int] = {}
"""Files that end with half a write, and where that begins."""

ON_ATTEMPT: list[Callable[[], None]] = []
"""Called after each attempt that the file system refused: whoever waits for disk does not hang."""


def shortage() -> Shortage | None:
    """The operation that has waited longest for disk in this process; None: nothing waits."""
    found = list(_SHORTAGES)
    return found[0] if found else None


def shortage_seconds() -> float:
    """Seconds that a write has waited for disk; 0: none waits."""
    found = shortage()
    return time.monotonic() - found.since if found is not None else 0.0


def disk_fault(error: BaseException | None, where: Path) -> OSError | None:
    """The error of the file system below ``where`` that ``error`` is, or was caused by; None where it is another."""
    while error is not None and not isinstance(error, ConfigurationError | DamagedFiles | FormatMismatch):
        if isinstance(error, OSError) and error.errno in STATES:
            return error
        number, code = None, getattr(error, "sqlite_errorcode", None)
        if found := _RUST_ERROR.search(str(error)):
            number = int(found[1])
        elif (code is not None or isinstance(error, RuntimeError)) and free_bytes(where) < FREE_BYTES_MIN:
            number = errno.ENOSPC
        elif code is not None:
            number = _SQLITE.get(code & 0xFF)
        elif isinstance(error, RuntimeError) and any(text in str(error) for text in _TORCH_ERRORS):
            number = errno.EIO
        if number is not None and number in STATES:
            return OSError(number, str(error), str(where))
        error = error.__cause__
    return None


def describe(error: OSError) -> str:
    """The error in words, with its name: ``Input/output error (EIO)``."""
    return f"{error.strerror or error} ({errno.errorcode.get(error.errno or 0, 'no number')})"


async def when_room(
    operation: Callable[[], T], where: Path, what: str, n_bytes: int | None = None, *, abandon: bool = False
) -> T:
    """The result of ``operation``, which runs in a worker thread, once the file system of ``where`` takes it.

    An attempt that has begun is finished, cancelled or not (unless ``abandon``); the wait between two ends when it is
    cancelled. ``what`` is the subject of a sentence: ``the checkpoint of step 7``.
    """
    with _attempts(where, what, n_bytes) as failed:
        while True:
            try:
                with anyio.CancelScope(shield=not abandon):
                    return await anyio.to_thread.run_sync(operation, abandon_on_cancel=abandon)
            except Exception as error:
                failed(error)
            await anyio.sleep(RETRY_SECONDS)


def wait_for_room(operation: Callable[[], T], where: Path, what: str, states: frozenset[int] = STATES) -> T:
    """The same in the calling thread, which sleeps meanwhile. ``states``: errors that it waits for."""
    with _attempts(where, what, None, states) as failed:
        while True:
            try:
                return operation()
            except Exception as error:
                failed(error)
            time.sleep(RETRY_SECONDS)


@contextmanager
def _attempts(
    where: Path, what: str, n_bytes: int | None, states: frozenset[int] = STATES
) -> Iterator[Callable[[BaseException], None]]:
    """Yields a function that notes a failed attempt; it raises an error that is none of ``states``."""
    waiting: Shortage | None = None

    def failed(error: BaseException) -> None:
        nonlocal waiting
        fault = disk_fault(error, where)
        if fault is None or fault.errno not in states:
            raise error
        if new := waiting is None:
            waiting = Shortage(where, what, fault, n_bytes)
            _SHORTAGES.append(waiting)
        if new or waiting.error.errno != fault.errno:
            waiting.error = fault
            log.error("%s: %s (%s)", RoleState.WAITING_FOR_DISK, waiting.text, error)
        for call in ON_ATTEMPT:
            call()

    try:
        yield failed
    finally:
        if waiting is not None:
            _SHORTAGES.remove(waiting)
            log.info("%s waited %.1f s for disk", what, time.monotonic() - waiting.since)


def left_out(operation: Callable[[], object], where: Path) -> str:
    """Run an operation that the run can do without; empty, or why the file system refused it."""
    try:
        operation()
    except Exception as error:
        fault = disk_fault(error, where)
        if fault is None:
            raise
        free = f"{where} has {size(free_bytes(where))} free"
        return free if fault.errno in FULL else f"{where} cannot be written now: {describe(fault)}"
    return ""


def free_bytes(where: Path) -> int:
    """Bytes that a process may still write below ``where``, which need not exist yet."""
    for path in (where, *where.parents):
        with suppress(OSError):
            return shutil.disk_usage(path).free
    return 0


@contextmanager
def whole_or_nothing(descriptor: int) -> Iterator[None]:
    """Writes inside are appended to a file whole, or cut off again when one fails; where that fails too, before the
    next write."""
    status = os.fstat(descriptor)
    file = (status.st_dev, status.st_ino)
    end = min(status.st_size, _TORN.get(file, status.st_size))
    if file in _TORN:
        os.ftruncate(descriptor, end)
        del _TORN[file]
    try:
        yield
    except BaseException:
        _TORN[file] = end
        os.ftruncate(descriptor, end)
        del _TORN[file]
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


RESUME_SHARE = 0.95
"""Admission starts again when the directory is this much smaller than its budget."""

LOOK_SECONDS = 10.0
"""Interval at which the directory is measured."""


@dataclass(slots=True)
class DiskBudget:
    """Measures one run directory. Blocks for the file system; used by one thread at a time."""

    directory: RunDirectory
    bytes_max: int | None
    """None: no bound."""
    used: int = 0
    """Bytes at the last :meth:`look`."""
    exceeded: str = ""
    """The reason for which admission must pause; empty: none."""

    def look(self) -> None:
        """Measure; beyond the budget remove what may be removed."""
        self.used = bytes_below(self.directory.path)
        if self.bytes_max is None:
            return
        limit = int(self.bytes_max * (RESUME_SHARE if self.exceeded else 1.0))
        for path in expendable(self.directory):
            if self.used <= limit:
                break
            n_bytes = path.stat().st_size if path.exists() else 0
            path.unlink(missing_ok=True)
            self.used -= n_bytes
        self.exceeded = ""
        if self.used > limit:
            self.exceeded = (
                f"room below run.disk_bytes_max: {self.directory.path} has {size(self.used)} of "
                f"{size(self.bytes_max)}; raise it, or remove checkpoints or weights that you do not need"
            )


def expendable(directory: RunDirectory) -> Iterator[Path]:
    """Files that the run does without, in the order in which they go: older halves of logs, traces but for the newest
    file of each kind, records of updates."""
    yield from sorted(directory.logs.glob("*.log.1"))
    traces = sorted(directory.traces.glob("*.traces"))
    newest = {path.name.rpartition("-")[0]: path for path in traces}
    yield from (path for path in traces if path not in newest.values())
    yield from sorted(directory.updates.glob("u*.record"))


def bytes_below(folder: Path) -> int:
    """Bytes of all files in a folder; one with several hard links counts once."""
    seen: dict[tuple[int, int], int] = {}
    for root, _, names in os.walk(folder):
        for name in names:
            try:
                status = os.lstat(os.path.join(root, name))
            except OSError:
                continue
            seen[status.st_dev, status.st_ino] = status.st_size
    return sum(seen.values())
