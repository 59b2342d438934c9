"""The file of the store: its tables, what proves that it is ours, and opening it without harming one that is not."""

from __future__ import annotations

import os
import sqlite3
import struct
from pathlib import Path

from pipeline.errors import StoreError
from pipeline.runtime.rundir import FileLock

APPLICATION_ID = 0x41465250
"""``AFRP`` in the SQLite header (bytes 68-71)."""
STORE_VERSION = 3
"""``user_version`` in the SQLite header (bytes 60-63). Raised when tables change; older ones are refused."""
PAGE_BYTES = 4096
"""Small pages write least: 1.25 times the payload at 16 trajectories a transaction (16 KiB pages: 1.62)."""

TABLES = """
CREATE TABLE meta (key TEXT PRIMARY KEY, value BLOB NOT NULL) WITHOUT ROWID;
CREATE TABLE counters (name TEXT PRIMARY KEY, value INTEGER NOT NULL) WITHOUT ROWID;
CREATE TABLE groups (
    group_number INTEGER PRIMARY KEY, task BLOB NOT NULL, n_rollout INTEGER NOT NULL, n_fresh INTEGER NOT NULL,
    k INTEGER NOT NULL, rescued INTEGER NOT NULL, admitted_update INTEGER NOT NULL, state TEXT NOT NULL,
    update_number INTEGER, late INTEGER NOT NULL, reason TEXT NOT NULL, planned_at REAL NOT NULL, ended_at REAL,
    kept INTEGER NOT NULL DEFAULT 1
);
CREATE INDEX groups_kept ON groups (group_number) WHERE kept = 1;
CREATE TABLE group_replays (
    group_number INTEGER NOT NULL, position INTEGER NOT NULL, row_id INTEGER NOT NULL, weight REAL NOT NULL,
    turn INTEGER, chosen INTEGER NOT NULL, age INTEGER NOT NULL, saved INTEGER NOT NULL, entropy REAL,
    success_rate REAL, recorded INTEGER NOT NULL, PRIMARY KEY (group_number, position)
) WITHOUT ROWID;
CREATE TABLE orders (
    group_number INTEGER NOT NULL, slot INTEGER NOT NULL, serial INTEGER NOT NULL, actor TEXT NOT NULL,
    attempt INTEGER NOT NULL, policy_version INTEGER NOT NULL, state TEXT NOT NULL, reason TEXT NOT NULL,
    failure INTEGER NOT NULL, issued_at REAL NOT NULL, ended_at REAL,
    PRIMARY KEY (group_number, slot, serial)
) WITHOUT ROWID;
CREATE TABLE trajectories (
    row_id INTEGER PRIMARY KEY, trajectory_id TEXT NOT NULL, group_number INTEGER NOT NULL, slot INTEGER NOT NULL,
    serial INTEGER NOT NULL, state TEXT NOT NULL, reason TEXT NOT NULL, reward REAL, rewards BLOB NOT NULL,
    samples INTEGER NOT NULL, received_at REAL NOT NULL, status TEXT NOT NULL, n_turns INTEGER NOT NULL,
    n_tokens INTEGER NOT NULL, n_sampled INTEGER NOT NULL, version_min INTEGER NOT NULL, version_max INTEGER NOT NULL,
    duration_seconds REAL NOT NULL, actor TEXT NOT NULL, n_bytes INTEGER NOT NULL, failure BLOB, entropy REAL,
    replayable INTEGER NOT NULL, age_insert INTEGER NOT NULL, saved INTEGER
);
CREATE UNIQUE INDEX trajectories_id ON trajectories (group_number, slot, serial);
CREATE TABLE payloads (
    row_id INTEGER PRIMARY KEY, header BLOB NOT NULL, token_ids BLOB NOT NULL, logprobs BLOB NOT NULL,
    spans BLOB NOT NULL
);
CREATE TABLE pool (
    row_id INTEGER PRIMARY KEY, trajectory_id TEXT NOT NULL, task_id TEXT NOT NULL, saved INTEGER NOT NULL,
    entropy REAL, success_rate REAL, recorded INTEGER NOT NULL, uses INTEGER NOT NULL
);
CREATE TABLE tasks (
    task_id TEXT PRIMARY KEY, task BLOB NOT NULL, bucket INTEGER, n_fresh INTEGER NOT NULL, retired INTEGER NOT NULL,
    visits INTEGER NOT NULL, history BLOB NOT NULL
) WITHOUT ROWID;
"""


