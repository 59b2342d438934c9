"""Afterplay's SQLite files: identified by application id and version, created atomically, opened with fixed options.

A file that is foreign, of another version or cut off is refused, and nothing of it is changed.

Ids that a store has given out, in a small file beside it, so that a store that went back is noticed.

A store goes back when its ``-wal`` is lost, or an older copy is put in its place. ``replay.sqlite.ids`` then knows more
than the store: how many transactions were written, and up to which number ids may have been used. Ids are reserved in
blocks, synced before the first of a block is used, so that an id is never used again. The number of transactions is
written after each, without a sync: a power loss may leave it too small, never too large.

The file has two records, written in turn: a torn one leaves the other.
"""

from __future__ import annotations

import os
import sqlite3
import struct
import zlib
from contextlib import closing, suppress
from dataclasses import dataclass, replace
from pathlib import Path

from pipeline.errors import DamagedFiles, FormatMismatch, StoreError
from pipeline.runtime.run_directory import sync

BUSY_SECONDS_MAX = 10.0
"""Longest wait of a connection for another process that writes to the same file."""

PAGE_BYTES = 4096
"""Small pages write least: 1.25 times the payload at 16 trajectories a transaction (16 KiB pages: 1.62)."""

_HEADER_BYTES = 100

_COMPANIONS = ("", "-wal", "-shm")


