"""Damage to a store and the files beside it: the stage starts from the same rows, or says in one sentence why not."""

from __future__ import annotations

import logging
import shutil
import sqlite3
from contextlib import closing, nullcontext, suppress
from pathlib import Path
from typing import Any

import pytest

from pipeline.errors import DamagedFiles
from pipeline.store import store
from pipeline.store.store import ReplayStore
from pipeline.store.tables import row_digest
from tests.support.damage import damages_of
from tests.unit.stage.test_store_that_went_back import StoredStage

STOPPED = ("replay.sqlite", "replay.sqlite.ids")
KILLED = (*STOPPED, "replay.sqlite-wal", "replay.sqlite-shm")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Copies of one store: an older one, one as a kill leaves it, and one that was closed."""
    root = tmp_path_factory.mktemp("store")
    (root / "base").mkdir()
    stage = StoredStage(root / "base" / "replay.sqlite")
    stage.train(2)
    shutil.copytree(root / "base", root / "older")
    ReplayStore(root / "older" / "replay.sqlite").close()
    stage.train(5)
    shutil.copytree(root / "base", root / "killed")
    stage.store.close()
    return {"older": root / "older", "killed": root / "killed", "stopped": root / "base"}


def rows_of(path: Path) -> dict[str, list[Any]]:
    """Every row after the stage has opened the store."""
    ReplayStore(path).close()
    with closing(sqlite3.connect(path)) as connection:
        tables = [name for (name,) in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")]
        return {table: connection.execute(f"SELECT * FROM {table}").fetchall() for table in tables}


@pytest.mark.parametrize(
    ("copy", "file"), [*(("stopped", file) for file in STOPPED), *(("killed", file) for file in KILLED)]
)
def test_nothing_damaged_is_used_in_silence(
    folders: dict[str, Path], tmp_path: Path, copy: str, file: str, caplog: pytest.LogCaptureFixture
) -> None:
    intact = rows_of(shutil.copytree(folders[copy], tmp_path / "intact") / "replay.sqlite")
    older = folders["older"] / file
    for damage in list(damages_of(folders[copy] / file, older if older.exists() else None)):
        folder = shutil.copytree(folders[copy], tmp_path / "damaged")
        damage.apply(folder / file)
        caplog.clear()
        try:
            with caplog.at_level(logging.WARNING):
                found = rows_of(folder / "replay.sqlite")
        except DamagedFiles as error:
            assert "\n" not in str(error), damage.name
        else:
            told = "went back" in caplog.text or "is missing" in caplog.text
            assert told or found == intact, damage.name
        shutil.rmtree(folder)


def test_a_changed_value_in_any_row_of_any_table_is_noticed(folders: dict[str, Path], tmp_path: Path) -> None:
    """In each column of the last row of each table, to another value of its type and to values of other types, written
    by a connection so that every page stays sound."""
    with closing(sqlite3.connect(folders["stopped"] / "replay.sqlite")) as connection:
        columns = [
            (table, column, declared)
            for (table,) in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'").fetchall()
            for _, column, declared, *_ in connection.execute(f"PRAGMA table_info({table})").fetchall()
            if connection.execute(f"SELECT count({column}) FROM {table}").fetchone()[0]
        ]
    assert {"groups", "orders", "trajectories", "meta", "counters", "payloads"} <= {c[0] for c in columns}
    for table, column, declared in columns:
        near = {"TEXT": f"{column} || 'x'", "BLOB": f"CAST({column} || 'x' AS BLOB)"}.get(declared, f"{column} + 1")
        for other in (near, "NULL", "'word'", "x'ff00'", "0.5"):
            folder = shutil.copytree(folders["stopped"], tmp_path / "changed")
            with closing(sqlite3.connect(folder / "replay.sqlite", isolation_level=None)) as connection:
                last = f"SELECT max({column}) FROM {table}"
                with suppress(sqlite3.IntegrityError):  # a type that this column cannot have
                    connection.execute(f"UPDATE {table} SET {column} = {other} WHERE {column} = ({last})")
                changed = connection.total_changes
            with pytest.raises(DamagedFiles) if changed else nullcontext():
                ReplayStore(folder / "replay.sqlite").close()
            shutil.rmtree(folder)


def test_rows_are_checked_however_slow_the_machine_is(
    folders: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store, "CHECK_SECONDS_MAX", 0.0)
    monkeypatch.setattr(store, "_CHECK_STEPS", 1)
    folder = shutil.copytree(folders["stopped"], tmp_path / "changed")
    ReplayStore(folder / "replay.sqlite").close()
    with closing(sqlite3.connect(folder / "replay.sqlite", isolation_level=None)) as connection:
        connection.execute("UPDATE trajectories SET n_tokens = n_tokens + 1 WHERE row_id = (SELECT max(row_id) FROM "
                           "trajectories)")  # fmt: skip
    with pytest.raises(DamagedFiles, match="of table trajectories"):
        ReplayStore(folder / "replay.sqlite")


def test_digest_of_a_row_is_the_same_before_and_after_it_is_stored() -> None:
    row = (7, "name", True, False, 1, 0.0, 2.5, float("nan"), None, b"bytes", -3, float("inf"), 2**60)
    with closing(sqlite3.connect(":memory:")) as connection:
        types = ("INTEGER", "TEXT", "INTEGER", *("REAL",) * 6, "BLOB", "REAL", "REAL", "INTEGER")
        connection.execute(f"CREATE TABLE t ({', '.join(f'c{i} {kind}' for i, kind in enumerate(types))})")
        connection.execute(f"INSERT INTO t VALUES ({','.join('?' * len(row))})", row)
        stored = connection.execute("SELECT * FROM t").fetchone()
    assert row_digest(stored, None) == row_digest(row, None)
    assert row_digest(stored, 0) == row_digest(row, 0) == row_digest((8, *row[1:]), 0) - 1