def lock(path: Path) -> FileLock:
    """Held by the one stage that writes the store. Raises :class:`StoreError` while another one has it."""
    taken = f"{path} is used by another replay stage: stop that run, or set replay.store to another file"
    return FileLock(path.with_name(path.name + ".lock"), taken)


def check_header(path: Path) -> bool:
    """Whether ``path`` is one of our stores (False: there is nothing yet). Reads 100 bytes and changes nothing.

    Raises :class:`StoreError` that names the remedy when it is anything else.
    """
    remedy = "Move it away (with its -wal) to start with an empty store, or set replay.store to another file"
    try:
        with path.open("rb") as file:
            header = file.read(100)
    except FileNotFoundError:
        header = b""
    except OSError as error:
        raise StoreError(f"the replay store {path} cannot be read: {error}. {remedy}") from error
    log = path.with_name(path.name + "-wal")
    logged = log.stat().st_size if log.exists() else 0
    if not header:
        if logged:
            raise StoreError(
                f"{log} belongs to a replay store, but {path} is not there: move it back, or {log} away too"
            )
        return False
    if len(header) < 100 or not header.startswith(b"SQLite format 3\0"):
        raise StoreError(f"expected {path} to be a replay store (an SQLite file), got something else. {remedy}")
    version, application = struct.unpack(">I", header[60:64])[0], struct.unpack(">I", header[68:72])[0]
    if application != APPLICATION_ID:
        raise StoreError(
            f"expected {path} to be a replay store of Afterplay, got an SQLite file of something else. {remedy}"
        )
    if version != STORE_VERSION:
        age = "an older" if version < STORE_VERSION else "a newer"
        raise StoreError(
            f"{path} was written by {age} Afterplay (store version {version}, this one reads {STORE_VERSION}): "
            f"go on with that Afterplay. {remedy}"
        )
    pages, page_bytes = struct.unpack(">I", header[28:32])[0], struct.unpack(">H", header[16:18])[0] or 65536
    page_bytes = 65536 if page_bytes == 1 else page_bytes
    if pages * page_bytes > path.stat().st_size + logged:
        raise StoreError(f"{path} is cut off: expected {pages * page_bytes} bytes, got {path.stat().st_size}. {remedy}")
    return True


def check_tables(connection: sqlite3.Connection, path: Path) -> None:
    """Raises :class:`StoreError` when a table lacks a column, has another one, or is missing. Changes nothing."""
    empty = sqlite3.connect(":memory:")
    try:
        empty.executescript(TABLES)
        expected, found = _columns(empty), _columns(connection)
    finally:
        empty.close()
    for table, columns in expected.items():
        if found.get(table) != columns:
            what = (
                f"has the columns {', '.join(sorted(c[0] for c in found[table]))}" if table in found else "is not there"
            )
            raise StoreError(
                f"{path} has other tables than this Afterplay writes: expected {table} with "
                f"{', '.join(sorted(c[0] for c in columns))}, but it {what}: something else changed it. Move it away "
                "(with its -wal) to start with an empty store, or set replay.store to another file"
            )


def _columns(connection: sqlite3.Connection) -> dict[str, set[tuple[str, str, int]]]:
    """By table: name, type and place in the primary key of its columns."""
    tables = [row[0] for row in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")]
    return {
        table: {(row[1], row[2], row[5]) for row in connection.execute(f'PRAGMA table_info("{table}")')}
        for table in tables
    }


def create(path: Path) -> None:
    """Make an empty store, complete or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(path.name + ".part")
    part.unlink(missing_ok=True)
    connection = sqlite3.connect(part, isolation_level=None)
    try:
        make_tables(connection)
    finally:
        connection.close()
    os.replace(part, path)


def make_tables(connection: sqlite3.Connection) -> None:
    """Fill an empty database."""
    connection.execute(f"PRAGMA page_size = {PAGE_BYTES}")
    connection.execute(f"PRAGMA application_id = {APPLICATION_ID}")
    connection.execute(f"PRAGMA user_version = {STORE_VERSION}")
    connection.executescript(f"BEGIN; {TABLES} COMMIT;")


def connect(path: Path, *, read_only: bool = False, synchronous: str = "FULL") -> sqlite3.Connection:
    """A connection with our settings. Usable from any one thread at a time."""
    mode = "ro" if read_only else "rw"
    connection = sqlite3.connect(
        f"{path.absolute().as_uri()}?mode={mode}", uri=True, isolation_level=None, check_same_thread=False, timeout=10.0
    )
    if not read_only:
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute(f"PRAGMA synchronous = {synchronous}")
        connection.execute("PRAGMA wal_autocheckpoint = 2000")
    connection.execute("PRAGMA cache_size = -32768")
    return connection
