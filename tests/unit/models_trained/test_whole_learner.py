"""The learner as a process with everything switched on, and what a slow disk means to it."""

import errno
import sqlite3
from contextlib import closing

import anyio
import pytest

from learner.checkpoints.checkpoint import find_checkpoints, read_state
from learner.process.session import LearnerSession
from pipeline.store.ledger import read_ledger
from tests.support.damage import flip
from tests.unit.learner.test_learner_role import kill_after, stop_after, world
from tests.unit.models_trained.conftest import Disk

__all__ = ["world"]
EVERYTHING = {
    "learner": {"lora": {"rank": 2}, "optimizer_dtype": "bfloat16", "critic": {"warmup_updates": 1}},
    "advantage": {"estimator": "gae"},
    "loss": {"kl": "loss"},
}


@pytest.mark.slow
@pytest.mark.parametrize("backbone", ["own", "none"])
async def test_a_killed_learner_with_adapters_critic_and_reference_goes_on(world, backbone):
    sections = {**EVERYTHING, "learner": {**EVERYTHING["learner"], "critic": {"backbone": backbone}}}
    async with world(total_steps=5, **sections) as w:
        await kill_after(w, 3)
        ctx = await w.learn()
        assert ctx.status.state == "finished"
    lines = w.lines()
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 5]
    assert all(line["value_loss"] >= 0 for line in lines)
    assert read_state(find_checkpoints(w.directory.checkpoints)[0]).updates == 5
    assert all(len(weights) == 1 for weights in w.engine.weights_of.values())


async def test_the_policy_waits_while_the_critic_warms_up(world):
    async with world(total_steps=2, **EVERYTHING) as w:
        await w.learn()
    assert [line["optimizer_steps"] for line in w.lines()] == [0, 1]


async def test_updates_go_on_while_the_disk_is_slow_and_the_stage_hears_of_durable_ones_only(world, monkeypatch):
    disk, reported = Disk(monkeypatch), []
    checkpointed = LearnerSession.checkpointed

    async def tell(session, updates):
        reported.append((updates, read_state(find_checkpoints(w.directory.checkpoints)[0]).updates))
        await checkpointed(session, updates)

    monkeypatch.setattr(LearnerSession, "checkpointed", tell)
    async with world(total_steps=5, checkpoint={"every": 2}) as w:
        ctx, run = w.learner()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(run)
            await disk.begun()
            await w.until_step(4)
            assert reported == []
            assert find_checkpoints(w.directory.checkpoints) == []
            for _ in range(3):
                disk.go.release()
        assert ctx.status.state == "finished"
    assert reported == [(2, 2), (4, 4), (5, 5)]


async def test_a_stop_waits_for_the_write_that_is_under_way(world, monkeypatch):
    disk = Disk(monkeypatch)
    async with world(total_steps=1000, checkpoint={"every": 1}) as w:
        ctx, run = w.learner()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(run)
            await disk.begun()
            ctx.stopping.set()
            await anyio.wait_all_tasks_blocked()
            assert find_checkpoints(w.directory.checkpoints) == []
            disk.go.release(2)  # this one, and that of the last update
        # the stop may come before the second update
        saved = [read_state(p).updates for p in find_checkpoints(w.directory.checkpoints)]
        assert saved == sorted({1, w.lines()[-1]["step"]}, reverse=True)


@pytest.mark.parametrize("learner", [{}, {"minibatches": 2}, {"lora": {"rank": 2}}])
async def test_a_stop_writes_a_checkpoint_of_the_last_update_so_that_none_is_made_again(world, learner):
    async with world(total_steps=1000, learner=learner, checkpoint={"every": 1000}) as w:
        for steps in (2, 5):
            await stop_after(w, steps)
            saved = read_state(find_checkpoints(w.directory.checkpoints)[0]).updates
            assert saved == w.lines()[-1]["step"] >= steps
    assert [line["step"] for line in w.lines()] == list(range(1, saved + 1))
    assert read_ledger(w.directory.store_file).groups.get("rolled_back", 0) == 0


