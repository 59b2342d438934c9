"""The state of the stage on disk: one SQLite database, one transaction per round of events.

A killed process leaves a consistent state. Payloads are stored as received, with a checksum. The store is written by
one thread at a time and may be read by others meanwhile (WAL). Rows of groups that ended long ago are rolled up into
totals, in the transaction that deletes them.

A store that went back (its ``-wal`` was lost, or it is an older copy) is noticed by the file of
:mod:`pipeline.store.sqlite` beside it: new ids start behind those that may have been used, and
``Snapshot.transactions_lost`` tells the stage. Each transaction writes a digest of all of ``meta``, ``counters`` and
``rolled_up``; every other row, and every payload, has one of its own.
"""

from __future__ import annotations

import errno
import functools
import logging
import operator
import os
import sqlite3
import threading
import time
import zlib
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import orjson

from pipeline.config import RunConfig
from pipeline.errors import DamagedFiles, StoreError
from pipeline.runtime.disk import size
from pipeline.runtime.garbage_collection import gc_paused
from pipeline.runtime.run_directory import RunDirectory
from pipeline.schema.record_file import Buffer, Frames, n_bytes
from pipeline.store import tables
from pipeline.store.journal import Changes, Row
from pipeline.store.records import CancelReason, Drop
from pipeline.store.snapshot import POOL_COLUMNS, REPLAY_COLUMNS, STORED_GROUP_COLUMNS, Snapshot, build
from pipeline.store.sqlite import HighWaterFile, Mark, users_of
from pipeline.store.tables import STORE

log = logging.getLogger(__name__)

CHECK_SECONDS_MAX = 10.0
"""CPU time for each of the checks of pages and of payloads when a store is opened; payloads that are left are checked
when they are read. Rows are always checked."""

CHECK_BYTES_MAX = 4 * 10**9
"""Size from which on only the tables without payloads are checked page by page, which cannot be interrupted."""

MAPPED_BYTES_MAX = 2 * 10**9
"""Part of the file that the checks of pages and payloads map into memory, which takes half of the CPU time of reads."""

WAL_BYTES_MAX = 128 * 1024 * 1024
"""Size of the ``-wal`` beyond which a reader must keep it from being emptied: 16 times the size at which it is."""

_CHECK_STEPS = 10_000
"""Instructions of SQLite's machine between two looks at the clock."""

_VACUUM_PAGES = 4096
"""Free pages that one transaction gives back to the file system at most."""

LOST, ROLLED_BELOW, DIGEST = "transactions_lost", "rolled_below", "digest"
"""Keys of ``meta``: see :class:`pipeline.store.snapshot.Snapshot`; the last one is the digest of the others, of the
counters and of what was rolled up."""

_COUNTED_REPLAYS = "AND chosen = 1"

_ROLLED = (
    ("orders", "state", ""),
    ("groups", "state", ""),
    ("group_replays", "'trained'", _COUNTED_REPLAYS),
    (
        "trajectories",
        "CASE WHEN state = 'dropped' THEN 'dropped.' || reason ELSE state END",
        "AND row_id NOT IN (SELECT row_id FROM pool) AND row_id NOT IN (SELECT row_id FROM group_replays) "
        "AND row_id NOT IN (SELECT m.value FROM stored_groups, json_each(members) m)",
    ),
)
"""Tables, what their rows are counted by, and which are rolled up: trajectories stay while something refers to them."""

_TOTALS = ("counters", "rolled_up")
"""Tables of names and values; ``meta`` has the digest of their rows."""

_GROUP_COLUMNS = (
    "group_number, task, n_rollout, n_fresh, k, admitted_update, task_index, state, update_number, late, dropped, "
    "reason, planned_at, ended_at"
)

_GROUP = f"""
INSERT INTO groups VALUES ({",".join("?" * 16)}) ON CONFLICT (group_number) DO UPDATE SET
{", ".join(f"{c} = excluded.{c}" for c in _GROUP_COLUMNS.split(", ")[1:])},
crc = excluded.crc - excluded.kept + kept"""

