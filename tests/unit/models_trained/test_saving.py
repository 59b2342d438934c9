"""Checkpoints written beside training: nobody waits for the disk, and nothing is reported before it is durable."""

import threading
import weakref

import anyio
import anyio.to_thread
import pytest
import torch
from prometheus_client import CollectorRegistry

from learner.checkpoints.checkpoint import CheckpointState, find_checkpoints, read_state, restore_training, take_image
from learner.checkpoints.writer import CheckpointWriter
from learner.metrics import LearnerMetrics
from learner.process.build import make_policy
from learner.training.trainer import Trainer
from pipeline.errors import TrainingError
from tests.unit.learner.conftest import run_config, tiny_policy
from tests.unit.models_trained.conftest import Disk


def writer_of(root, initial, reported, keep=2):
    async def durable(updates):
        reported.append((updates, [read_state(p).updates for p in find_checkpoints(root)]))

    return CheckpointWriter(root, initial, keep, durable, LearnerMetrics(CollectorRegistry()))


def image_of(trainer):
    return take_image(trainer, CheckpointState(trainer.updates, trainer.updates, {}))


async def submit(writer, trainer):
    async with writer.slot(trainer.updates) as take:
        take(image_of(trainer))


@pytest.fixture
def trainer():
    return Trainer(tiny_policy(), run_config())


async def test_training_goes_on_while_a_checkpoint_is_written(trainer, train, initial, tmp_path, monkeypatch):
    disk, reported, root = Disk(monkeypatch), [], tmp_path / "c"
    writer = writer_of(root, initial, reported)
    train(trainer, 1)
    saved = trainer.policy.snapshot("float32")
    moments = [s["exp_avg"].clone() for s in trainer.optimizer.state.values()]
    with anyio.fail_after(30):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(writer.run)
            await submit(writer, trainer)
            await disk.begun()
            train(trainer, 2)
            assert reported == []
            assert find_checkpoints(root) == []
            disk.go.release()
            await writer.idle()
            tasks.cancel_scope.cancel()
    assert reported == [(1, [1])]
    config = run_config()
    again = Trainer(make_policy(config, find_checkpoints(root)[0] / "model", None), config)
    restore_training(find_checkpoints(root)[0], again)
    assert all(torch.equal(saved[name], t) for name, t in again.policy.snapshot("float32").items())
    assert all(torch.equal(a, s["exp_avg"]) for a, s in zip(moments, again.optimizer.state.values(), strict=True))


async def test_a_durable_checkpoint_leaves_no_copy_in_memory(trainer, initial, tmp_path):
    """Else the next image would be made beside it."""
    writer, gone = writer_of(tmp_path / "c", initial, []), threading.Event()
    with anyio.fail_after(60):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(writer.run)
            async with writer.slot(trainer.updates) as take:
                image = image_of(trainer)
                weakref.finalize(next(iter(image.weights.values())), gone.set)
                take(image)
                del image
            assert not gone.is_set()
            await writer.idle()
            assert await anyio.to_thread.run_sync(gone.wait, 30)
            tasks.cancel_scope.cancel()


async def test_at_most_one_write_is_under_way(trainer, train, initial, tmp_path, monkeypatch):
    disk, reported, root = Disk(monkeypatch), [], tmp_path / "c"
    writer = writer_of(root, initial, reported)
    second = anyio.Event()

    async def submit_again():
        await submit(writer, trainer)
        second.set()

    with anyio.fail_after(30):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(writer.run)
            await submit(writer, trainer)
            await disk.begun()
            train(trainer, 1)
            tasks.start_soon(submit_again)
            await anyio.wait_all_tasks_blocked()
            assert not second.is_set()
            assert writer.writing == 0
            assert not disk.started.acquire(blocking=False)
            disk.go.release()
            await second.wait()
            assert reported == [(0, [0])]
            disk.go.release()
            await writer.idle()
            tasks.cancel_scope.cancel()
    assert reported == [(0, [0]), (1, [1, 0])]


