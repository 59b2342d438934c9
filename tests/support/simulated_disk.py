"""The disk of a simulated run: it refuses writes, forgets what was written last, and damages files.

Refusals come from below the product: SQLite's COMMIT, ``fsync`` and ``pwrite`` fail. Otherwise nothing waits for a real
disk: durability is simulated too.
"""

from __future__ import annotations

import errno
import os
import random
import sqlite3
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future
from contextlib import contextmanager
from typing import Any
from unittest import mock

from learner.checkpoints.checkpoint import find_checkpoints
from pipeline.runtime import folders as contents
from pipeline.runtime.run_directory import RunDirectory
from pipeline.store.sqlite import _RECORD, _SLOT_BYTES, Mark
from pipeline.store.store import marks_path
from pipeline.store.tables import STORE
from tests.support.damage import DAMAGES, files_in
from tests.support.simulated_engine import WEIGHTS_FILE


class _Inline(Executor):
    """Computes digests in the calling thread."""

    def __init__(self, threads_max: int) -> None:
        pass

    def submit(self, fn: Callable[..., Any], /, *arguments: Any, **more: Any) -> Future[Any]:
        future: Future[Any] = Future()
        try:
            future.set_result(fn(*arguments, **more))
        except Exception as error:
            future.set_exception(error)
        return future


class SimulatedDisk:
    """Of one run directory. ``error``: what every write fails with; 0: none does."""

    def __init__(self, directory: RunDirectory, rng: random.Random) -> None:
        self.error = 0
        self.went_back = False
        """The store lost transactions that were acknowledged."""
        self.torn_checkpoints = 0
        self._directory = directory
        self._store = directory.store_file
        self._rng = rng
        self._copy = directory.path / "older.sqlite"
        self._older: bytes | None = None
        """State of the store at the stage's next start."""

    def keep_copy(self) -> None:
        """A copy that may take the store's place later."""
        if self._store.exists():
            STORE.copy(self._store, self._copy)

    def forget(self) -> None:
        """The stage, which is being killed, finds at its next start only what is in the store without its ``-wal``, or
        the copy. To be called before it closes the store."""
        if self._store.exists():
            copied = self._copy.exists() and self._rng.random() < 0.5
            self._older = (self._copy if copied else self._store).read_bytes()

    def before_start(self) -> None:
        """Of the stage."""
        if self._older is not None:
            self._store.write_bytes(self._older)
            for end in ("-wal", "-shm"):
                self._store.with_name(self._store.name + end).unlink(missing_ok=True)
            self._older = None
            self.went_back = True

    def tear_marks(self) -> None:
        """Lose the newest record of used ids, if no ``fsync`` came after it."""
        path = marks_path(self._store)
        if not path.exists():
            return
        data = bytearray(path.read_bytes())
        slots = [Mark.unpack(bytes(data[at : at + _SLOT_BYTES])) for at in (0, _SLOT_BYTES)]
        if None in slots:
            return
        newest, older = sorted((0, 1), key=lambda at: -slots[at].sequence)  # type: ignore[union-attr]
        a, b = slots[newest], slots[older]
        assert a is not None and b is not None
        if (a.groups, a.rows, a.store) == (b.groups, b.rows, b.store) and a.transactions > b.transactions:
            torn = self._rng.randint(1, _RECORD.size)
            end = newest * _SLOT_BYTES + _RECORD.size
            data[end - torn : end] = bytes(torn)
            path.write_bytes(data)

    def tear_checkpoint(self) -> None:
        """Damage the newest checkpoint, if there is an older one to resume from."""
        found = find_checkpoints(self._directory.checkpoints)
        if len(found) > 1:
            name = self._rng.choice(files_in(found[0]))
            if (found[0] / name).stat().st_size:
                DAMAGES[self._rng.choice(sorted(DAMAGES))](found[0] / name)
                self.torn_checkpoints += 1

    def damage_weights(self, version: int) -> None:
        """Damage the weights of a version, whose digests were written."""
        folder = self._directory.weights(version)
        if (folder / contents.CONTENTS).exists() and (folder / WEIGHTS_FILE).exists():
            DAMAGES[self._rng.choice(sorted(DAMAGES))](folder / WEIGHTS_FILE)

    def _refusal(self) -> OSError | None:
        if not self.error:
            return None
        return OSError(self.error, os.strerror(self.error))

    @contextmanager
    def below(self) -> Iterator[None]:
        """Inside, writes of this process meet this disk."""
        disk, pwrite, connect = self, os.pwrite, sqlite3.connect

        def synced(fd: int) -> None:
            if (error := disk._refusal()) is not None:
                raise error

        def written(fd: int, data: bytes, at: int) -> int:
            if (error := disk._refusal()) is not None:
                raise error
            return pwrite(fd, data, at)

        class Connection(sqlite3.Connection):
            def execute(self, sql: str, *more: Any) -> sqlite3.Cursor:
                if sql == "COMMIT" and (error := disk._refusal()) is not None:
                    raise disk._sqlite_error(self, error)
                return super().execute(sql, *more)

        def connected(*arguments: Any, **more: Any) -> sqlite3.Connection:
            more.setdefault("factory", Connection)
            return connect(*arguments, **more)

        with (
            mock.patch.object(os, "fsync", synced),
            mock.patch.object(os, "pwrite", written),
            mock.patch.object(sqlite3, "connect", connected),
            mock.patch.object(contents, "ThreadPoolExecutor", _Inline),
        ):
            yield

    def _sqlite_error(self, connection: sqlite3.Connection, error: OSError) -> sqlite3.OperationalError:
        """A commit that met an I/O error may be in the store nevertheless."""
        if error.errno == errno.EIO and self._rng.random() < 0.5:
            sqlite3.Connection.execute(connection, "COMMIT")
        full = error.errno != errno.EIO
        failed = sqlite3.OperationalError("database or disk is full" if full else "disk I/O error")
        failed.sqlite_errorcode = sqlite3.SQLITE_FULL if full else sqlite3.SQLITE_IOERR
        return failed
