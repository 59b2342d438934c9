"""The store: what was committed is there once, and a file that is not ours is refused unharmed."""

from __future__ import annotations

import os
import random
import signal
import sqlite3
import subprocess
import sys
from pathlib import Path

import anyio
import pytest

from pipeline.config import RunConfig
from pipeline.errors import StoreError
from pipeline.runtime import disk as disk_wait
from pipeline.runtime.run_directory import RunDirectory
from pipeline.schema.counters import Count
from pipeline.stage.core import StageCore
from pipeline.store import store as module
from pipeline.store.journal import Changes
from pipeline.store.ledger import read_ledger
from pipeline.store.queries import reading
from pipeline.store.store import ReplayStore, store_path
from pipeline.store.tables import STORE

CHILD = """
import sys
from pathlib import Path
from pipeline.schema.codec import encode_trajectory
from pipeline.schema.orders import Order, decode_request
from pipeline.config import RunConfig
from pipeline.stage.core import StageCore
from tests.support.simulated_roles import rollout
from pipeline.store.store import ReplayStore
from pipeline.scorer.scorer import Scorer
from pipeline.transport.messages import Kind, WireMessage

config = RunConfig.model_validate({
    "run": {"total_steps": 10**6}, "groups": {"n_rollout": 4, "groups_per_step": 10_000}, "environments": {"a": {}},
    "stage": {"silence_seconds_max": 10},
})
store = ReplayStore(Path(sys.argv[1]), "NORMAL")
core = StageCore(config, store.load(), score_now=Scorer(config.scorer).score_now)
core.peer_up("actor-0", {"role": "actor", "schema_version": 1, "slots": 16, "holding": []})
core.peer_up("learner", {"role": "learner", "schema_version": 1, "session": "s", "updates": 0, "policy_version": -1,
    "credit_groups": 1})
core.message("learner", WireMessage(Kind.VERSION, {"number": 1, "policy_version": 0, "updates": 0}))
while True:
    core.plan()
    changes, effects = core.collect()
    store.commit(changes)
    for effect in effects:
        if effect.kind is Kind.ACK and effect.peer == "actor-0":
            sys.stdout.write("".join(i + "\\n" for i in effect.header["trajectory_ids"]))
            sys.stdout.flush()
        if effect.kind is Kind.ORDER:
            order = decode_request(Order, effect.header)
            frames = encode_trajectory(rollout(order, 0))
            core.message("actor-0", WireMessage(Kind.TRAJECTORY, {"trajectory_id": order.order_id}, frames))
"""


def test_acknowledged_trajectory_survives_kill(tmp_path: Path) -> None:
    path, rng = tmp_path / "replay.sqlite", random.Random(5)
    acknowledged: list[str] = []
    for _ in range(3):
        child = subprocess.Popen([sys.executable, "-c", CHILD, str(path)], stdout=subprocess.PIPE, text=True)
        assert child.stdout is not None
        try:
            for _ in range(rng.randrange(1, 150)):
                acknowledged.append(child.stdout.readline().strip())
        finally:
            os.kill(child.pid, signal.SIGKILL)
        acknowledged += [line for line in child.stdout.read().split("\n") if line.count(".") == 2][:-1]
        child.stdout.close()
        child.wait()
        with sqlite3.connect(path) as connection:
            stored = [row[0] for row in connection.execute("SELECT trajectory_id FROM trajectories")]
            payloads = connection.execute("SELECT count(*) FROM payloads JOIN trajectories USING (row_id)").fetchone()[
                0
            ]
            assert connection.execute("PRAGMA integrity_check").fetchone() == ("ok",)
        connection.close()
        assert len(stored) == len(set(stored)) == payloads
        assert set(acknowledged) <= set(stored)
        assert len(set(acknowledged)) == len(acknowledged)
        assert read_ledger(path, rows=True).audit() == []
    assert len(acknowledged) > 50


def foreign_sqlite(path: Path) -> None:
    connection = sqlite3.connect(path)
    connection.execute("CREATE TABLE other (x)")
    connection.commit()
    connection.close()


def other_version(path: Path) -> None:
    ReplayStore(path).close()
    connection = sqlite3.connect(path)
    connection.execute(f"PRAGMA user_version = {STORE.version + 1}")
    connection.close()


def older_version(path: Path) -> None:
    ReplayStore(path).close()
    connection = sqlite3.connect(path)
    connection.execute(f"PRAGMA user_version = {STORE.version - 1}")
    connection.close()


def changed(*statements: str):
    def change(path: Path) -> None:
        ReplayStore(path).close()
        connection = sqlite3.connect(path)
        for statement in statements:
            connection.execute(statement)
        connection.commit()
        connection.close()

    return change


