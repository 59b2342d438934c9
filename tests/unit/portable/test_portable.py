"""Experience travels between runs whole, or not at all."""

import os
import sqlite3
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from pipeline.cli.app import app
from pipeline.codec import decode_trajectory
from pipeline.config import RunConfig
from pipeline.config.show import show
from pipeline.errors import ConfigurationError, StoreError
from pipeline.replay import portable
from pipeline.replay.core import StageCore
from pipeline.replay.examine import examine_run
from pipeline.replay.exporting import export_run
from pipeline.replay.importing import Importer
from pipeline.replay.ledger import read_ledger
from pipeline.replay.portable import Header, Portable, read_portable, write_portable
from pipeline.replay.sharding import Shard, store_paths
from pipeline.replay.store import ReplayStore
from pipeline.rundir import RunDirectory
from pipeline.supervisor.claim import claim

SECTIONS: dict[str, Any] = {
    "groups": {"n_rollout": 4, "groups_per_step": 2},
    "environments": {"a": {"name": "arithmetic", "max_seconds": 10}},
}


@dataclass
class Run:
    """One run that has never been started, or is not running."""

    config: RunConfig
    directory: RunDirectory

    @property
    def path(self) -> Path:
        return self.directory.path

    def import_(self, file: Path, render: Any = None) -> dict[str, int]:
        return +Importer(self.config, self.directory, render).run(file)

    def examine(self) -> dict[str, Any]:
        return examine_run(store_paths(self.config, self.directory)).json(self.config)

    def files(self) -> dict[str, bytes]:
        """All but what every reader of a store leaves beside it."""
        found = {str(p.relative_to(self.path)): p.read_bytes() for p in self.path.rglob("*") if p.is_file()}
        return {
            name: data for name, data in found.items() if not name.endswith("-shm") and (data or name[-4:] != "-wal")
        }


def demonstration(seed: int, n: int = 0, *, logprobs: bool = True, **more: Any) -> dict[str, Any]:
    """Two turns; ``n`` tells demonstrations of one task apart."""
    turns = [
        {"context_ids": [1, 2, n], "completion_ids": [3, 4], "logprobs": [-0.5, -0.25]},
        {"context_ids": [5], "completion_ids": [6, 7, 8], "logprobs": [-0.5, 0.0, -1.0]},
    ]
    if not logprobs:
        for turn in turns:
            del turn["logprobs"]
    return {"environment": "a", "seed": seed, "reward": 1.0, "turns": turns, **more}


def write_lines(path: Path, *lines: dict[str, Any]) -> Path:
    path.write_bytes(b"".join(orjson.dumps(line) + b"\n" for line in lines))
    return path


def build(folder: Path, name: str, **replay: Any) -> Run:
    sections = {**SECTIONS, "replay": {"enabled": True, "synchronous": "NORMAL", **replay}}
    config = RunConfig.model_validate({**sections, "run": {"name": name, "directory": str(folder)}})
    directory = RunDirectory(folder / name).create()
    directory.config_file.write_text(show(config, True))
    return Run(config, directory)


@pytest.fixture
def make_run(tmp_path: Path) -> Any:
    def make(name: str = "r", **replay: Any) -> Run:
        return build(tmp_path, name, **replay)

    return make


def pooled(run: Run) -> dict[str, Any]:
    """Trajectories of the pools by id, with their entries; every store is one that a stage would start from."""
    found = {}
    for index, path in enumerate(store_paths(run.config, run.directory)):
        if not path.exists():
            continue
        assert read_ledger(path, rows=True).audit() == []
        with ReplayStore(path) as store:
            snapshot = store.load()
            StageCore(run.config, snapshot, shard=Shard.of(run.config, index))
            frames = store.payloads([entry.seq for entry in snapshot.entries])
        for entry in snapshot.entries:
            trajectory = decode_trajectory(frames[entry.seq])
            assert trajectory.trajectory_id == entry.trajectory_id and trajectory.recorded == entry.recorded
            assert Shard.of(run.config, index).owns(trajectory.task.task_id)
            found[entry.trajectory_id] = (entry, trajectory)
    return found


