"""``replay.memory_only``: the same tables in memory, and a whole copy of them on disk every now and then.

A copy is written beside the old one, made durable and renamed, so that there is always a complete one. A killed stage
goes back to the last copy. What peers have seen since is unknown to it, so it then gives up everything that was open,
and its group numbers jump ahead: no id is ever used twice.
"""

from __future__ import annotations

import os
import sqlite3
import time
from pathlib import Path

from pipeline.config.replay import ReplayConfig
from pipeline.replay import store_file
from pipeline.replay.journal import Changes
from pipeline.replay.snapshot import Snapshot
from pipeline.replay.store import ReplayStore, version_file
from pipeline.rundir import sync, write_json_atomically

STEP_PAGES = 2048
"""Pages copied at once; transactions may come between two steps."""
YIELD_SECONDS = 0.001


class MemoryStore(ReplayStore):
    """A :class:`ReplayStore` whose commits are as durable as the last :meth:`checkpoint`."""

    _current = False

    def _open(self, exists: bool, synchronous: str) -> None:
        self._committed = True
        memory = sqlite3.connect(":memory:", isolation_level=None, check_same_thread=False)
        try:
            if exists:
                self._check_tables()
                source = store_file.connect(self.path, synchronous=synchronous)
                try:
                    # folds a write-ahead log into the file: copies that replace the file have none
                    source.execute("PRAGMA journal_mode = DELETE")
                    source.backup(memory)
                finally:
                    source.close()
            else:
                store_file.make_tables(memory)
        except BaseException:
            memory.close()
            raise
        self._writer = self._reader = memory
        self._writing = self._reading

    def load(self) -> Snapshot:
        """What the stage goes on from. After a kill this is the last copy, and says so (:attr:`Snapshot.lost`)."""
        snapshot = super().load()
        # what is jumped over, and that the next start is not a clean one, must be known before anybody is served
        self.checkpoint()
        return snapshot

    def commit(self, changes: Changes) -> None:
        """Write one round to memory; a new policy version is also on the disk when this returns."""
        super().commit(changes)
        self._committed = True
        if "policy_version" in changes.meta:
            version = {"policy_version": changes.meta["policy_version"]}
            write_json_atomically(version_file(self.path), version, durable=True)

    def checkpoint(self) -> None:
        """Write a whole copy; other threads may read and commit meanwhile. Nothing new: nothing is written."""
        if not self._committed:
            return
        part = self.path.with_name(self.path.name + ".part")
        part.unlink(missing_ok=True)
        with self._explained("copied to disk"):
            target = sqlite3.connect(part, isolation_level=None)
            try:
                target.execute("PRAGMA journal_mode = OFF")
                target.execute("PRAGMA synchronous = OFF")
                self._copy(target)
            finally:
                target.close()
        sync(part)
        os.replace(part, self.path)
        sync(self.path.parent)

    def close(self) -> None:
        """Write the last copy. Harmless when done already."""
        if self._closed:
            return
        try:
            with self._explained("written"):
                self._put("clean", True)
            self._committed = True
            self.checkpoint()
        finally:
            self.abandon()

    def _copy(self, target: sqlite3.Connection) -> None:
        self._reading.acquire()
        try:

            def between(status: int, remaining: int, total: int) -> None:
                if remaining:
                    self._reading.release()
                    time.sleep(YIELD_SECONDS)
                    self._reading.acquire()
                else:
                    self._committed = False

            self._writer.backup(target, pages=STEP_PAGES, progress=between)
        finally:
            self._reading.release()


def open_store(config: ReplayConfig, path: Path) -> ReplayStore:
    """The store that the configuration asks for. Raises :class:`StoreError`."""
    return (MemoryStore if config.memory_only else ReplayStore)(path, config.synchronous)
