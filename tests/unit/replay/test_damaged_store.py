"""Damage to a store and the files beside it: the stage starts from the same rows, or says in one sentence why not."""

from __future__ import annotations

import logging
import shutil
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from pipeline.errors import DamagedFiles
from pipeline.store.store import ReplayStore
from tests.support.damage import damages_of
from tests.unit.replay.test_store_that_went_back import StoredStage

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


def only_one_row_differs(found: dict[str, list[Any]], intact: dict[str, list[Any]]) -> bool:
    """True if nothing differs but one row, of a table whose values have no digest."""
    differ = [(table, a, b) for table in intact for a, b in zip(found[table], intact[table], strict=True) if a != b]
    return len(differ) <= 1 and not {table for table, _, _ in differ} & {"meta", "counters", "payloads"}


@pytest.mark.parametrize(
    ("copy", "file"), [*(("stopped", file) for file in STOPPED), *(("killed", file) for file in KILLED)]
)
def test_nothing_damaged_is_used_in_silence(
    folders: dict[str, Path], tmp_path: Path, copy: str, file: str, caplog: pytest.LogCaptureFixture
) -> None:
    intact = rows_of(shutil.copytree(folders[copy], tmp_path / "intact") / "replay.sqlite")
    older = folders["older"] / file
    for damage in list(damages_of(folders[copy] / file, older if older.exists() else None)):
        if damage.name.endswith("(last cell)"):
            continue  # a value in a row of a table has no digest
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
            assert told or only_one_row_differs(found, intact), damage.name
        shutil.rmtree(folder)