_TRAJECTORY = f"""
INSERT INTO trajectories VALUES ({",".join("?" * 26)}) ON CONFLICT (row_id) DO UPDATE SET state = excluded.state,
reason = excluded.reason, reward = excluded.reward, rewards = excluded.rewards, samples = excluded.samples,
saved = excluded.saved, crc = excluded.crc"""

_REPLACED = {
    table: f"INSERT OR REPLACE INTO {table} VALUES ({','.join('?' * width)})"
    for table, width in (("group_replays", 12), ("orders", 12), ("pool", 10), ("stored_groups", 7), ("tasks", 9))
}

_LOST = (
    ("groups", "", {"state": "cancelled", "reason": CancelReason.LOST.value, "update_number": None, "dropped": 0}),
    ("trajectories", "AND state = 'trained'", {"state": "dropped", "reason": Drop.CANCELLED.value}),
    ("group_replays", "AND chosen = 1", {"chosen": 0}),
)
"""Tables, which of their rows change for a group that no weights have any more, and to what."""


def store_path(config: RunConfig, directory: RunDirectory) -> Path:
    """The SQLite file of a run."""
    return config.stage.store.absolute() if config.stage.store else directory.store_file


def marks_path(path: Path) -> Path:
    """The file beside a store that knows which ids were used."""
    return path.with_name(path.name + ".ids")


def checksum(frames: Iterable[Buffer], row_id: int = 0) -> int:
    """CRC-32 over all frames, of a payload also over the row that it belongs to."""
    crc = row_id & 0xFFFFFFFF
    for frame in frames:
        crc = zlib.crc32(frame, crc)
    return crc


def _digests(table: str, values: Iterable[tuple[str, Any]]) -> dict[str, int]:
    """Digests of the rows of a table of names and values."""
    return {f"{table}.{name}": zlib.crc32(f"{name} {value}".encode()) for name, value in values}


def _digested(table: str, rows: Iterable[Row]) -> Iterator[Row]:
    """Rows with their digest, as they are written."""
    alone = tables.ROW_TABLES[table]
    return ((*row, tables.row_digest(row, alone)) for row in rows)


def _together(digests: Mapping[str, int]) -> bytes:
    return orjson.dumps(functools.reduce(operator.xor, digests.values(), 0))


def _damaged(path: Path, what: str) -> DamagedFiles:
    return DamagedFiles(f"the replay store {path} is damaged ({what}). Restore a copy of it. {STORE.remedy}")


def read_payload(connection: sqlite3.Connection, row_id: int, path: Path) -> Frames | None:
    """Frames of a stored trajectory as they came; None where they were forgotten. Raises :class:`DamagedFiles` for
    others than came."""
    query = "SELECT crc, header, token_ids, logprobs, spans FROM payloads WHERE row_id = ?"
    row = connection.execute(query, (row_id,)).fetchone()
    if row is not None and checksum(row[1:], row_id) != row[0]:
        raise _damaged(path, f"the payload of trajectory row {row_id} is not the one that came")
    return None if row is None else tuple(row[1:])


