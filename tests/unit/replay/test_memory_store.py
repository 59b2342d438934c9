"""``replay.memory_only``: whole copies, and a way back to one that never gives an id twice."""

from __future__ import annotations

import os
import sqlite3
import threading
from pathlib import Path
from typing import Any

import pytest

from pipeline.config.replay import ReplayConfig
from pipeline.replay.journal import Changes
from pipeline.replay.ledger import read_ledger
from pipeline.replay.memory_store import open_store
from pipeline.replay.store import JUMP_GROUPS, ReplayStore, version_file

MEMORY = ReplayConfig(memory_only=True)
DISK = ReplayConfig(synchronous="NORMAL")


def counters(path: Path) -> Any:
    return read_ledger(path).orders


def test_a_clean_end_writes_everything_and_the_next_start_goes_on(tmp_path: Path) -> None:
    path = tmp_path / "s.sqlite"
    store = open_store(MEMORY, path)
    store.load()
    store.commit(Changes(meta={"next_group": 7, "policy_version": 3, "live": 2}, counters={"orders.issued": 5}))
    assert counters(path) == {}, "not copied yet"
    store.close()
    assert counters(path) == {"issued": 5}
    for config in (MEMORY, DISK):
        with open_store(config, path) as again:
            snapshot = again.load()
            assert not snapshot.lost and snapshot.meta["next_group"] == 7 and snapshot.meta["live"] == 2
    assert not path.with_name("s.sqlite.part").exists()


def test_after_a_kill_the_last_copy_is_there_and_says_so(tmp_path: Path) -> None:
    path = tmp_path / "s.sqlite"
    store = open_store(MEMORY, path)
    store.load()
    store.commit(Changes(meta={"next_group": 7, "policy_version": 3}, counters={"orders.issued": 5}))
    store.checkpoint()
    store.commit(Changes(meta={"next_group": 9, "policy_version": 6}, counters={"orders.issued": 6}))
    store.abandon()
    for kills in (1, 2):
        again = open_store(MEMORY, path)
        snapshot = again.load()
        assert snapshot.lost and snapshot.counters == {"orders.issued": 5}
        assert snapshot.meta["next_group"] == 7 + kills * JUMP_GROUPS, "every life has its own numbers"
        assert snapshot.meta["policy_version"] == 6, "a version never names two sets of weights"
        assert snapshot.meta["live"] is None, "nothing is admitted before the learner has spoken"
        again.abandon()
    with open_store(DISK, path) as disk:
        assert disk.load().lost
    with open_store(DISK, path) as disk:
        assert not disk.load().lost
    assert version_file(path).exists()


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="needs /proc to tell which file is made durable")
def test_a_version_is_on_the_disk_before_its_commit_returns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "s.sqlite"
    events: list[tuple[str, str]] = []
    fsync, replace = os.fsync, Path.replace

    def seen_fsync(fd: int) -> None:
        events.append(("fsync", Path(os.readlink(f"/proc/self/fd/{fd}")).name))
        fsync(fd)

    def seen_replace(self: Path, target: Path) -> Path:
        events.append(("rename", target.name))
        return replace(self, target)

    with open_store(MEMORY, path) as store:
        store.load()
        monkeypatch.setattr(os, "fsync", seen_fsync)
        monkeypatch.setattr(Path, "replace", seen_replace)
        store.commit(Changes(counters={"orders.issued": 1}))
        assert events == []
        store.commit(Changes(meta={"policy_version": 3}))
        name = version_file(path).name
        written = f".{name}.{os.getpid()}"
        assert events == [("fsync", written), ("rename", name), ("fsync", tmp_path.name)]
        monkeypatch.undo()


def test_a_copy_taken_while_others_write_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "s.sqlite"
    store = open_store(MEMORY, path)
    store.load()
    blob = bytes(100_000)

    def write(first: int) -> None:
        for i in range(first, first + 100):
            store.commit(Changes(payloads=[(i, (blob, blob, b"", b""))], counters={"payloads": i + 1}))

    write(0)
    writer = threading.Thread(target=write, args=(100,), daemon=True)
    writer.start()
    rows = 0
    while rows < 200:
        store.commit(Changes(counters={"copies": 1}))
        alive = writer.is_alive()
        store.checkpoint()
        connection = sqlite3.connect(path)
        found = connection.execute(
            "SELECT count(*), (SELECT value FROM counters WHERE name = 'payloads') FROM payloads"
        )
        rows, counted = found.fetchone()
        connection.close()
        assert rows == counted >= 100
        assert alive or rows == 200, "what was committed before the copy is in it"
    store.close()


def test_a_run_on_disk_can_go_on_in_memory(tmp_path: Path) -> None:
    path = tmp_path / "s.sqlite"
    with ReplayStore(path, "NORMAL") as store:
        store.commit(Changes(counters={"orders.issued": 4}))
    with open_store(MEMORY, path) as memory:
        assert memory.load().counters == {"orders.issued": 4}
    assert sorted(p.name for p in tmp_path.iterdir()) == ["s.sqlite", "s.sqlite.lock"]