def test_demonstrations_enter_the_pool_with_and_without_recorded_logprobs(make_run, tmp_path):
    run = make_run()
    lines = [demonstration(1), demonstration(2, logprobs=False), demonstration(3, task_id="a/3", payload={"x": 1})]
    file = write_lines(tmp_path / "d.jsonl", *lines, demonstration(4, reward=0.0))
    assert run.import_(file) == {"imported": 3, "failure": 1}
    by_task = {entry.task.task_id: (entry, t) for entry, t in pooled(run).values()}
    assert set(by_task) == {"a/1", "a/2", "a/3"}
    entry, trajectory = by_task["a/1"]
    flat = trajectory.flatten()
    assert entry.recorded and entry.n_sampled == 5 and entry.success_rate is None
    assert entry.entropy == pytest.approx(2.25 / 5)
    assert flat.token_ids[flat.loss_mask].tolist() == [3, 4, 6, 7, 8]
    assert flat.behaviour_logprobs[flat.loss_mask].tolist() == [-0.5, -0.25, -0.5, 0.0, -1.0]
    entry, trajectory = by_task["a/2"]
    assert not entry.recorded and entry.entropy is None and entry.age(100) == 0
    assert not trajectory.flatten().behaviour_logprobs.any()
    assert by_task["a/3"][1].task.payload == {"x": 1}
    assert run.import_(file) == {"duplicate": 3, "failure": 1}
    assert run.examine()["counters"] == {"pool.imported": 3}


def test_an_imported_pool_is_replayed_by_the_stage(make_run, tmp_path):
    run = make_run(start_ratio=0.0, task_ratio=1.0, entropy="stored")
    run.import_(write_lines(tmp_path / "d.jsonl", *(demonstration(seed) for seed in range(6))))
    with ReplayStore(run.directory.store_file) as store:
        core = StageCore(run.config, store.load())
        core.learner.version(0, 0)
        planned = core.replays.next()
    assert planned.k == 1 and planned.candidates[0].entry.trajectory_id.startswith("import-")


def test_what_one_run_exports_another_imports(make_run, tmp_path):
    one, other = make_run("one"), make_run("other", shards=2)
    one.import_(write_lines(tmp_path / "d.jsonl", *(demonstration(s, s % 7, logprobs=s % 2 == 0) for s in range(20))))
    for compress in (True, False):
        file = tmp_path / f"pool-{compress}"
        assert export_run(one.config, one.directory, file, compress=compress) == 20
    assert (tmp_path / "pool-True").stat().st_size < (tmp_path / "pool-False").stat().st_size
    assert other.import_(tmp_path / "pool-True") == {"imported": 20}
    assert other.import_(tmp_path / "pool-False") == {"duplicate": 20}
    assert one.import_(tmp_path / "pool-True") == {"duplicate": 20}
    a, b = pooled(one), pooled(other)
    assert set(a) == set(b)
    for identity, (entry, trajectory) in a.items():
        came = b[identity][1]
        assert b[identity][0].entropy == entry.entropy and b[identity][0].recorded == entry.recorded
        assert (came.flatten().token_ids == trajectory.flatten().token_ids).all()
        assert (came.flatten().behaviour_logprobs == trajectory.flatten().behaviour_logprobs).all()
    with pytest.raises(ConfigurationError, match="--force"):
        export_run(one.config, one.directory, tmp_path / "pool-True")
    assert export_run(one.config, one.directory, tmp_path / "pool-True", replace=True) == 20


