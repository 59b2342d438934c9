"""Flipped bits anywhere in a store are noticed when it is opened, and a store that is whole is never called damaged."""

from __future__ import annotations

import errno
import os
import random
import shutil
import sqlite3
from pathlib import Path

import pytest

from pipeline.errors import DamagedFiles, StoreError
from pipeline.store import page_digests
from pipeline.store.page_digests import PageDigests
from pipeline.store.sqlite import PAGE_BYTES
from pipeline.store.store import ReplayStore
from tests.support.damage import database_parts, flip
from tests.unit.replay.test_store_that_went_back import StoredStage


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a store that was closed."""
    folder = tmp_path_factory.mktemp("stopped")
    stage = StoredStage(folder / "replay.sqlite")
    stage.train(6)
    stage.store.close()
    return folder


def copied(folder: Path, to: Path) -> Path:
    shutil.copytree(folder, to, dirs_exist_ok=True)
    return to / "replay.sqlite"


def test_a_flipped_bit_in_any_value_of_the_store_is_noticed(
    stopped: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    parts = database_parts(stopped / "replay.sqlite")
    assert {"meta.consumed", "meta.policy_version", "meta.next_group", "meta.learner", "a payload"} <= parts.keys()
    for part, at in parts.items():
        path = copied(stopped, tmp_path)
        flip(path, at)
        try:
            ReplayStore(path).close()
        except DamagedFiles as error:
            assert "\n" not in str(error) and "ove it away" in str(error), part
        else:
            assert "went back" in caplog.text, f"{part} is not noticed"
            caplog.clear()


def test_a_transaction_whose_outcome_is_unknown_is_no_damage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The disk gives an error at the end of a commit that is complete, and the process closes its store."""
    stage = StoredStage(tmp_path / "replay.sqlite")
    stage.train(2)

    class Failing:
        """A connection whose commits succeed, and raise."""

        def __init__(self, connection: sqlite3.Connection) -> None:
            self._connection = connection

        def __getattr__(self, name: str) -> object:
            return getattr(self._connection, name)

        def execute(self, sql: str, *arguments: object) -> sqlite3.Cursor:
            cursor = self._connection.execute(sql, *arguments)
            if sql == "COMMIT":
                raise sqlite3.OperationalError("disk I/O error")
            return cursor

    monkeypatch.setattr(stage.store, "_writer", Failing(stage.store._writer))
    with pytest.raises(StoreError, match="disk I/O error"):
        stage.train(3)
    stage.store.close()
    ReplayStore(tmp_path / "replay.sqlite").close()


def test_a_store_is_opened_without_its_digests_and_has_them_afterwards(stopped: Path, tmp_path: Path) -> None:
    path = copied(stopped, tmp_path)
    pages = path.with_name("replay.sqlite.pages")
    before = pages.read_bytes()
    pages.unlink()
    ReplayStore(path).close()
    assert len(pages.read_bytes()) == len(before)
    flip(path, database_parts(path)["meta.consumed"])
    with pytest.raises(DamagedFiles, match=r"remove .*replay\.sqlite\.pages"):
        ReplayStore(path)


class Database:
    """A database that is written as the store is, and copied as a kill leaves it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.writer = sqlite3.connect(path, isolation_level=None)
        self.writer.execute("PRAGMA journal_mode = WAL")
        self.writer.execute("PRAGMA wal_autocheckpoint = 0")
        self.writer.execute("CREATE TABLE IF NOT EXISTS t (id INTEGER PRIMARY KEY, data BLOB)")
        self.digests = PageDigests(path)
        self.digests.open(self.writer)
        if not self.digests.known:
            self.digests.build()

    def change(self, rng: random.Random) -> None:
        run = self.writer.execute
        run("BEGIN")
        for _ in range(rng.randrange(1, 20)):
            if rng.random() < 0.7:
                run("INSERT OR REPLACE INTO t VALUES (?, ?)", (rng.randrange(200), rng.randbytes(rng.randrange(9000))))
            else:
                run("DELETE FROM t WHERE id = ?", (rng.randrange(200),))
        run("ROLLBACK" if rng.random() < 0.2 else "COMMIT")
        self.digests.committed(self.writer)

    def close(self) -> None:
        self.digests.close()
        self.writer.close()

    def killed(self, to: Path) -> Path:
        to.mkdir()
        for name in ("db", "db-wal", "db.pages"):
            if (self.path.parent / name).exists():
                shutil.copyfile(self.path.parent / name, to / name)
        return to / "db"


@pytest.mark.parametrize("seed", range(6))
def test_a_whole_database_is_never_called_damaged_however_its_process_ended(
    tmp_path: Path, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(page_digests, "CHECKPOINT_FRAMES", 40)
    rng = random.Random(seed)
    database = Database(tmp_path / "db")
    for number in range(60):
        database.change(rng)
        if rng.random() < 0.2:
            path = database.killed(tmp_path / f"killed {number}")
            if rng.random() < 0.5:
                database.close()
            else:
                database.digests.close()
            if rng.random() < 0.3:
                path.with_name("db.pages").unlink()
            database = Database(path)
            assert database.digests.find_damage(10) == ""
    database.close()
    database = Database(database.path)
    assert database.digests.find_damage(10) == ""
    database.close()
    flip(database.path, PAGE_BYTES + 20)
    damaged = PageDigests(database.path)
    assert damaged.find_damage(10) == "page 2 is not the one that was written"


def test_digests_that_find_no_room_are_written_later_and_the_log_stays_until_then(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, "full")

    monkeypatch.setattr(page_digests, "CHECKPOINT_FRAMES", 10)
    rng, database = random.Random(1), Database(tmp_path / "db")
    with monkeypatch.context() as room:
        room.setattr(os, "pwrite", full)
        for _ in range(30):
            database.change(rng)
    killed = Database(database.killed(tmp_path / "killed"))
    assert killed.digests.find_damage(10) == ""
    database.change(rng)
    database.close()
    again = Database(database.path)
    assert again.digests.find_damage(10) == ""
