"""Replay travels between runs whole: what enters the pool, what is accounted for, what another run takes."""

import sqlite3
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.errors import ConfigurationError
from pipeline.replay.transfer import export_run
from pipeline.schema import VersionSpan
from pipeline.schema.codec import encode_trajectory
from pipeline.stage.core import StageCore
from pipeline.store.archive import ArchivedTrajectory, Header, write_archive
from pipeline.store.store import ReplayStore
from tests.support.tokens import flattened
from tests.unit.portable.conftest import build, demonstration, pooled, write_lines


def test_demonstrations_enter_the_pool_with_and_without_recorded_logprobs(make_run, tmp_path):
    run = make_run()
    lines = [demonstration(1), demonstration(2, logprobs=False), demonstration(3, task_id="a/3", payload={"x": 1})]
    file = write_lines(tmp_path / "d.jsonl", *lines, demonstration(4, reward=0.0))
    assert run.import_(file) == {"imported": 3, "failure": 1}
    by_task = {entry.task.task_id: (entry, t) for entry, t in pooled(run).values()}
    assert set(by_task) == {"a/1", "a/2", "a/3"}
    entry, trajectory = by_task["a/1"]
    flat = flattened(trajectory)
    assert entry.recorded and entry.n_sampled == 5 and entry.success_rate is None
    assert entry.entropy == pytest.approx(2.25 / 5)
    assert flat.token_ids[flat.loss_mask].tolist() == [3, 4, 6, 7, 8]
    assert flat.behaviour_logprobs[flat.loss_mask].tolist() == [-0.5, -0.25, -0.5, 0.0, -1.0]
    entry, trajectory = by_task["a/2"]
    assert not entry.recorded and entry.entropy is None and entry.age(100) == 0
    assert not flattened(trajectory).behaviour_logprobs.any()
    assert by_task["a/3"][1].task.payload == {"x": 1}
    assert run.import_(file) == {"duplicate": 3, "failure": 1}
    assert run.examine()["counters"] == {"pool.imported": 3}


def test_an_imported_pool_is_replayed_by_the_stage(make_run, tmp_path):
    run = make_run(start_ratio=0.0, task_ratio=1.0, entropy="stored")
    run.import_(write_lines(tmp_path / "d.jsonl", *(demonstration(seed) for seed in range(6))))
    with ReplayStore(run.directory.store_file) as store:
        core = StageCore(run.config, store.load())
        core.dispatch.version(0, 0)
        planned = core.replays.next()
    assert planned.k == 1 and planned.candidates[0].entry.trajectory_id.startswith("import-")


def test_what_one_run_exports_another_imports(make_run, tmp_path):
    one, other = make_run("one"), make_run("other")
    one.import_(write_lines(tmp_path / "d.jsonl", *(demonstration(s, s % 7, logprobs=s % 2 == 0) for s in range(20))))
    assert export_run(one.config, one.directory, tmp_path / "pool") == 20
    assert other.import_(tmp_path / "pool") == {"imported": 20}
    assert other.import_(tmp_path / "pool") == one.import_(tmp_path / "pool") == {"duplicate": 20}
    a, b = pooled(one), pooled(other)
    assert set(a) == set(b)
    for identity, (entry, trajectory) in a.items():
        came = b[identity][1]
        assert b[identity][0].entropy == entry.entropy and b[identity][0].recorded == entry.recorded
        assert (flattened(came).token_ids == flattened(trajectory).token_ids).all()
        assert (flattened(came).behaviour_logprobs == flattened(trajectory).behaviour_logprobs).all()
    with pytest.raises(ConfigurationError, match="--force"):
        export_run(one.config, one.directory, tmp_path / "pool")
    assert export_run(one.config, one.directory, tmp_path / "pool", replace=True) == 20


def test_ids_and_versions_of_another_run_do_not_collide_with_our_own(make_run, tmp_path):
    """Every run has a g000000.0.0, and its version 9 is not ours."""
    one, other = make_run("one"), make_run("other")
    one.import_(write_lines(tmp_path / "d.jsonl", demonstration(1)))
    ((_, trajectory),) = pooled(one).values()
    span = replace(trajectory.turns[0].completion, version_spans=(VersionSpan(0, 1, 5), VersionSpan(1, 2, 9)))
    turns = (replace(trajectory.turns[0], completion=span), trajectory.turns[1])
    frames = encode_trajectory(replace(trajectory, trajectory_id="g000000.0.0", group_id="g000000", turns=turns))
    write_archive(tmp_path / "x", Header(origins=("o",)), [ArchivedTrajectory({"reward": 1.0, "origin": "o"}, frames)])
    assert other.import_(tmp_path / "x") == {"imported": 1}
    ((entry, came),) = pooled(other).values()
    assert entry.trajectory_id.startswith("import-") and (entry.version_min, entry.version_max) == (0, 0)
    assert came.group_id == "imported"
    assert other.import_(tmp_path / "x") == {"duplicate": 1}


@given(
    seeds=st.lists(st.tuples(st.integers(0, 4), st.integers(0, 9)), min_size=1, max_size=30),
    capacity=st.integers(1, 8),
    per_task=st.integers(1, 3),
)
@settings(max_examples=25, deadline=None)
def test_the_capacity_holds_and_every_import_is_accounted_for(tmp_path_factory, seeds, capacity, per_task):
    folder = tmp_path_factory.mktemp("run")
    run = build(folder, "r", capacity=capacity, max_trajectories_per_task=per_task)
    lines = [demonstration(seed, n) for seed, n in seeds]
    for _ in range(2):
        run.import_(write_lines(folder / "d.jsonl", *lines))
        found = pooled(run)
        assert len(found) <= capacity
        tasks = [entry.task.task_id for entry, _ in found.values()]
        assert all(tasks.count(task) <= per_task for task in tasks)
        counters = run.examine()["counters"]
        left = sum(n for name, n in counters.items() if name.startswith("pool.evicted."))
        assert counters["pool.imported"] == len(found) + left
        with sqlite3.connect(run.directory.store_file) as connection:
            assert connection.execute("SELECT count(*) FROM payloads").fetchone()[0] == len(found)
        connection.close()


def test_a_stage_starts_from_what_was_imported(make_run, tmp_path):
    run = make_run()
    file = write_lines(tmp_path / "d.jsonl", demonstration(1))
    assert run.import_(file) == {"imported": 1}
    with ReplayStore(run.directory.store_file) as store:
        assert len(store.load().entries) == 1
    assert run.import_(file) == {"duplicate": 1}