def test_ids_and_versions_of_another_run_do_not_collide_with_our_own(make_run, tmp_path):
    """Every run has a g000000.0.0, and its version 9 is not ours."""
    one, other = make_run("one"), make_run("other")
    one.import_(write_lines(tmp_path / "d.jsonl", demonstration(1)))
    ((_, trajectory),) = pooled(one).values()
    span = replace(trajectory.turns[0].completion, version_spans=(portable_span(0, 1, 5), portable_span(1, 2, 9)))
    turns = (replace(trajectory.turns[0], completion=span), trajectory.turns[1])
    from pipeline.codec import encode_trajectory

    frames = encode_trajectory(replace(trajectory, trajectory_id="g000000.0.0", group_id="g000000", turns=turns))
    write_portable(tmp_path / "x", Header(origins=("o",)), [Portable({"reward": 1.0, "origin": "o"}, frames)])
    assert other.import_(tmp_path / "x") == {"imported": 1}
    ((entry, came),) = pooled(other).values()
    assert entry.trajectory_id.startswith("import-") and (entry.version_min, entry.version_max) == (0, 0)
    assert came.group_id == "imported"
    assert other.import_(tmp_path / "x") == {"duplicate": 1}


def portable_span(start: int, stop: int, version: int) -> Any:
    from pipeline.schema import VersionSpan

    return VersionSpan(start, stop, version)


@given(
    seeds=st.lists(st.tuples(st.integers(0, 4), st.integers(0, 9)), max_size=30),
    capacity=st.integers(1, 8),
    per_task=st.integers(1, 3),
)
@settings(max_examples=25, deadline=None)
def test_the_capacity_holds_and_every_import_is_accounted_for(tmp_path_factory, seeds, capacity, per_task):
    folder = tmp_path_factory.mktemp("run")
    run = build(folder, "r", capacity=capacity, max_trajectories_per_task=per_task)
    lines = [demonstration(seed, n) for seed, n in seeds]
    if not lines:
        return
    for _ in range(2):
        run.import_(write_lines(folder / "d.jsonl", *lines))
        found = pooled(run)
        assert len(found) <= capacity
        tasks = [entry.task.task_id for entry, _ in found.values()]
        assert all(tasks.count(task) <= per_task for task in tasks)
        counters = run.examine()["counters"]
        left = sum(n for name, n in counters.items() if name.startswith("pool.left."))
        assert counters["pool.imported"] == len(found) + left
        with sqlite3.connect(run.directory.store_file) as connection:
            assert connection.execute("SELECT count(*) FROM payloads").fetchone()[0] == len(found)
        connection.close()


def exported(make_run, tmp_path, n=5):
    one = make_run("one")
    one.import_(write_lines(tmp_path / "d.jsonl", *(demonstration(s, s) for s in range(n))))
    export_run(one.config, one.directory, tmp_path / "pool", compress=False)
    return one, tmp_path / "pool"


def refuses_unharmed(run, file, words):
    before = run.files()
    with pytest.raises(StoreError, match=words) as caught:
        run.import_(file)
    assert run.files() == before
    return str(caught.value)


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
    data, blocks, at = pool.read_bytes(), [], len(portable.MAGIC)
    while at < len(data):
        _, length, _ = portable._BLOCK.unpack_from(data, at)
        blocks.append(data[at : at + portable._BLOCK.size + length])
        at += portable._BLOCK.size + length
    for changed in (blocks[:2] + blocks[3:], [*blocks[:2], blocks[1], *blocks[2:]], blocks[:-1]):
        (tmp_path / "bad").write_bytes(portable.MAGIC + b"".join(changed))
        refuses_unharmed(make_run("other"), tmp_path / "bad", "checksum of the footer|cut off")


