"""Tables of the replay store, and the checks of a file before a stage or a reader uses it."""

from __future__ import annotations

import marshal
import math
import sqlite3
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pipeline.errors import DamagedFiles
from pipeline.runtime.run_directory import FileLock
from pipeline.store.sqlite import Database

TABLES = """
CREATE TABLE rolled_up (name TEXT PRIMARY KEY, value INTEGER NOT NULL) WITHOUT ROWID;
CREATE TABLE meta (key TEXT PRIMARY KEY, value BLOB NOT NULL) WITHOUT ROWID;
CREATE TABLE counters (name TEXT PRIMARY KEY, value INTEGER NOT NULL) WITHOUT ROWID;
CREATE TABLE groups (
    group_number INTEGER PRIMARY KEY, task BLOB NOT NULL, n_rollout INTEGER NOT NULL, n_fresh INTEGER NOT NULL,
    k INTEGER NOT NULL, admitted_update INTEGER NOT NULL, task_index INTEGER, state TEXT NOT NULL,
    update_number INTEGER, late INTEGER NOT NULL, dropped INTEGER NOT NULL, reason TEXT NOT NULL,
    planned_at REAL NOT NULL, ended_at REAL, kept INTEGER NOT NULL, crc INTEGER NOT NULL
);
CREATE INDEX groups_kept ON groups (group_number) WHERE kept = 1;
CREATE TABLE group_replays (
    group_number INTEGER NOT NULL, position INTEGER NOT NULL, row_id INTEGER NOT NULL, weight REAL NOT NULL,
    chosen INTEGER NOT NULL, age INTEGER NOT NULL, saved INTEGER NOT NULL, entropy REAL,
    entropy_version INTEGER, success_rate REAL, recorded INTEGER NOT NULL,
    crc INTEGER NOT NULL, PRIMARY KEY (group_number, position)
) WITHOUT ROWID;
CREATE TABLE orders (
    group_number INTEGER NOT NULL, slot INTEGER NOT NULL, serial INTEGER NOT NULL, actor TEXT NOT NULL,
    attempt INTEGER NOT NULL, policy_version INTEGER NOT NULL, state TEXT NOT NULL, reason TEXT NOT NULL,
    failure INTEGER NOT NULL, issued_at REAL NOT NULL, ended_at REAL,
    crc INTEGER NOT NULL, PRIMARY KEY (group_number, slot, serial)
) WITHOUT ROWID;
CREATE TABLE trajectories (
    row_id INTEGER PRIMARY KEY, trajectory_id TEXT NOT NULL, group_number INTEGER NOT NULL, slot INTEGER NOT NULL,
    serial INTEGER NOT NULL, state TEXT NOT NULL, reason TEXT NOT NULL, reward REAL, rewards BLOB NOT NULL,
    samples INTEGER NOT NULL, received_at REAL NOT NULL, status TEXT NOT NULL, n_turns INTEGER NOT NULL,
    n_tokens INTEGER NOT NULL, n_sampled INTEGER NOT NULL, version_min INTEGER NOT NULL, version_max INTEGER NOT NULL,
    duration_seconds REAL NOT NULL, actor TEXT NOT NULL, n_bytes INTEGER NOT NULL, failure BLOB, entropy REAL,
    replayable INTEGER NOT NULL, age_insert INTEGER NOT NULL, saved INTEGER, crc INTEGER NOT NULL
);
CREATE UNIQUE INDEX trajectories_id ON trajectories (group_number, slot, serial);
CREATE TABLE payloads (
    row_id INTEGER PRIMARY KEY, header BLOB NOT NULL, token_ids BLOB NOT NULL, logprobs BLOB NOT NULL,
    spans BLOB NOT NULL, crc INTEGER NOT NULL
);
CREATE TABLE pool (
    row_id INTEGER PRIMARY KEY, trajectory_id TEXT NOT NULL, task_id TEXT NOT NULL, saved INTEGER NOT NULL,
    entropy REAL, entropy_version INTEGER, success_rate REAL, recorded INTEGER NOT NULL, uses INTEGER NOT NULL,
    crc INTEGER NOT NULL
);
CREATE TABLE stored_groups (
    group_number INTEGER PRIMARY KEY, task BLOB NOT NULL, members TEXT NOT NULL, success_rate REAL,
    saved INTEGER NOT NULL, uses INTEGER NOT NULL, crc INTEGER NOT NULL
);
CREATE TABLE tasks (
    task_id TEXT PRIMARY KEY, task BLOB NOT NULL, bucket INTEGER, successes REAL NOT NULL, failures REAL NOT NULL,
    solved INTEGER NOT NULL, retired INTEGER NOT NULL, visits INTEGER NOT NULL,
    crc INTEGER NOT NULL
) WITHOUT ROWID;
"""
STORE = Database("replay store", "store", "stage.store", application_id=0x41465250, version=9, tables=TABLES)
"""Its application id is ``AFRP``."""
ROW_TABLES: dict[str, int | None] = {
    "groups": 14, "group_replays": None, "orders": None, "trajectories": 9, "pool": None, "stored_groups": None,
    "tasks": None,
}  # fmt: skip
"""Tables with a digest in the last column of each row, and the column that is also written alone: ``kept`` of groups,
``samples`` of trajectories."""
_MARSHAL_VERSION = 2
"""The format in which equal values have equal bytes: later ones mark objects that occur twice."""
_PLAIN = (int, str, bytes, type(None))


