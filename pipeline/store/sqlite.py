"""Afterplay's SQLite files: identified by application id and version, created atomically, opened with fixed options.

A file that is foreign, of another version or cut off is refused, and nothing of it is changed.
"""

from __future__ import annotations

import contextlib
import os
import sqlite3
import struct
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from pipeline.errors import DamagedFiles, FormatMismatch, StoreError

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
        with contextlib.suppress(OSError):  # it has ended, or is another user's
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
            except FileExistsError:
                if not path.stat().st_size:
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