def test_other_formats_and_schemas_are_refused_with_what_they_are(make_run, tmp_path, monkeypatch):
    _, pool = exported(make_run, tmp_path)
    run = make_run("other")
    records = list(read_portable(pool))
    write_portable(tmp_path / "schema", Header(schema_version=99), records)
    refuses_unharmed(run, tmp_path / "schema", "schema version 99")
    monkeypatch.setattr(portable, "FORMAT", 2)
    write_portable(tmp_path / "format", Header(), records)
    monkeypatch.undo()
    refuses_unharmed(run, tmp_path / "format", "got format 2")
    header = orjson.loads(records[0].frames[0]) | {"schema_version": 7}
    drifted = Portable(records[0].marks, (orjson.dumps(header), *records[0].frames[1:]))
    write_portable(tmp_path / "drifted", Header(), [drifted])
    refuses_unharmed(run, tmp_path / "drifted", "schema version 7")
    shorter = Portable(records[0].marks, (records[0].frames[0], records[0].frames[1][:-4], *records[0].frames[2:]))
    write_portable(tmp_path / "shorter", Header(), [shorter])
    refuses_unharmed(run, tmp_path / "shorter", "not understood")
    for name, content in (("text", b"dear diary"), ("empty", b""), ("zip", b"PK\x03\x04" + bytes(99))):
        (tmp_path / name).write_bytes(content)
        refuses_unharmed(run, tmp_path / name, "something else")
    refuses_unharmed(run, tmp_path / "missing", "cannot be read")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"environment": "b"}, r"environments of this run \(a\), got 'b'"),
        ({"reward": None}, "reward as a number"),
        ({"seed": None}, "seed as a whole number"),
        ({"seed": -1}, "seed in 0"),
        ({"turns": []}, "at least one"),
        ({"turns": [{"context_ids": [1], "completion_ids": []}]}, "at least one completion id"),
        ({"turns": [{"context_ids": [1], "completion_ids": [-3]}]}, "token ids as whole numbers"),
        ({"turns": [{"context_ids": [1], "completion_ids": [99]}]}, "vocabulary of 50, got 99"),
        ({"turns": [{"context_ids": [1], "completion_ids": [3], "logprobs": [0.5]}]}, "log-probabilities <= 0"),
        ({"turns": [{"context_ids": [1], "completion_ids": [3], "logprobs": [-1, -1]}]}, "1 finite logprobs"),
        ({"turns": [{"context_ids": [1], "completion_ids": [3], "logprobs": [-1]}, {"context_ids": [1],
                     "completion_ids": [3]}]}, "every turn or in none"),
        ({"messages": []}, "either turns"),
        ({"turns": [{"completion_ids": [1]}]}, "'context_ids' is missing"),
    ],
)  # fmt: skip
def test_a_wrong_line_is_named_and_nothing_of_its_file_is_imported(make_run, tmp_path, change, words):
    run = make_run()
    run.directory.model.mkdir()
    (run.directory.model / "config.json").write_text('{"vocab_size": 50}')
    file = write_lines(tmp_path / "d.jsonl", demonstration(1), demonstration(2) | change)
    message = refuses_unharmed(run, file, words)
    assert "line 2" in message or "environment" in message or "vocabulary" in message
    file.write_bytes(orjson.dumps(demonstration(1)) + b"\n{not json\n")
    assert "line 2" in refuses_unharmed(run, file, "d.jsonl")


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


def test_a_store_in_use_or_lost_takes_nothing(make_run, tmp_path):
    run = make_run()
    file = write_lines(tmp_path / "d.jsonl", demonstration(1))
    with ReplayStore(run.directory.store_file), pytest.raises(StoreError, match="another replay stage"):
        run.import_(file)
    with sqlite3.connect(run.directory.store_file) as connection:
        connection.execute("INSERT INTO meta VALUES ('clean', 'false')")
    connection.close()
    refuses_unharmed(run, file, "was killed or is running")
    with pytest.raises(ConfigurationError, match=r"replay\.enabled"):
        make_run("off", enabled=False).import_(file)


def test_a_memory_only_stage_starts_from_what_was_imported(make_run, tmp_path):
    from pipeline.replay.memory_store import MemoryStore

    run = make_run(memory_only=True)
    file = write_lines(tmp_path / "d.jsonl", demonstration(1))
    assert run.import_(file) == {"imported": 1}
    with MemoryStore(run.directory.store_file) as store:
        assert len(store.load().entries) == 1
    assert run.import_(file) == {"duplicate": 1}


