"""Everything the stage knows, on disk: one SQLite database, one transaction per round of events.

A killed process leaves a state that existed. Payloads are kept as they came over the wire. The store is written by one
thread at a time and may be read by others meanwhile (WAL).
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
from pipeline.replay import store_file
from pipeline.replay.journal import Changes
from pipeline.replay.snapshot import POOL_COLUMNS, REPLAY_COLUMNS, Rows, Snapshot, build
from pipeline.rundir import RunDirectory, read_json
from pipeline.transport.base import Frames

_GROUP_COLUMNS = (
    "number, task, n_rollout, n_fresh, k, rescued, admitted_update, state, update_number, late, reason, planned_at, "
    "ended_at"
)
_GROUP = f"""
INSERT INTO groups ({_GROUP_COLUMNS}) VALUES ({",".join("?" * 13)}) ON CONFLICT (number) DO UPDATE SET
n_fresh = excluded.n_fresh, k = excluded.k, rescued = excluded.rescued, state = excluded.state,
update_number = excluded.update_number, late = excluded.late, reason = excluded.reason, ended_at = excluded.ended_at"""
_REPLAY = f"INSERT OR REPLACE INTO group_replays VALUES ({','.join('?' * 11)})"
_ORDER = f"INSERT OR REPLACE INTO orders VALUES ({','.join('?' * 11)})"
_TRAJECTORY = f"""
INSERT INTO trajectories VALUES ({",".join("?" * 25)}) ON CONFLICT (seq) DO UPDATE SET state = excluded.state,
reason = excluded.reason, reward = excluded.reward, rewards = excluded.rewards, samples = excluded.samples,
saved = excluded.saved"""
_SAMPLED = "UPDATE trajectories SET samples = samples + 1 WHERE seq = ?"
_POOL = f"INSERT OR REPLACE INTO pool VALUES ({','.join('?' * 8)})"
_TASK = f"INSERT OR REPLACE INTO tasks VALUES ({','.join('?' * 7)})"


JUMP_GROUPS = 1_000_000
"""More groups than a stage can admit between two copies of a store in memory."""


def store_path(config: RunConfig, directory: RunDirectory) -> Path:
    """The SQLite file of a run."""
    return Path(config.replay.store) if config.replay.store else directory.store_file


def version_file(path: Path) -> Path:
    """Holds the newest policy version where the store at ``path`` is only copied now and then."""
    return path.with_name(path.name + ".version")


class ReplayStore:
    """Opens or creates ``path``; refuses a file that is foreign, corrupt, of another version, or in use.

    Raises :class:`StoreError` everywhere something is wrong with the file; the message names the remedy.
    """

    def __init__(self, path: Path, synchronous: str = "FULL") -> None:
        self.path = path
        exists = store_file.check_header(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        self._lock = store_file.lock(path)
        self._closed = False
        self._reading = threading.Lock()
        self._writing = threading.Lock()
        try:
            with self._explained("opened"):
                self._open(exists, synchronous)
        except BaseException:
            self._lock.release()
            raise

    def _open(self, exists: bool, synchronous: str) -> None:
        if exists:
            self._check_tables()
        else:
            store_file.create(self.path)
        self._writer = store_file.connect(self.path, synchronous=synchronous)
        self._reader = store_file.connect(self.path, read_only=True)

    def _check_tables(self) -> None:
        connection = store_file.connect(self.path, read_only=True)
        try:
            store_file.check_tables(connection, self.path)
        finally:
            connection.close()

    def __enter__(self) -> ReplayStore:
        return self

    def __exit__(self, *args: object) -> None:
        self.close()

    def close(self) -> None:
        """Harmless when done already."""
        self.abandon()

    _current = True
    """Whether the file always holds the last commit."""

    def abandon(self) -> None:
        """Close as a kill does: nothing is written any more (for tests)."""
        if not self._closed:
            self._closed = True
            self._reader.close()
            self._writer.close()
            self._lock.release()

    def load(self) -> Snapshot:
        """What the stage goes on from."""
        with self._explained("read"):
            lost = self._go_back()
            read = self._writer.execute
            kept = "group_number IN (SELECT number FROM groups WHERE kept = 1)"
            rows = Rows(
                read(f"SELECT {_GROUP_COLUMNS} FROM groups WHERE kept = 1 ORDER BY number"),
                read(f"SELECT * FROM orders WHERE {kept}"),
                read(f"SELECT * FROM trajectories WHERE {kept}"),
                read(f"SELECT {REPLAY_COLUMNS} FROM group_replays r JOIN trajectories t USING (seq) WHERE r.{kept} "
                     "ORDER BY r.group_number, r.position"),
                read("SELECT * FROM tasks"),
                read(f"SELECT {POOL_COLUMNS} FROM pool p JOIN trajectories t USING (seq) ORDER BY p.saved"),
            )  # fmt: skip
            meta = {key: orjson.loads(value) for key, value in read("SELECT key, value FROM meta")}
            next_seq = read("SELECT coalesce(max(seq) + 1, 0) FROM trajectories").fetchone()[0]
            snapshot = build(rows, meta, dict(read("SELECT name, value FROM counters")), next_seq)
            snapshot.lost = lost
            return snapshot

    def _go_back(self) -> bool:
        """Whether this is an older state than the one that peers have seen (``replay.memory_only``, killed). Ids given
        since then must not be given again, a version must not name other weights, and nothing is admitted before the
        learner has said how far it is."""
        meta = {key: orjson.loads(value) for key, value in self._writer.execute("SELECT key, value FROM meta")}
        lost = meta.get("clean") is False
        if lost:
            self._put("next_group", meta.get("next_group", 0) + JUMP_GROUPS)
            version = (read_json(version_file(self.path)) or {}).get("policy_version", -1)
            self._put("live", None)
            self._put("policy_version", max(version, meta.get("policy_version", -1)))
        if lost or not self._current:
            self._put("clean", self._current)
        return lost

    def _put(self, key: str, value: object) -> None:
        with self._writing:
            self._writer.execute("INSERT OR REPLACE INTO meta VALUES (?,?)", (key, orjson.dumps(value)))

    def checkpoint(self) -> None:
        """Make everything committed as durable as it will ever be; here it is already."""

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
                many(_SAMPLED, ((seq,) for seq in changes.sampled))
                many("INSERT INTO payloads VALUES (?,?,?,?,?)", ((seq, *frames) for seq, frames in changes.payloads))
                many("DELETE FROM payloads WHERE seq = ?", ((seq,) for seq in changes.forgotten_payloads))
                many("UPDATE groups SET kept = 0 WHERE number = ?", ((n,) for n in changes.forgotten_groups))
                many(_POOL, changes.pool)
                many("DELETE FROM pool WHERE seq = ?", ((seq,) for seq in changes.left_pool))
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

    def payloads(self, seqs: Iterable[int]) -> dict[int, Frames]:
        """Frames of stored trajectories, as they came, by ``seq``; those that were forgotten are left out."""
        query = "SELECT header, token_ids, logprobs, spans FROM payloads WHERE seq = ?"
        with self._reading, self._explained("read"):
            found = {seq: self._reader.execute(query, (seq,)).fetchone() for seq in seqs}
        return {seq: tuple(row) for seq, row in found.items() if row is not None}

    @contextmanager
    def _explained(self, done: str) -> Iterator[None]:
        try:
            yield
        except sqlite3.Error as error:
            raise StoreError(
                f"the replay store {self.path} could not be {done}: {error}. If the disk is full, free some and start "
                "again; if the file is damaged, move it away to start with an empty store"
            ) from error
