"""The learner as a role with several ranks: a run, a stop and a killed rank, with a real second process."""

import errno
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import anyio
import pytest
import torch
from torch.distributed.checkpoint.filesystem import FileSystemWriter

from learner.checkpoints import checkpoint, shards
from learner.checkpoints.checkpoint import find_checkpoints, read_state
from learner.process.rank_processes import RankZero
from pipeline.config.load import dump
from pipeline.runtime.folders import find_damage
from pipeline.runtime.process import ExitCode
from pipeline.store.evaluation_results import read_results
from tests.support.damage import flip
from tests.support.fork_server import ForkedSubprocess
from tests.support.repeated import repeated
from tests.unit.learner.conftest import run_config
from tests.unit.learner.test_learner_role import stop_after, world_of

pytestmark = [pytest.mark.slow, pytest.mark.timeout(500)]
STOP_SECONDS_MAX, LOSS_SECONDS_MAX = 30, 60
"""Several times what they take: others may hold the cores. A rank that hangs would take the 120 s of its group."""


@pytest.fixture
def children(monkeypatch, fork_server):
    """The processes that rank 0 starts, as they are started. They are forked from one that has imported everything."""
    monkeypatch.setattr("pipeline.runtime.children.subprocess", ForkedSubprocess(fork_server.start))
    started = []
    start = RankZero._start_children

    def note(self, *arguments):
        start(self, *arguments)
        started.extend(self._children.values())

    monkeypatch.setattr(RankZero, "_start_children", note)
    yield started
    for child in started:
        child.kill()


@pytest.fixture
def world(tmp_path, monkeypatch, children):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")

    def make(learner=None, **sections):
        learner = {"ranks": 2, "ranks_timeout_seconds": 120, **(learner or {})}
        return world_of(tmp_path, monkeypatch, 450, learner=learner, **sections)

    return make


async def test_a_run_of_two_ranks_ends_with_every_step_recorded_published_and_saved(world, children):
    async with world() as w:
        ctx = await w.learn()
    lines = w.lines()
    assert [line["step"] for line in lines] == [1, 2, 3]
    assert all(line["n_trajectories"] == 4 for line in lines)
    assert w.engine.versions == [0, 1, 2, 3]
    newest = find_checkpoints(w.directory.checkpoints)[0]
    assert read_state(newest).updates == 3
    assert (newest / "shards" / ".metadata").is_file()
    assert [child.end.result(0) for child in children] == [0]
    assert ctx.registry.get_sample_value("afterplay_learner_importance_ratio_count",
                                         {"level": "token", "source": "fresh"}) == 24  # fmt: skip


async def test_a_stop_saves_the_last_update_of_all_ranks(world, children):
    async with world(total_steps=1000, checkpoint={"every": 1000}) as w:
        await stop_after(w, 2)
    newest = find_checkpoints(w.directory.checkpoints)[0]
    assert read_state(newest).updates == w.lines()[-1]["step"] and not find_damage(newest)
    assert children[0].end.result(0) == 0


@pytest.mark.parametrize(
    "learner",
    [{}, {"ranks": 8, "replicas": 2}, {"context_ranks": 2, "tokens_per_microbatch": 4}],
    ids=["rows", "replicas", "divided_rows"],
)
async def test_a_stop_ends_all_ranks_and_a_killed_rank_ends_the_others_with_words(world, children, caplog, learner):
    """One run of three lives: stopped, killed, and resumed to the end, by all ranks from the same older checkpoint
    where a shard of the newest is damaged."""
    others = learner.get("ranks", 2) - 1
    async with world(total_steps=8, checkpoint={"every": 1}, learner=learner) as w:
        ctx, run = w.learner()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(run)
            await w.until_step(2)
            tasks.cancel_scope.deadline = anyio.current_time() + STOP_SECONDS_MAX
            ctx.stopping.set()
        assert not tasks.cancel_scope.cancel_called
        assert [child.end.result(0) for child in children] == [0] * others

        _, run = w.learner()
        with pytest.raises(BaseExceptionGroup) as caught:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(run)
                await w.until_step(len(w.lines()) + 1)
                os.kill(children[-1].pid, signal.SIGKILL)
                with anyio.fail_after(LOSS_SECONDS_MAX):
                    await anyio.sleep_forever()
        assert not caught.group_contains(TimeoutError)
        assert any(f"rank {others} ended (killed by SIGKILL)" in record.getMessage() for record in caplog.records)

        newest, older = find_checkpoints(w.directory.checkpoints)
        part = max((newest / "shards").glob("*.distcp"))
        flip(part)
        ctx = await w.learn()
    [notice] = ctx.notices
    assert f"{newest.name} is damaged (shards/{part.name}" in notice and f"resumes from {older.name}" in notice
    assert w.lines()[-1]["step"] == 8
    assert w.engine.versions == sorted(w.engine.versions)
    w.directory.config_file.write_text(dump(w.config))
    assert repeated(w.directory.path) == dict.fromkeys(range(1, 9), ()), "bit for bit, by as many ranks"


