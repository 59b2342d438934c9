"""Files and stores that are damaged, cut off, of another format or in use: refused with words, and unharmed."""

import os
import sqlite3
import tracemalloc
from dataclasses import replace

import numpy as np
import orjson
import pytest

from pipeline.config.learner import ReferenceConfig
from pipeline.errors import ConfigurationError, StoreError
from pipeline.replay.transfer import export_run
from pipeline.schema import record_file as frames
from pipeline.schema.codec import Limits
from pipeline.store import archive
from pipeline.store.archive import ArchivedTrajectory, Header, read_archive, write_archive
from pipeline.store.store import ReplayStore
from tests.unit.portable.conftest import demonstration, exported, refuses_unharmed, write_lines


def test_a_file_with_any_byte_changed_or_missing_is_refused_unharmed(make_run, tmp_path):
    _, pool = exported(make_run, tmp_path)
    run, whole = make_run("other"), pool.read_bytes()
    rng = np.random.default_rng(0)
    for at in sorted({0, 40, len(whole) - 1, *rng.integers(0, len(whole), 60).tolist()}):
        data = bytearray(whole)
        data[at] ^= 0x10
        (tmp_path / "bad").write_bytes(data)
        refuses_unharmed(run, tmp_path / "bad", "expected|understood|understand")
        (tmp_path / "bad").write_bytes(whole[:at])
        refuses_unharmed(run, tmp_path / "bad", "cut off|something else|expected")
    (tmp_path / "bad").write_bytes(whole + b"x")
    refuses_unharmed(run, tmp_path / "bad", "end of the file")
    assert run.import_(pool) == {"imported": 5}


def test_a_record_left_out_or_put_twice_is_noticed(make_run, tmp_path):
    _, pool = exported(make_run, tmp_path)
    data, at, blocks = pool.read_bytes(), len(archive.KIND.magic), []
    with pool.open("rb") as file:
        for frame in frames.scan(file.fileno(), at):
            blocks.append(data[at : frame.end])
            at = frame.end
    assert b"".join(blocks) == data[len(archive.KIND.magic) :]
    for changed in (blocks[:2] + blocks[3:], [*blocks[:2], blocks[1], *blocks[2:]], blocks[:-1]):
        (tmp_path / "bad").write_bytes(archive.KIND.magic + b"".join(changed))
        refuses_unharmed(make_run("other"), tmp_path / "bad", "checksum of the footer|cut off")


def test_an_archive_takes_no_more_memory_than_its_trajectories_may_have(make_run, tmp_path):
    run, bomb = make_run("other"), tmp_path / "bomb"
    for parts in ([b"[" * (128 << 20), b"", b"", b""], [b"{}", bytes(128 << 20), b"", b""]):
        write_archive(bomb, Header(), [ArchivedTrajectory({"reward": 1.0}, parts)], replace=True)
        assert bomb.stat().st_size < 1 << 20
        tracemalloc.start()
        try:
            refuses_unharmed(run, bomb, "at most .* bytes once decompressed, got")
            assert tracemalloc.get_traced_memory()[1] < 64 << 20
        finally:
            tracemalloc.stop()