def cut_off(path: Path) -> None:
    ReplayStore(path).close()
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def scribbled(path: Path) -> None:
    ReplayStore(path).close()
    data = bytearray(path.read_bytes())
    data[100:] = os.urandom(len(data) - 100)
    path.write_bytes(bytes(data))


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (lambda path: path.write_text("dear diary, this is not a data base " * 10), "something else"),
        (lambda path: path.write_bytes(b"short"), "something else"),
        (foreign_sqlite, "another program"),
        (other_version, "a newer Afterplay"),
        (older_version, "an older Afterplay"),
        (changed("DROP TABLE pool"), "expected pool with .* is not there"),
        (changed("ALTER TABLE trajectories DROP COLUMN saved"), "expected trajectories with .*saved"),
        (changed("ALTER TABLE tasks ADD COLUMN mood TEXT"), "expected tasks with .* has the columns .*mood"),
        (changed("DROP TABLE group_replays", "CREATE TABLE group_replays (x)"), "expected group_replays with"),
        (cut_off, "cut off"),
        (scribbled, "is damaged"),
    ],
)
def test_a_file_that_is_not_ours_is_refused_unharmed(tmp_path: Path, damage, says: str) -> None:
    path = tmp_path / "replay.sqlite"
    damage(path)
    before = path.read_bytes()
    with pytest.raises(StoreError, match=says) as caught:
        ReplayStore(path).load()
    assert "ove it away" in str(caught.value)
    assert path.read_bytes() == before