def row_digest(row: Sequence[Any], alone: int | None) -> int:
    """CRC-32 of a row without its column ``alone``, plus the value of that column.

    Equal before SQLite stores the values and after it reads them: there 1, 1.0 and True are one number, and NaN is
    NULL. -1, the digest of no row, where the value of ``alone`` is no whole number.
    """
    if alone is not None and not isinstance(row[alone], int):
        return -1
    others = row if alone is None else (*row[:alone], *row[alone + 1 :])
    values = [value if value.__class__ in _PLAIN else _plain(value) for value in others]
    return zlib.crc32(marshal.dumps(values, _MARSHAL_VERSION)) + (0 if alone is None else row[alone])


def damaged_row(connection: sqlite3.Connection, table: str) -> Any:
    """The first column of a row of ``table`` that is not the one that was written; None where all are.

    SQLite makes whole numbers of its floats and takes the column that is written alone from the digest, so that most
    rows need two calls; :func:`row_digest` decides about the others.
    """
    alone = ROW_TABLES[table]
    columns = connection.execute(f"PRAGMA table_info({table})").fetchall()[:-1]
    whole = [f"iif({c} = CAST({c} AS INTEGER), CAST({c} AS INTEGER), {c})" if kind == "REAL" else c
             for i, c, kind, *_ in columns if i != alone]  # fmt: skip
    crc = "crc"
    if alone is not None:
        crc = f"CASE WHEN typeof(crc) = typeof({columns[alone][1]}) THEN crc - {columns[alone][1]} END"
    for *values, digest in connection.execute(f"SELECT {', '.join(whole)}, {crc} FROM {table}"):
        if zlib.crc32(marshal.dumps(values, _MARSHAL_VERSION)) != digest and row_digest(values, None) != digest:
            return values[0]
    return None


def _plain(value: float) -> float | None:
    number = float(value)
    if math.isnan(number):
        return None
    return int(number) if number.is_integer() else number


def lock(path: Path) -> FileLock:
    """Held by the one stage that writes the store. Raises :class:`pipeline.errors.StoreError` while another has it."""
    taken = f"{path} is used by another replay stage: stop that run, or set stage.store to another file"
    return FileLock(path.with_name(path.name + ".lock"), taken)


def check_tables(connection: sqlite3.Connection, path: Path) -> None:
    """Raises :class:`DamagedFiles` when a table lacks a column, has another one, or is missing. Changes nothing."""
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
            raise DamagedFiles(
                f"{path} has other tables than this Afterplay writes: expected {table} with "
                f"{', '.join(sorted(c[0] for c in columns))}, but it {what}: something else changed it. "
                f"{STORE.remedy}"
            )


def _columns(connection: sqlite3.Connection) -> dict[str, set[tuple[str, str, int]]]:
    """By table: name, type and position in the primary key of its columns."""
    tables = [row[0] for row in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")]
    return {
        table: {(row[1], row[2], row[5]) for row in connection.execute(f'PRAGMA table_info("{table}")')}
        for table in tables
    }