async def test_the_groups_of_a_damaged_checkpoint_do_not_count_as_trained_and_their_updates_are_made_once(world):
    async with world(total_steps=6, checkpoint={"every": 2}) as w:
        await stop_after(w, 5)
        newest, older = find_checkpoints(w.directory.checkpoints)
        flip(newest / "training.pt")
        await w.learn()
    with closing(sqlite3.connect(w.directory.store_file)) as store:
        made = dict(store.execute("SELECT update_number, count(*) FROM groups WHERE state = 'trained' GROUP BY 1"))
        lost = store.execute("SELECT count(*) FROM groups WHERE reason = 'lost'").fetchone()[0]
    assert made == dict.fromkeys(range(6), 2)
    covered = read_state(newest.with_name(f"{newest.name}.damaged")).updates - read_state(older).updates
    assert lost in (0, 2 * covered), "0: the learner ended before the stage had heard of the checkpoint"
    ledger = read_ledger(w.directory.store_file, rows=True)
    assert (ledger.audit(), ledger.trajectories["trained"]) == ([], 6 * 2 * 2)
    assert ledger.groups.get("cancelled.lost", 0) == lost


async def test_a_stop_before_the_first_update_writes_none(world, monkeypatch):
    async def never(session, update):
        ctx.stopping.set()
        await anyio.sleep_forever()

    monkeypatch.setattr(LearnerSession, "ready", never)
    async with world() as w:
        ctx, run = w.learner()
        await run()
    assert find_checkpoints(w.directory.checkpoints) == []


@pytest.mark.parametrize("fault", [OSError(errno.EROFS, "read-only"), OSError(errno.ENOSPC, "full")])
async def test_a_stop_that_cannot_write_ends_in_time_and_says_so(world, monkeypatch, caplog, fault):
    disk = Disk(monkeypatch, held=False)
    disk.fault = fault
    async with world(total_steps=1000, checkpoint={"every": 1000, "drain_seconds_max": 2.0}) as w:
        ctx, run = w.learner()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(run)
            await w.until_step(2)
            ctx.stopping.set()
            tasks.cancel_scope.deadline = anyio.current_time() + 10
        assert not tasks.cancel_scope.cancel_called
    assert f"steps to make again: {w.lines()[-1]['step']}" in caplog.text.replace("Steps", "steps")
    assert find_checkpoints(w.directory.checkpoints) == []


async def test_a_stop_waits_for_a_hanging_disk_for_a_bounded_time(world, monkeypatch):
    disk = Disk(monkeypatch)
    sections = {"checkpoint": {"every": 1, "drain_seconds_max": 0.4}}
    async with world(total_steps=1000, **sections) as w:
        ctx, run = w.learner()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(run)
            await disk.begun()
            ctx.stopping.set()
            tasks.cancel_scope.deadline = anyio.current_time() + 10
        assert not tasks.cancel_scope.cancel_called
        assert find_checkpoints(w.directory.checkpoints) == []
        disk.go.release()


@pytest.mark.slow
async def test_a_learner_killed_while_it_writes_goes_on_from_the_checkpoint_before(world, monkeypatch):
    disk = Disk(monkeypatch)
    async with world(total_steps=5, checkpoint={"every": 1}) as w:
        _, run = w.learner()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(run)
            await disk.begun()
            disk.go.release()
            await disk.begun()
            tasks.cancel_scope.cancel()
        await disk.over()
        disk.fault = OSError("the process is dead")
        disk.go.release()
        await disk.over()
        assert [read_state(p).updates for p in find_checkpoints(w.directory.checkpoints)] == [1]
        disk.fault = None
        for _ in range(10):
            disk.go.release()
        await w.learn()
    assert [line["step"] for line in w.lines()] == [1, 2, 3, 4, 5]
    assert all(len(weights) == 1 for weights in w.engine.weights_of.values())