def load_snapshot(connection: sqlite3.Connection) -> Snapshot:
    """Records of the groups that are kept, and the pool. Raises :class:`sqlite3.Error` and :class:`DamagedFiles`."""
    read = connection.execute
    kept = "group_number IN (SELECT group_number FROM groups WHERE kept = 1)"
    snapshot = build(
        read(f"SELECT {_GROUP_COLUMNS} FROM groups WHERE kept = 1 ORDER BY group_number"),
        read(f"SELECT * FROM orders WHERE {kept}"),
        read(f"SELECT * FROM trajectories WHERE {kept}"),
        read(f"SELECT {REPLAY_COLUMNS} FROM group_replays r JOIN trajectories t USING (row_id) WHERE r.{kept} "
             "ORDER BY r.group_number, r.position"),
        read("SELECT * FROM tasks"),
        read(f"SELECT {POOL_COLUMNS} FROM pool p JOIN trajectories t USING (row_id) ORDER BY p.saved"),
        read(f"SELECT {STORED_GROUP_COLUMNS} FROM stored_groups s, json_each(s.members) m JOIN trajectories t "
             "ON t.row_id = m.value ORDER BY s.saved, m.key"),
        read("SELECT group_number, update_number, state = 'zero_variance', n_fresh, k FROM groups "
             "WHERE kept = 0 AND state IN ('trained', 'zero_variance')"),
    )  # fmt: skip
    snapshot.meta = {key: orjson.loads(value) for key, value in read("SELECT key, value FROM meta")}
    snapshot.counters = dict(read("SELECT name, value FROM counters"))
    snapshot.next_row_id = _next_row_id(connection, snapshot.meta)
    return snapshot


def _next_row_id(connection: sqlite3.Connection, meta: Mapping[str, Any]) -> int:
    found = connection.execute("SELECT coalesce(max(row_id) + 1, 0) FROM trajectories").fetchone()[0]
    return max(int(found), int(meta.get("next_row_id", 0)))