async def test_two_ranks_wait_for_a_full_disk_wherever_a_checkpoint_meets_it(world, children, monkeypatch):
    """Before, within and after the part that all ranks write together, and while rank 0 makes ``model/`` of it; each
    time they try again together."""
    met = []

    def full_once(owner, name, at=lambda *values: True):
        original = getattr(owner, name)

        def write(*values, **named):
            if name not in met and at(*values):
                met.append(name)
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return original(*values, **named)

        monkeypatch.setattr(owner, name, write)

    full_once(torch, "save", at=lambda value, file, *_: isinstance(file, Path))
    full_once(FileSystemWriter, "write_data")
    full_once(shards, "load_shards")
    full_once(checkpoint, "_copy_tokenizer")
    full_once(checkpoint, "write_contents")
    async with world() as w:
        await w.learn()
    assert met == ["save", "write_data", "load_shards", "_copy_tokenizer", "write_contents"]
    assert [line["step"] for line in w.lines()] == [1, 2, 3]
    found = find_checkpoints(w.directory.checkpoints)
    assert [read_state(path).updates for path in found] == [3, 2]
    assert all((path / "shards" / ".metadata").is_file() and not find_damage(path) for path in found)
    assert [child.end.result(0) for child in children] == [0]
    assert sorted(p.name for p in w.directory.checkpoints.iterdir()) == ["u000002", "u000003"]


async def test_two_ranks_write_a_whole_checkpoint_of_every_evaluated_weights_and_keep_the_best(world, children):
    sections = {
        "environments": {"toy": {"name": "arithmetic", "held_out": {"eval": 4}}},
        "evaluation": {"every": 2, "keep_best": "score"},
    }
    async with world(checkpoint={"every": 100, "at_end": False, "keep": 9}, **sections) as w:
        await w.learn()
    results = read_results(w.directory.evaluations_file)
    assert [(r["updates"], r["status"]) for r in results] == [(0, "complete"), (2, "complete"), (3, "complete")]
    assert results[0]["versions"] == [0, 0] and results[-1]["versions"] == [3, 3]
    found = find_checkpoints(w.directory.checkpoints)
    assert sorted(read_state(path).updates for path in found) == [0, 2, 3]
    best = max(results, key=lambda r: (r["score"], -r["updates"]))
    assert read_state(w.directory.checkpoints / "best").updates == best["updates"]
    assert all((path / "shards" / ".metadata").is_file() for path in (*found, w.directory.checkpoints / "best"))


def test_a_rank_ends_when_its_stdin_closes_although_rank_0_never_answers():
    run_file = run_config({"ranks": 2, "ranks_timeout_seconds": 600}).model_dump_json()
    with socket.create_server(("127.0.0.1", 0)) as silent:
        command = [sys.executable, "-m", "learner.process.rank_processes", "1", "2", str(silent.getsockname()[1])]
        ended = subprocess.run(command, input=run_file + "\n", text=True, stderr=subprocess.PIPE, timeout=200)
    assert (ended.returncode, ended.stderr) == (ExitCode.FAILED, "")