@pytest.mark.parametrize("fault", [OSError(22, "Invalid argument"), MemoryError("no memory")])
async def test_a_write_that_fails_is_never_told_and_leaves_the_one_before(
    trainer, train, initial, tmp_path, monkeypatch, fault
):
    disk, reported, root = Disk(monkeypatch, held=False), [], tmp_path / "c"
    writer = writer_of(root, initial, reported)
    with anyio.fail_after(30), pytest.raises(BaseExceptionGroup) as raised:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(writer.run)
            await submit(writer, trainer)
            await writer.idle()
            train(trainer, 1)
            disk.fault = fault
            await submit(writer, trainer)
            await writer.idle()
    assert raised.group_contains(type(fault))
    assert reported == [(0, [0])]
    assert [read_state(p).updates for p in find_checkpoints(root)] == [0]


async def test_a_stop_does_not_wait_for_a_hanging_disk(trainer, initial, tmp_path, monkeypatch):
    disk, reported, root = Disk(monkeypatch), [], tmp_path / "c"
    writer = writer_of(root, initial, reported)
    with anyio.fail_after(60):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(writer.run)
            await submit(writer, trainer)
            await disk.begun()
            with anyio.move_on_after(0.05) as bound:
                await writer.idle()
            assert bound.cancelled_caught
            tasks.cancel_scope.cancel()
    assert reported == []
    disk.go.release()


def test_an_image_shares_no_memory_with_the_trainer(initial, resume, config_of, train, monkeypatch):
    monkeypatch.setattr("learner.process.build.needed_scores", lambda config: frozenset({"reference", "values"}))
    monkeypatch.setattr("learner.training.trainer.needed_scores", lambda config: frozenset({"reference", "values"}))
    trainer = resume(config_of({"lora": {"rank": 2}}), initial)
    train(trainer, 1)
    image = image_of(trainer)

    def tensors(value):
        if isinstance(value, torch.Tensor):
            return [value]
        if isinstance(value, dict | list | tuple):
            return [t for item in (value.values() if isinstance(value, dict) else value) for t in tensors(item)]
        return []

    mine = tensors([image.weights, image.adapters, image.training])
    live = [*trainer.policy.model.state_dict().values(), *tensors(trainer.optimizer.state_dict())]
    live += tensors(trainer.critic.state())
    assert {t.data_ptr() for t in mine}.isdisjoint({t.data_ptr() for t in live if t.numel()} - {0})
    assert {"critic", "optimizer", "random"} == image.training.keys()


def test_torn_weights_give_no_image(trainer):
    trainer.policy.interrupt.mid_update = True
    with pytest.raises(TrainingError, match="complete updates"):
        image_of(trainer)


async def test_who_waits_for_the_writer_waits_for_an_image_that_is_being_taken(trainer, train, initial, tmp_path):
    """With several ranks the others write already: a stop in between would leave them in their collective."""
    reported, root = [], tmp_path / "c"
    writer = writer_of(root, initial, reported)
    train(trainer, 1)
    asked, seen = anyio.Event(), []

    async def stop():
        asked.set()
        await writer.idle()
        seen.append(list(reported))
        tasks.cancel_scope.cancel()

    with anyio.fail_after(30):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(writer.run)
            async with writer.slot(1) as take:
                tasks.start_soon(stop)
                await asked.wait()
                take(image_of(trainer))
            await anyio.sleep_forever()
    assert seen == [[(1, [1])]]


async def test_a_place_without_an_image_is_given_back(trainer, train, initial, tmp_path):
    reported, root = [], tmp_path / "c"
    writer = writer_of(root, initial, reported)
    train(trainer, 1)
    with anyio.fail_after(30):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(writer.run)
            with pytest.raises(TrainingError):
                async with writer.slot(1):
                    raise TrainingError("no image")
            assert writer.writing is None
            await submit(writer, trainer)
            await writer.idle()
            tasks.cancel_scope.cancel()
    assert reported == [(1, [1])]