def test_other_formats_and_schemas_are_refused_with_what_they_are(make_run, tmp_path, monkeypatch):
    _, pool = exported(make_run, tmp_path)
    run = make_run("other")
    records = list(read_archive(pool, Limits()))
    write_archive(tmp_path / "schema", Header(schema_version=99), records)
    refuses_unharmed(run, tmp_path / "schema", "schema version 99")
    monkeypatch.setattr(archive, "KIND", replace(archive.KIND, version=3))
    write_archive(tmp_path / "format", Header(), records)
    monkeypatch.undo()
    refuses_unharmed(run, tmp_path / "format", r"an export of Afterplay \(format 2\), got format 3: export it again")
    (tmp_path / "older").write_bytes(b"Afterplay replay export\r\n\x1a\n\0H" + bytes(99))
    refuses_unharmed(run, tmp_path / "older", r"an export of Afterplay \(format 2\), got format 1: export it again")
    header = orjson.loads(records[0].frames[0]) | {"schema_version": 7}
    drifted = ArchivedTrajectory(records[0].marks, (orjson.dumps(header), *records[0].frames[1:]))
    write_archive(tmp_path / "drifted", Header(), [drifted])
    refuses_unharmed(run, tmp_path / "drifted", "schema version 7")
    shorter = ArchivedTrajectory(
        records[0].marks, (records[0].frames[0], records[0].frames[1][:-4], *records[0].frames[2:])
    )
    write_archive(tmp_path / "shorter", Header(), [shorter])
    refuses_unharmed(run, tmp_path / "shorter", "invalid trajectory")
    zipped = b"PK\x03\x04" + bytes(99)
    for content, found in ((b"dear diary", "something else"), (b"", "an empty file"), (zipped, "something else")):
        (tmp_path / "foreign").write_bytes(content)
        refuses_unharmed(run, tmp_path / "foreign", found)
    refuses_unharmed(run, tmp_path / "missing", "cannot be read")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"environment": "b"}, r"environments that this run trains \(a\), got 'b'"),
        ({"reward": None}, "reward as a number"),
        ({"seed": None}, "seed as a whole number"),
        ({"seed": -1}, "seed in 0"),
        ({"turns": []}, "at least one"),
        ({"turns": [{"context_ids": [1], "completion_ids": []}]}, "at least one completion id"),
        ({"turns": [{"context_ids": [1], "completion_ids": [-3]}]}, "token ids as whole numbers"),
        ({"turns": [{"context_ids": [1], "completion_ids": [99]}]}, "vocabulary of 50, got 99"),
        ({"turns": [{"context_ids": [], "completion_ids": [3]}]}, "context before the first sampled token"),
        ({"temperature": 0}, "temperature > 0, got greedy tokens"),
        ({"turns": [{"context_ids": [1], "completion_ids": [3], "logprobs": [0.5]}]}, "log-probabilities of sampled"),
        ({"turns": [{"context_ids": [1], "completion_ids": [3], "logprobs": [-1, -1]}]}, "1 finite logprobs"),
        ({"turns": [{"context_ids": [1], "completion_ids": [3], "logprobs": [-1]}, {"context_ids": [1],
                     "completion_ids": [3]}]}, "every turn or in none"),
        ({"messages": []}, "either turns"),
        ({"turns": [{"completion_ids": [1]}]}, "'context_ids' is missing"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("facts", ['{"vocab_size": 50}', '{"text_config": {"vocab_size": 50}}'])
def test_a_wrong_line_is_named_and_nothing_of_its_file_is_imported(make_run, tmp_path, change, words, facts):
    run = make_run()
    run.directory.model.mkdir()
    (run.directory.model / "config.json").write_text(facts)
    file = write_lines(tmp_path / "d.jsonl", demonstration(1), demonstration(2) | change)
    message = refuses_unharmed(run, file, words)
    assert "line 2" in message or "environment" in message or "vocabulary" in message or "for a/2" in message
    file.write_bytes(orjson.dumps(demonstration(1)) + b"\n{not json\n")
    assert "line 2" in refuses_unharmed(run, file, "d.jsonl")


def test_nothing_is_imported_that_a_reference_server_cannot_score(make_run, tmp_path):
    run = make_run()
    run.config = run.config.updated(learner={"reference": ReferenceConfig(url="http://127.0.0.1:1")})
    file = write_lines(tmp_path / "d.jsonl", demonstration(1), demonstration(2, temperature=0.5))
    assert "a/2" in refuses_unharmed(run, file, r"temperature of 1.*learner\.reference\.url.* 0\.5")


@pytest.mark.parametrize(
    ("conversation", "words"),
    [
        ({"messages": "hello"}, "messages as a list of JSON objects, at least one, got 'hello'"),
        ({"messages": [["user", "2+3?"]]}, "messages as a list of JSON objects"),
        ({"messages": []}, "messages as a list of JSON objects"),
        ({"messages": [{"role": "user", "content": "2+3?"}]}, "a message of the role assistant"),
        ({"turns": ["5"]}, "turns as a list of JSON objects"),
    ],
)
def test_a_conversation_of_another_form_is_told_what_was_expected(make_run, tmp_path, conversation, words):
    run = make_run()
    file = write_lines(tmp_path / "d.jsonl", {"environment": "a", "seed": 1, "reward": 1.0, **conversation})
    assert "line 1" in refuses_unharmed(run, file, words)


@pytest.mark.parametrize("damage", ["text", "cut", "version"])
def test_a_store_that_is_not_whole_is_refused_unharmed(make_run, tmp_path, damage):
    run = make_run()
    file = write_lines(tmp_path / "d.jsonl", demonstration(1))
    run.import_(file)
    store = run.directory.store_file
    if damage == "text":
        store.write_text("dear diary, this is no data base " * 9)
    elif damage == "cut":
        os.truncate(store, store.stat().st_size // 2)
    else:
        with sqlite3.connect(store) as connection:
            connection.execute("PRAGMA user_version = 77")
        connection.close()
    refuses_unharmed(run, file, "replay store|cut off|newer Afterplay")
    with pytest.raises(StoreError):
        export_run(run.config, run.directory, tmp_path / "out")
    assert not (tmp_path / "out").exists() and list(tmp_path.glob(".out*")) == []


def test_a_store_in_use_or_a_run_without_replay_takes_nothing(make_run, tmp_path):
    run = make_run()
    file = write_lines(tmp_path / "d.jsonl", demonstration(1))
    with ReplayStore(run.directory.store_file), pytest.raises(StoreError, match="another replay stage"):
        run.import_(file)
    with pytest.raises(ConfigurationError, match=r"replay\.enabled"):
        make_run("off", enabled=False).import_(file)