def users_of(path: Path) -> str:
    """Other processes that have the SQLite file at ``path`` open, in words. Linux shows those of this machine, of other
    users only to root; blocks for some ten milliseconds."""
    files = {f"{path.resolve()}{end}" for end in _COMPANIONS}
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it has ended, or is another user's
            if int(process.name) != os.getpid() and any(os.readlink(fd) in files for fd in (process / "fd").iterdir()):
                command = (process / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
                found.append(f"process {process.name} ({command[:80] or (process / 'comm').read_text().strip()})")
    return " and ".join(sorted(found)) or "another program"


@dataclass(frozen=True, slots=True)
class Database:
    """A kind of SQLite file."""

    noun: str
    """In messages, such as ``replay store``."""
    short: str
    """The noun in one word."""
    option: str
    """Key of the run file that names the file; empty: none does."""
    application_id: int
    """Bytes 68-71 of the header."""
    version: int
    """``user_version``, bytes 60-63 of the header. Raised when tables change; other versions are refused."""
    tables: str
    """SQL that fills an empty file."""

    @property
    def remedy(self) -> str:
        other = f", or set {self.option} to another file" if self.option else ""
        return f"Move it away (with its -wal) to start with an empty {self.short}{other}"

    def exists(self, path: Path) -> bool:
        """True if ``path`` is one of ours, False if there is nothing yet. Reads 100 bytes and changes nothing.

        Raises :class:`DamagedFiles` that names the remedy when it is anything else.
        """
        try:
            with path.open("rb") as file:
                header = file.read(_HEADER_BYTES)
        except FileNotFoundError:
            header = b""
        except OSError as error:
            raise StoreError(f"the {self.noun} {path} cannot be read: {error}. {self.remedy}") from error
        log = path.with_name(path.name + "-wal")
        logged = log.stat().st_size if log.exists() else 0
        if not header:
            if logged:
                raise DamagedFiles(
                    f"{log} belongs to a {self.noun}, but {path} is missing: move it back, or move {log} away too"
                )
            return False
        if len(header) < _HEADER_BYTES or not header.startswith(b"SQLite format 3\0"):
            raise DamagedFiles(
                f"expected {path} to be a {self.noun} (an SQLite file), got something else. {self.remedy}"
            )
        version, application = struct.unpack_from(">I", header, 60)[0], struct.unpack_from(">I", header, 68)[0]
        if application != self.application_id:
            raise DamagedFiles(
                f"expected {path} to be a {self.noun} of Afterplay, got that of another program. {self.remedy}"
            )
        if version != self.version:
            age = "an older" if version < self.version else "a newer"
            raise FormatMismatch(
                f"{path} was written by {age} Afterplay ({self.short} version {version}, this one reads "
                f"{self.version}): continue with that version of Afterplay. {self.remedy}"
            )
        page_bytes, pages = struct.unpack_from(">H", header, 16)[0], struct.unpack_from(">I", header, 28)[0]
        expected, size = pages * (65536 if page_bytes == 1 else page_bytes), path.stat().st_size
        if expected > size + logged:
            raise DamagedFiles(f"{path} is cut off: expected {expected} bytes, got {size}. {self.remedy}")
        return True

    def create(self, path: Path) -> None:
        """Make an empty file, complete or not at all. Of several processes that try at once, one succeeds and all use
        its file. Raises :class:`StoreError`."""
        part = path.with_name(f"{path.name}.{os.getpid()}.part")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            part.unlink(missing_ok=True)
            connection = sqlite3.connect(part, isolation_level=None)
            try:
                self.fill(connection)
            finally:
                connection.close()
            try:
                os.link(part, path)
            except OSError:  # another has made it, it is empty, or the file system has no hard links
                if not path.exists() or not path.stat().st_size:
                    part.replace(path)
            finally:
                part.unlink(missing_ok=True)
        except (OSError, sqlite3.Error) as error:
            raise StoreError(
                f"the {self.noun} {path} cannot be created: {error}. Set {self.option or 'run.directory'} to a "
                "writable place"
            ) from error

    def copy(self, path: Path, to: Path) -> None:
        """Write the file at ``path``, which others may be writing to, to ``to``."""
        with closing(self.connect(path, read_only=True)) as source, closing(sqlite3.connect(to)) as target:
            source.backup(target)

    def fill(self, connection: sqlite3.Connection) -> None:
        """Make an empty database one of ours."""
        connection.execute(f"PRAGMA page_size = {PAGE_BYTES}")
        connection.execute("PRAGMA auto_vacuum = INCREMENTAL")
        connection.execute(f"PRAGMA application_id = {self.application_id}")
        connection.execute(f"PRAGMA user_version = {self.version}")
        connection.executescript(f"BEGIN; {self.tables} COMMIT;")

    def connect(self, path: Path, *, read_only: bool = False, synchronous: str = "FULL") -> sqlite3.Connection:
        """A connection that is usable from any one thread at a time. Raises :class:`sqlite3.Error`."""
        uri = f"{path.absolute().as_uri()}?mode={'ro' if read_only else 'rw'}"
        connection = sqlite3.connect(
            uri, uri=True, isolation_level=None, check_same_thread=False, timeout=BUSY_SECONDS_MAX
        )
        try:
            if not read_only:
                connection.execute("PRAGMA journal_mode = WAL")
                connection.execute(f"PRAGMA synchronous = {synchronous}")
                connection.execute("PRAGMA wal_autocheckpoint = 2000")
            connection.execute("PRAGMA cache_size = -32768")
        except sqlite3.Error:
            connection.close()
            raise
        return connection


BLOCK = 4096
"""Ids that are reserved at once."""

_RECORD = struct.Struct("<8s16sQQQQ")

_CRC = struct.Struct("<I")

_SLOT_BYTES = 64

_MAGIC = b"AFIDS 1\n"


@dataclass(frozen=True, slots=True)
class Mark:
    """One record of the file."""

    store: bytes
    """16 random bytes that name the store."""
    transactions: int = 0
    groups: int = 0
    """Smaller group numbers may have been used; this and larger ones have not."""
    rows: int = 0
    """Likewise for ``row_id``."""
    sequence: int = 0
    """Number of this record in the file."""

    def pack(self) -> bytes:
        data = _RECORD.pack(_MAGIC, self.store, self.transactions, self.groups, self.rows, self.sequence)
        return (data + _CRC.pack(zlib.crc32(data))).ljust(_SLOT_BYTES, b"\0")

    @classmethod
    def unpack(cls, data: bytes) -> Mark | None:
        """None for anything that is not a whole record."""
        if len(data) < _RECORD.size + _CRC.size:
            return None
        magic, store, transactions, groups, rows, sequence = _RECORD.unpack_from(data)
        (crc,) = _CRC.unpack_from(data, _RECORD.size)
        if magic != _MAGIC or crc != zlib.crc32(data[: _RECORD.size]):
            return None
        return cls(store, transactions, groups, rows, sequence)


class HighWaterFile:
    """The file of one store. Used by the one process that writes the store, one thread at a time."""

    def __init__(self, path: Path) -> None:
        """Raises :class:`DamagedFiles` for a file that is not readable."""
        self.path = path
        new = not path.exists()
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        slots = [Mark.unpack(os.pread(self._fd, _SLOT_BYTES, at * _SLOT_BYTES)) for at in range(2)]
        found = [mark for mark in slots if mark is not None]
        self.mark: Mark | None = max(found, key=lambda mark: mark.sequence, default=None)
        """The newest record; None in a new file."""
        if self.mark is None and os.fstat(self._fd).st_size:
            os.close(self._fd)
            raise DamagedFiles(
                f"{path} is damaged: it says which ids the store beside it has used. Restore it from a copy; or remove "
                "it, if you are sure that the store is the newest one of the run"
            )
        if new:
            sync(path.parent)

    def set(self, mark: Mark) -> None:
        """Write a record that a power loss does not undo."""
        before = self.mark
        try:
            self._write(mark)
            os.fsync(self._fd)
        except OSError:  # it may not be on disk: nothing is reserved
            self.mark = before
            raise

    def reserve(self, groups: int, rows: int) -> None:
        """Smaller ids than these may be used when this returns."""
        mark = self.mark
        assert mark is not None
        if groups > mark.groups or rows > mark.rows:
            self.set(replace(mark, groups=_block(groups, mark.groups), rows=_block(rows, mark.rows)))

    def written(self, transactions: int) -> None:
        """The store has so many transactions. Does not wait for the disk, and does not fail."""
        assert self.mark is not None
        with suppress(OSError):
            self._write(replace(self.mark, transactions=transactions))

    def close(self) -> None:
        os.close(self._fd)

    def _write(self, mark: Mark) -> None:
        sequence = 0 if self.mark is None else self.mark.sequence + 1
        mark = replace(mark, sequence=sequence)
        os.pwrite(self._fd, mark.pack(), sequence % 2 * _SLOT_BYTES)
        self.mark = mark


def _block(wanted: int, reserved: int) -> int:
    return reserved if wanted <= reserved else -(-wanted // BLOCK) * BLOCK
