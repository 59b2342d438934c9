"""The state of the stage on disk: one SQLite database, one transaction per round of events.

A killed process leaves a consistent state. Payloads are stored as received. The store is written by
one thread at a time and may be read by others meanwhile (WAL).
"""

from __future__ import annotations

import sqlite3
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import orjson

from pipeline.config import RunConfig
from pipeline.errors import StoreError
from pipeline.runtime.rundir import RunDirectory
from pipeline.store import tables
from pipeline.store.journal import Changes
from pipeline.store.snapshot import POOL_COLUMNS, REPLAY_COLUMNS, Snapshot, SnapshotRows, build
from pipeline.transport.protocol import Frames

_GROUP_COLUMNS = (
    "group_number, task, n_rollout, n_fresh, k, rescued, admitted_update, state, update_number, late, reason, "
    "planned_at, ended_at"
)
_GROUP = f"""
INSERT INTO groups ({_GROUP_COLUMNS}) VALUES ({",".join("?" * 13)}) ON CONFLICT (group_number) DO UPDATE SET
n_fresh = excluded.n_fresh, k = excluded.k, rescued = excluded.rescued, state = excluded.state,
update_number = excluded.update_number, late = excluded.late, reason = excluded.reason, ended_at = excluded.ended_at"""
_REPLAY = f"INSERT OR REPLACE INTO group_replays VALUES ({','.join('?' * 11)})"
_ORDER = f"INSERT OR REPLACE INTO orders VALUES ({','.join('?' * 11)})"
_TRAJECTORY = f"""
INSERT INTO trajectories VALUES ({",".join("?" * 25)}) ON CONFLICT (row_id) DO UPDATE SET state = excluded.state,
reason = excluded.reason, reward = excluded.reward, rewards = excluded.rewards, samples = excluded.samples,
saved = excluded.saved"""
_SAMPLED = "UPDATE trajectories SET samples = samples + 1 WHERE row_id = ?"
_POOL = f"INSERT OR REPLACE INTO pool VALUES ({','.join('?' * 8)})"
_TASK = f"INSERT OR REPLACE INTO tasks VALUES ({','.join('?' * 7)})"


def store_path(config: RunConfig, directory: RunDirectory) -> Path:
    """The SQLite file of a run."""
    return Path(config.replay.store) if config.replay.store else directory.store_file


class ReplayStore:
    """Opens or creates ``path``; refuses a file that is foreign, corrupt, of another version, or in use.

    Raises :class:`StoreError` everywhere something is wrong with the file; the message names the remedy.
    """

    def __init__(self, path: Path, synchronous: str = "FULL") -> None:
        self.path = path
        exists = tables.STORE.exists(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        self._lock = tables.lock(path)
        self._closed = False
        self._reading = threading.Lock()
        self._writing = threading.Lock()
        try:
            with self._explained("opened"):
                if exists:
                    self._check_tables()
                else:
                    tables.STORE.create(path)
                self._writer = tables.STORE.connect(path, synchronous=synchronous)
                self._reader = tables.STORE.connect(path, read_only=True)
        except BaseException:
            self._lock.release()
            raise

    def _check_tables(self) -> None:
        connection = tables.STORE.connect(self.path, read_only=True)
        try:
            tables.check_tables(connection, self.path)
        finally:
            connection.close()

    def __enter__(self) -> ReplayStore:
        return self

    def __exit__(self, *args: object) -> None:
        self.close()

    def close(self) -> None:
        """Harmless when done already."""
        if not self._closed:
            self._closed = True
            self._reader.close()
            self._writer.close()
            self._lock.release()

    def load(self) -> Snapshot:
        """State that the stage starts from."""
        with self._explained("read"):
            read = self._writer.execute
            kept = "group_number IN (SELECT group_number FROM groups WHERE kept = 1)"
            rows = SnapshotRows(
                read(f"SELECT {_GROUP_COLUMNS} FROM groups WHERE kept = 1 ORDER BY group_number"),
                read(f"SELECT * FROM orders WHERE {kept}"),
                read(f"SELECT * FROM trajectories WHERE {kept}"),
                read(f"SELECT {REPLAY_COLUMNS} FROM group_replays r JOIN trajectories t USING (row_id) WHERE r.{kept} "
                     "ORDER BY r.group_number, r.position"),
                read("SELECT * FROM tasks"),
                read(f"SELECT {POOL_COLUMNS} FROM pool p JOIN trajectories t USING (row_id) ORDER BY p.saved"),
            )  # fmt: skip
            meta = {key: orjson.loads(value) for key, value in read("SELECT key, value FROM meta")}
            next_row_id = read("SELECT coalesce(max(row_id) + 1, 0) FROM trajectories").fetchone()[0]
            return build(rows, meta, dict(read("SELECT name, value FROM counters")), next_row_id)

    def commit(self, changes: Changes) -> None:
        """Write one round; when this returns it is as durable as ``replay.synchronous`` says."""
        with self._writing, self._explained("written"):
            many = self._writer.executemany
            self._writer.execute("BEGIN IMMEDIATE")
            try:
                many(_GROUP, changes.groups)
                many(_REPLAY, changes.replays)
                many(_ORDER, changes.orders)
                many(_TRAJECTORY, changes.trajectories)
                many(_SAMPLED, ((row_id,) for row_id in changes.sampled))
                many(
                    "INSERT INTO payloads VALUES (?,?,?,?,?)",
                    ((row_id, *frames) for row_id, frames in changes.payloads),
                )
                many("DELETE FROM payloads WHERE row_id = ?", ((row_id,) for row_id in changes.forgotten_payloads))
                many("UPDATE groups SET kept = 0 WHERE group_number = ?", ((n,) for n in changes.forgotten_groups))
                many(_POOL, changes.pool)
                many("DELETE FROM pool WHERE row_id = ?", ((row_id,) for row_id in changes.left_pool))
                many(_TASK, changes.tasks)
                many("DELETE FROM tasks WHERE task_id = ?", ((task_id,) for task_id in changes.forgotten_tasks))
                many(
                    "INSERT OR REPLACE INTO meta VALUES (?,?)", ((k, orjson.dumps(v)) for k, v in changes.meta.items())
                )
                many("INSERT OR REPLACE INTO counters VALUES (?,?)", changes.counters.items())
                self._writer.execute("COMMIT")
            except BaseException:
                if self._writer.in_transaction:
                    self._writer.execute("ROLLBACK")
                raise

    def payloads(self, row_ids: Iterable[int]) -> dict[int, Frames]:
        """Frames of stored trajectories, as they came, by ``row_id``; those that were forgotten are left out."""
        query = "SELECT header, token_ids, logprobs, spans FROM payloads WHERE row_id = ?"
        with self._reading, self._explained("read"):
            found = {row_id: self._reader.execute(query, (row_id,)).fetchone() for row_id in row_ids}
        return {row_id: tuple(row) for row_id, row in found.items() if row is not None}

    @contextmanager
    def _explained(self, done: str) -> Iterator[None]:
        try:
            yield
        except sqlite3.Error as error:
            raise StoreError(
                f"the replay store {self.path} could not be {done}: {error}. If the disk is full, free some and start "
                "again; if the file is damaged, move it away to start with an empty store"
            ) from error