def test_a_store_is_made_on_a_file_system_without_hard_links(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr("os.link", refuse)
    path = tmp_path / "replay.sqlite"
    for _ in range(2):
        ReplayStore(path).close()
    assert read_ledger(path).updates == 0 and not [*tmp_path.glob("*.part")]


def test_a_store_of_an_older_version_is_refused_in_one_sentence_by_every_reader(tmp_path: Path) -> None:
    path = tmp_path / "replay.sqlite"
    older_version(path)
    for read in (ReplayStore, read_ledger, lambda path: reading(path).__enter__()):
        with pytest.raises(StoreError, match=rf"an older Afterplay \(store version {STORE.version - 1}") as caught:
            read(path)
        assert "\n" not in str(caught.value)


def test_the_log_of_another_store_is_not_played_into_a_new_one(tmp_path: Path) -> None:
    (tmp_path / "replay.sqlite-wal").write_bytes(b"what was not yet in the store")
    with pytest.raises(StoreError, match="move it back"):
        ReplayStore(tmp_path / "replay.sqlite")


def test_two_stages_cannot_write_one_store(tmp_path: Path) -> None:
    path = tmp_path / "replay.sqlite"
    with ReplayStore(path), pytest.raises(StoreError, match="another replay stage"):
        ReplayStore(path)
    ReplayStore(path).close()


def test_a_failed_commit_changes_nothing(tmp_path: Path) -> None:
    core = StageCore(RunConfig())
    with ReplayStore(tmp_path / "s.sqlite") as store:
        core.journal.count(Count.ORDERS_ISSUED)
        store.commit(core.collect()[0])
        core.journal.count(Count.ORDERS_ISSUED)
        changes = core.collect()[0]
        changes.payloads[1] = (b"too", b"few")
        with pytest.raises(StoreError):
            store.commit(changes)
        assert store.load().counters == {"orders.issued": 1}


def test_the_ledger_is_readable_while_the_stage_writes(tmp_path: Path) -> None:
    path = tmp_path / "s.sqlite"
    with pytest.raises(StoreError, match="no replay store"):
        read_ledger(path)
    core = StageCore(RunConfig())
    with ReplayStore(path) as store:
        core.journal.count(Count.ORDERS_ISSUED)
        store.commit(core.collect()[0])
        ledger = read_ledger(path, rows=True)
        assert ledger.orders == {"issued": 1}
        assert "orders issued: 1, but their states add up to 0" in ledger.audit()
    assert read_ledger(path).orders == {"issued": 1}


def test_the_store_is_in_the_run_directory_or_where_the_run_file_says(tmp_path: Path) -> None:
    directory = RunDirectory(tmp_path)
    assert store_path(RunConfig(), directory) == directory.store_file == tmp_path / "replay.sqlite"
    elsewhere = RunConfig.model_validate({"stage": {"store": str(tmp_path / "x" / "mine.db")}})
    assert store_path(elsewhere, directory) == tmp_path / "x" / "mine.db"


def test_a_transaction_that_finds_the_disk_full_is_written_once_when_there_is_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(disk_wait, "RETRY_SECONDS", 0.001)
    core = StageCore(RunConfig())
    with ReplayStore(tmp_path / "s.sqlite") as store:
        core.journal.count(Count.ORDERS_ISSUED, 3)
        changes = core.collect()[0]
        changes.payloads[1] = (bytes(100_000), b"", b"", b"")
        limit = store._writer.execute("PRAGMA max_page_count = 1").fetchone()[0]
        attempts = 0

        def commit() -> None:
            nonlocal attempts
            attempts += 1
            if attempts == 3:
                assert read_ledger(store.path).orders == {}
                store._writer.execute(f"PRAGMA max_page_count = {limit + 100}")
            store.commit(changes)

        anyio.run(disk_wait.when_room, commit, store.path, "the replay store", changes.n_bytes)
        assert attempts == 3
        assert store.load().counters == {"orders.issued": 3}
        assert store.payloads([1]) == {1: (bytes(100_000), b"", b"", b"")}


HOLDER = """
import sqlite3, sys
store = sqlite3.connect(sys.argv[1], isolation_level=None)
store.execute("BEGIN IMMEDIATE" if sys.argv[2] == "writes" else "BEGIN")
store.execute("SELECT count(*) FROM meta").fetchall()
print("holds", flush=True)
sys.stdin.read()
"""


def other_program(path: Path, does: str) -> subprocess.Popen[bytes]:
    """A program that has a transaction open on the store until its input ends."""
    program = [sys.executable, "-c", HOLDER, str(path), does]
    process = subprocess.Popen(program, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdout is not None and process.stdout.readline() == b"holds\n"
    return process


def counted(number: int) -> Changes:
    core = StageCore(RunConfig())
    core.journal.count(Count.ORDERS_ISSUED, number)
    return core.collect()[0]


def test_another_program_that_writes_to_the_store_is_waited_for_and_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(disk_wait, "RETRY_SECONDS", 0.001)
    with ReplayStore(tmp_path / "s.sqlite") as store:
        store._writer.execute("PRAGMA busy_timeout = 10")
        other = other_program(store.path, "writes")
        said = []

        def commit() -> None:
            if (waiting := disk_wait.shortage()) is not None and not said:
                said.append(waiting.text)
                other.communicate()
            store.commit(counted(3))

        anyio.run(disk_wait.when_room, commit, store.path, "the replay store")
        named = f"process {other.pid} (" if sys.platform == "linux" else "another program has it open"
        assert named in said[0] and "has it open (EBUSY)" in said[0]
        assert store.load().counters == {"orders.issued": 3}


def test_a_reader_that_keeps_the_log_of_the_store_from_being_emptied_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "WAL_BYTES_MAX", 50_000)
    with ReplayStore(tmp_path / "s.sqlite") as store:
        store._writer.execute("PRAGMA wal_autocheckpoint = 1")
        for number in range(30):
            store.commit(counted(number))
        assert store.held_back() == "", "it is emptied"
        other = other_program(store.path, "reads")
        for number in range(30):
            store.commit(counted(number))
        assert f"grows while process {other.pid} (" in store.held_back()
        other.communicate()
        for number in range(2):
            store.commit(counted(number))


class _Failing:
    """A connection whose next commits fail with an I/O error, after or before they are made."""

    def __init__(self, writer: sqlite3.Connection, made: list[bool]) -> None:
        self._writer, self._made = writer, made

    def __getattr__(self, name: str) -> object:
        return getattr(self._writer, name)

    def execute(self, statement: str, *arguments: object) -> sqlite3.Cursor:
        if statement == "COMMIT" and self._made:
            if self._made.pop(0):
                self._writer.execute(statement)
            raise sqlite3.OperationalError("disk I/O error")
        return self._writer.execute(statement, *arguments)


@pytest.mark.parametrize("made", [[True], [False], [False, True], [True, True], [False, False]])
def test_a_round_whose_commit_failed_is_there_once_when_it_is_written_again(made: list[bool], tmp_path: Path) -> None:
    path, attempts = tmp_path / "replay.sqlite", list(made)
    with ReplayStore(path) as store:
        for number in range(3):
            changes = Changes()
            changes.payloads[number] = (b"a", b"b", b"c", b"d")
            changes.counters["x"] = number
            if number == 1:
                store._writer = _Failing(store._writer, attempts)  # type: ignore[assignment]
            for _ in range(len(made) + 1):
                try:
                    store.commit(changes)
                    break
                except StoreError as error:
                    assert "disk I/O error" in str(error)
        assert not attempts or made[0]
    with ReplayStore(path) as store:
        assert store._transactions == 3
        assert [row[0] for row in store._reader.execute("SELECT row_id FROM payloads ORDER BY 1")] == [0, 1, 2]