class ReplayStore:
    """Opens or creates ``path``; refuses a file that is foreign, corrupt, of another version, or in use.

    Raises :class:`StoreError` everywhere something is wrong with the file; the message names the remedy.
    """

    def __init__(self, path: Path, synchronous: str = "FULL") -> None:
        self.path = path
        exists = STORE.exists(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        self._reading = threading.Lock()
        self._writing = threading.Lock()
        with ExitStack() as opened:
            opened.callback(tables.lock(path).release)
            with self._explained("opened"):
                if exists:
                    with closing(STORE.connect(path, read_only=True)) as connection:
                        tables.check_tables(connection, path)
                else:
                    STORE.create(path)
                self._writer = opened.enter_context(closing(STORE.connect(path, synchronous=synchronous)))
                self._reader = opened.enter_context(closing(STORE.connect(path, read_only=True)))
                self._marks = opened.enter_context(closing(HighWaterFile(marks_path(path))))
                try:
                    self._check_structure()
                    meta = self._read_meta()
                except (TypeError, ValueError, AttributeError) as error:
                    raise self._damaged(f"a value is of another type than the one that was written: {error}") from error
                self._agree(meta)
            self._opened = opened.pop_all()

    def _check_structure(self) -> None:
        """Raises :class:`DamagedFiles` for pages that do not fit together, and for rows and payloads that are not those
        that were written; all three at once. Of a large store only the rows and a part of the rest are checked."""
        with self.path.open("rb", buffering=0) as file:  # a page that cannot be read raises here; mapped, it would kill
            buffer = bytearray(1 << 20)
            while file.tell() < MAPPED_BYTES_MAX and file.readinto(buffer):
                pass
        with ThreadPoolExecutor(2) as threads:
            checks = [threads.submit(self._limited, check) for check in (self._check_pages, self._check_payloads)]
            for table in tables.ROW_TABLES:
                if (row := tables.damaged_row(self._reader, table)) is not None:
                    raise self._damaged(f"row {row} of table {table} is not the one that was written")
            for check in checks:
                check.result()

    def _limited(self, check: Callable[[sqlite3.Connection], None]) -> None:
        """Run a check on a connection of its own, until :data:`CHECK_SECONDS_MAX` are over."""
        deadline = time.thread_time() + CHECK_SECONDS_MAX
        with closing(STORE.connect(self.path, read_only=True)) as connection:
            connection.execute(f"PRAGMA mmap_size = {MAPPED_BYTES_MAX}")
            connection.set_progress_handler(lambda: time.thread_time() > deadline, _CHECK_STEPS)
            try:
                check(connection)
            except sqlite3.OperationalError as error:
                if error.sqlite_errorcode != sqlite3.SQLITE_INTERRUPT:
                    raise
                log.info("%s is large: a part of it is not checked before it is read", self.path)

    def _check_pages(self, connection: sqlite3.Connection) -> None:
        without_payloads = ("meta", *_TOTALS, *tables.ROW_TABLES)
        for which in ("1",) if self.path.stat().st_size <= CHECK_BYTES_MAX else without_payloads:
            found = connection.execute(f"PRAGMA quick_check({which})").fetchone()[0]
            if found != "ok":
                raise self._damaged(" ".join(str(found).split()))

    def _check_payloads(self, connection: sqlite3.Connection) -> None:
        query = "SELECT row_id, crc, header, token_ids, logprobs, spans FROM payloads"
        for row_id, crc, *frames in connection.execute(query):
            if checksum(frames, row_id) != crc:
                raise self._damaged(f"the payload of trajectory row {row_id} is not the one that came")

    def _read_meta(self) -> dict[str, Any]:
        """Raises :class:`DamagedFiles` for values that are not those that were written."""
        read = self._writer.execute
        stored = dict(read("SELECT key, value FROM meta"))
        expected = stored.pop(DIGEST, None)
        self._digests = {f"meta.{key}": checksum((key.encode(), bytes(value))) for key, value in stored.items()}
        for table in _TOTALS:
            self._digests |= _digests(table, read(f"SELECT name, value FROM {table}"))
        if expected is not None and expected != _together(self._digests):
            raise self._damaged("the values of meta, counters and rolled_up are not those that were written")
        return {key: orjson.loads(value) for key, value in stored.items()}

    def _write_meta(self, meta: Mapping[str, Any], counters: Mapping[str, int]) -> dict[str, int]:
        """Write values, roll up, and write the digest of all, in the transaction that is open. Returns the digests
        after it."""
        rows = [(key, orjson.dumps(value)) for key, value in meta.items()]
        digests = self._digests | {f"meta.{key}": checksum((key.encode(), value)) for key, value in rows}
        digests |= _digests("counters", counters.items())
        self._writer.executemany("INSERT OR REPLACE INTO counters VALUES (?,?)", counters.items())
        if ROLLED_BELOW in meta:
            self._roll_up(meta[ROLLED_BELOW])
            digests |= _digests("rolled_up", self._writer.execute("SELECT name, value FROM rolled_up"))
        self._writer.executemany("INSERT OR REPLACE INTO meta VALUES (?,?)", [*rows, (DIGEST, _together(digests))])
        return digests

    def _damaged(self, what: str) -> DamagedFiles:
        return _damaged(self.path, what)

    def _agree(self, meta: Mapping[str, Any]) -> None:
        """Compare the store with the file beside it; from here on no id is used that may have been used before."""
        name = bytes.fromhex(meta["store"]) if "store" in meta else None
        self._transactions = int(meta.get("transactions", 0))
        self._in_doubt: dict[str, int] | None = None
        """Digests after a round whose commit failed."""
        groups, rows = int(meta.get("next_group", 0)), _next_row_id(self._writer, meta)
        known = self._marks.mark
        if known is None:
            if self._transactions:
                log.warning("%s is missing: whether %s is the newest store of the run cannot be told",
                            self._marks.path, self.path)  # fmt: skip
            known = Mark(name or os.urandom(16), self._transactions, groups, rows)
        lost = max(0, known.transactions - (self._transactions if name in (None, known.store) else 0))
        if lost:
            log.error(
                "the replay store %s went back: it lacks the last %d transactions of %d (its -wal is lost, or it is an "
                "older copy). New groups start at g%06d; groups that may have been trained since are given up",
                self.path, lost, known.transactions, max(groups, known.groups),
            )  # fmt: skip
            self._transactions = known.transactions
        if name != known.store or lost:
            groups, rows = max(groups, known.groups), max(rows, known.rows)
            given = {"store": known.store.hex(), "transactions": self._transactions, "next_group": groups}
            given |= {"next_row_id": rows, LOST: lost}
            self._writer.execute("BEGIN IMMEDIATE")
            self._digests = self._write_meta(given, {})
            self._writer.execute("COMMIT")
        self._marks.set(replace(known, transactions=self._transactions))
        self._marks.reserve(groups, rows)

    def __enter__(self) -> ReplayStore:
        return self

    def __exit__(self, *args: object) -> None:
        self.close()

    def close(self) -> None:
        """Harmless when done already."""
        self._opened.close()

    def held_back(self) -> str:
        """A sentence about who keeps ``-wal`` from being emptied, where it is large; else empty. Blocks."""
        wal = self.path.with_name(self.path.name + "-wal")
        with suppress(OSError):
            if (n_bytes := wal.stat().st_size) > WAL_BYTES_MAX:
                return (
                    f"{wal} has {size(n_bytes)} and grows while {users_of(self.path)} reads the replay store: end that "
                    "reader, or let it read a copy"
                )
        return ""

    def load(self) -> Snapshot:
        """State that the stage starts from."""
        with self._explained("read"), gc_paused():
            return load_snapshot(self._writer)

    def commit(self, changes: Changes) -> None:
        """Write one round; when this returns it is as durable as ``stage.synchronous`` says. May be called again with
        the same changes after a :class:`StoreError`: a round whose commit failed may be in the store nevertheless."""
        with self._writing, self._explained("written"):
            if self._in_doubt is not None:
                (newest,) = self._writer.execute("SELECT value FROM meta WHERE key = 'transactions'").fetchone()
                if int(newest) > self._transactions:
                    self._written(self._in_doubt)
                    return
            rows = max((row[0] for row in changes.trajectories), default=-1) + 1
            self._marks.reserve(changes.meta.get("next_group", 0), rows)
            many = self._writer.executemany
            self._writer.execute("BEGIN IMMEDIATE")
            try:
                many(_GROUP, _digested("groups", changes.groups))
                many(_TRAJECTORY, _digested("trajectories", changes.trajectories))
                replay_groups = {row[0] for row in changes.replays}
                many("DELETE FROM group_replays WHERE group_number = ?", ((n,) for n in replay_groups))
                for table, written in (
                    ("group_replays", changes.replays), ("orders", changes.orders), ("pool", changes.pool),
                    ("stored_groups", changes.stored_groups), ("tasks", changes.tasks),
                ):  # fmt: skip
                    many(_REPLACED[table], _digested(table, written))
                many(
                    "INSERT INTO payloads VALUES (?,?,?,?,?,?)",
                    ((row_id, *frames, checksum(frames, row_id)) for row_id, frames in changes.payloads.items()),
                )
                for query, keys in (
                    ("UPDATE trajectories SET samples = samples + 1, crc = crc + 1 WHERE row_id = ?", changes.sampled),
                    ("DELETE FROM payloads WHERE row_id = ?", changes.forgotten_payloads),
                    ("UPDATE groups SET kept = 0, crc = crc - kept WHERE group_number = ?", changes.forgotten_groups),
                    ("DELETE FROM pool WHERE row_id = ?", changes.evicted_pool),
                    ("DELETE FROM stored_groups WHERE group_number = ?", changes.evicted_stored_groups),
                    ("DELETE FROM tasks WHERE task_id = ?", changes.forgotten_tasks),
                ):
                    many(query, ((key,) for key in keys))
                if changes.lost_groups:
                    self._lose(changes.lost_groups)
                meta = {**changes.meta, "transactions": self._transactions + 1}
                digests = self._in_doubt = self._write_meta(meta, changes.counters)
                if changes.shrink:
                    self._give_back(self._writer.execute("PRAGMA freelist_count").fetchone()[0])
                self._writer.execute("COMMIT")
            except BaseException:
                if self._writer.in_transaction:
                    self._writer.execute("ROLLBACK")
                raise
            self._written(digests)

    def _written(self, digests: dict[str, int]) -> None:
        self._digests, self._in_doubt = digests, None
        self._transactions += 1
        self._marks.written(self._transactions)

    def _lose(self, numbers: list[int]) -> None:
        """Change the rows of groups that no weights have any more."""
        read = self._writer.execute
        for table, which, values in _LOST:
            columns = [column[1] for column in read(f"PRAGMA table_info({table})")]
            chosen = f"group_number IN (SELECT value FROM json_each(?)) {which}"
            found = read(f"SELECT * FROM {table} WHERE {chosen}", (orjson.dumps(numbers).decode(),)).fetchall()
            rows = [tuple(values.get(c, v) for c, v in zip(columns[:-1], row, strict=False)) for row in found]
            written = f"INSERT OR REPLACE INTO {table} VALUES ({','.join('?' * len(columns))})"
            self._writer.executemany(written, _digested(table, rows))

    def _roll_up(self, below: int) -> None:
        """Add rows of groups with smaller numbers to the totals, delete them, and give pages back to the disk."""
        run = self._writer.execute
        for table, state, which in _ROLLED:
            kind = "replays" if table == "group_replays" else table
            run(
                f"INSERT INTO rolled_up SELECT '{kind}.' || {state}, count(*) FROM {table} WHERE group_number < ? "
                f"{which} GROUP BY 1 ON CONFLICT (name) DO UPDATE SET value = value + excluded.value",
                (below,),
            )
            run(f"DELETE FROM {table} WHERE group_number < ? {which.replace(_COUNTED_REPLAYS, '')}", (below,))
        free, pages = (run(f"PRAGMA {name}").fetchone()[0] for name in ("freelist_count", "page_count"))
        if free > pages // 4:
            self._give_back(min(free, _VACUUM_PAGES))

    def _give_back(self, pages: int) -> None:
        """Give free pages back to the file system, in the transaction that is open. Python steps a pragma once, which
        gives back one page, whatever number it names."""
        for _ in range(pages):
            self._writer.execute("PRAGMA incremental_vacuum(1)")

    def payloads(self, row_ids: Iterable[int]) -> dict[int, Frames]:
        """Frames of stored trajectories, as they came, by ``row_id``; those that were forgotten are left out. Raises
        :class:`DamagedFiles` for others than came."""
        with self._reading, self._explained("read"):
            found = {row_id: read_payload(self._reader, row_id, self.path) for row_id in row_ids}
        return {row_id: frames for row_id, frames in found.items() if frames is not None}

    @contextmanager
    def _explained(self, done: str) -> Iterator[None]:
        try:
            yield
        except (sqlite3.Error, OSError) as error:
            code = getattr(error, "sqlite_errorcode", 0) & 0xFF
            if code in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB):
                raise self._damaged(str(error)) from error
            if code == sqlite3.SQLITE_BUSY:
                error = OSError(errno.EBUSY, f"{error}: {users_of(self.path)} has it open")
            raise StoreError(f"the replay store {self.path} could not be {done}: {error}. {STORE.remedy}") from error


class PayloadCache:
    """The newest payloads, up to ``bytes_max``; the oldest go first."""

    def __init__(self, bytes_max: int) -> None:
        self._frames: OrderedDict[int, tuple[int, Frames]] = OrderedDict()
        self._bytes_max = bytes_max
        self.bytes = 0

    def put(self, row_id: int, frames: Frames) -> None:
        size = sum(map(n_bytes, frames))
        self._frames[row_id] = (size, frames)
        self.bytes += size
        while self.bytes > self._bytes_max:
            self.bytes -= self._frames.popitem(last=False)[1][0]

    def get(self, row_id: int) -> Frames | None:
        found = self._frames.get(row_id)
        return found[1] if found else None

    def forget(self, row_ids: Sequence[int]) -> None:
        for row_id in row_ids:
            found = self._frames.pop(row_id, None)
            if found:
                self.bytes -= found[0]