def invoke(*arguments: object) -> Any:
    return CliRunner().invoke(app, [str(a) for a in arguments], catch_exceptions=True)


@pytest.fixture(scope="module")
def words() -> Any:
    return pytest.importorskip("learner.models.words").build_tokenizer(16)


def test_the_commands_import_text_inspect_and_export(make_run, tmp_path, words):
    run = make_run()
    words.save_pretrained(run.directory.model)
    chat = [{"role": "user", "content": "guess"}, {"role": "assistant", "content": "7"},
            {"role": "user", "content": "higher"}, {"role": "assistant", "content": "9"}]  # fmt: skip
    file = write_lines(tmp_path / "d.jsonl", {"environment": "a", "seed": 1, "reward": 1, "messages": chat})
    result = invoke("replay", "import", run.path, file)
    assert result.output == "1 imported\n", result.exception
    ((entry, trajectory),) = pooled(run).values()
    assert not entry.recorded and entry.n_turns == 2
    whole = words.apply_chat_template(chat, tokenize=True, add_generation_prompt=False)
    whole = list(whole["input_ids"] if hasattr(whole, "keys") else whole)
    ids = trajectory.flatten().token_ids.tolist()
    assert ids == whole[: len(ids)] and trajectory.turns[1].completion_message.content == "9"
    assert all(turn.completion.token_ids[-1] == words.eos_token_id for turn in trajectory.turns)
    shown = invoke("replay", "inspect", run.path).output
    for word in ("pool: 1 of 50000", "1 without recorded log-probs", "bias audit", "ESS guard off", "imported"):
        assert word in shown
    value = orjson.loads(invoke("replay", "inspect", run.path, "--json").output)
    assert value["pool"]["trajectories"] == 1 and value["audit"]["stored"]["reward"] == 1.0
    assert value["audit"]["replayed"] == {"count": 0, "tokens": None, "seconds": None, "reward": None, "age": None}
    assert "1 trajectories in" in invoke("replay", "export", run.path, tmp_path / "pool").output
    assert isinstance(invoke("replay", "export", run.path, tmp_path / "pool").exception, ConfigurationError)
    bad = write_lines(tmp_path / "e.jsonl", {"environment": "a", "seed": 1, "reward": 1, "messages": chat[:3]})
    assert "end with the assistant" in str(invoke("replay", "import", run.path, bad).exception)
    with claim(run.directory):
        assert "is: stop it first" in str(invoke("replay", "import", run.path, file).exception)
        assert invoke("replay", "inspect", run.path).exit_code == 0


def test_a_run_that_has_not_started_is_named_by_its_file(tmp_path):
    text = f"""
run: {{name: new, directory: {tmp_path}}}
groups: {{n_rollout: 4, groups_per_step: 2}}
environments: {{a: {{name: arithmetic}}}}
replay: {{enabled: true}}
"""
    (tmp_path / "r.yaml").write_text(text)
    file = write_lines(tmp_path / "d.jsonl", demonstration(1))
    result = invoke("replay", "import", tmp_path / "r.yaml", file)
    assert result.output == "1 imported\n", result.exception
    assert (tmp_path / "new" / "replay.sqlite").exists()


@pytest.mark.parametrize(
    "arguments", [["FILE"], ["--index", "0", "FILE"], ["start", "FILE"], ["-s", "run.seed=1", "FILE"]]
)
def test_what_is_no_command_is_the_run_file_of_a_stage(tmp_path, arguments):
    missing = str(tmp_path / "missing.yaml")
    result = invoke("replay", *(missing if a == "FILE" else a for a in arguments))
    assert isinstance(result.exception, ConfigurationError) and "expected a run file" in str(result.exception)


@pytest.mark.parametrize("command", ["inspect", "export", "import", "start"])
def test_every_command_of_replay_explains_itself(command):
    result = invoke("replay", command, "--help")
    assert result.exit_code == 0 and len(result.output.splitlines()) > 10
