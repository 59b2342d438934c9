import random
import shutil
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, GenerationConfig

import learner.checkpoints.checkpoint as checkpoints
from learner.checkpoints.checkpoint import (
    CheckpointState,
    find_checkpoints,
    numbered_checkpoints,
    read_state,
    restore_training,
    save_checkpoint,
)
from learner.checkpoints.shards import Shards, set_random_state
from learner.data.rows import Batch
from learner.models.model_folder import ModelFolder
from learner.policy.policy import Policy
from learner.process.recorder import MetricsLog
from learner.process.role import choose_version
from learner.process.session import LearnerProgress
from learner.training.trainer import Trainer
from learner.weights.publisher import write_weights
from pipeline.errors import StoreError, TrainingError
from pipeline.runtime.folders import CONTENTS, find_damage, remove_leftovers, write_contents


def trainer_of(kit, folder=None, **learner):
    config = kit.run_config({"schedule": "cosine", "minibatches": 2, **learner})
    model = kit.tiny_model() if folder is None else AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return Trainer(Policy(model, config.learner, torch.device("cpu")), config)


def train(trainer, kit, count):
    for _ in range(count):
        u = trainer.updates
        trainer.step(Batch(u, (), kit.make_rows(6, seed=u)), policy_version=u)


def state_of(trainer):
    return CheckpointState(trainer.updates, trainer.updates, {})


@pytest.fixture
def initial(kit, tmp_path):
    folder = tmp_path / "model"
    kit.tiny_model().save_pretrained(folder)
    (folder / "tokenizer.json").write_text("{}")
    (folder / "chat_template.jinja").write_text("x")
    return folder


def test_stopping_and_resuming_equals_never_stopping_bit_for_bit(kit, tmp_path, initial):
    straight = trainer_of(kit)
    train(straight, kit, 6)
    first = trainer_of(kit)
    train(first, kit, 3)
    path = save_checkpoint(tmp_path / "c", first, state_of(first), initial, keep=2)
    resumed = trainer_of(kit, folder=path / "model")
    assert restore_training(path, resumed).updates == 3
    train(resumed, kit, 3)
    expected, came = straight.policy.snapshot("float32"), resumed.policy.snapshot("float32")
    assert all(torch.equal(expected[name], came[name]) for name in expected)


def test_a_model_whose_generation_config_contradicts_itself_is_saved_and_published(kit, tmp_path, initial):
    facts = '{"do_sample": false, "temperature": 0.6, "eos_token_id": [2, 5]}'
    (initial / "generation_config.json").write_text(facts)
    folder = ModelFolder(initial)
    policy = Policy(folder.read(torch.device("cpu")), kit.learner_config(), torch.device("cpu"))
    trainer = Trainer(policy, kit.run_config())
    path = save_checkpoint(tmp_path / "c", trainer, state_of(trainer), initial, keep=1)
    write_weights(policy.model, tmp_path / "v1", policy.snapshot("float32"))
    folder.empty().generation_config.save_pretrained(tmp_path / "empty")
    for saved in (path / "model", tmp_path / "v1", tmp_path / "empty"):
        assert GenerationConfig.from_pretrained(saved).eos_token_id == [2, 5]


def test_without_the_optimizer_a_checkpoint_is_smaller_and_resumes_with_a_fresh_one(kit, tmp_path, initial, caplog):
    trainer = trainer_of(kit)
    train(trainer, kit, 2)
    whole = save_checkpoint(tmp_path / "whole", trainer, state_of(trainer), initial, keep=1)
    trainer.saves_optimizer = False
    lean = save_checkpoint(tmp_path / "lean", trainer, state_of(trainer), initial, keep=1)
    weights = (lean / "model" / "model.safetensors").stat().st_size
    assert (lean / "training.pt").stat().st_size < (whole / "training.pt").stat().st_size - 1.9 * weights
    resumed = trainer_of(kit, folder=lean / "model")
    assert restore_training(lean, resumed).updates == resumed.updates == 2
    assert not resumed.optimizer.state_dict()["state"]
    assert "no state of the optimizer" in caplog.text
    expected, came = trainer.policy.snapshot("float32"), resumed.policy.snapshot("float32")
    assert all(torch.equal(expected[name], came[name]) for name in expected)
    train(resumed, kit, 1)


def test_random_state_goes_on_where_it_was_saved(kit, tmp_path, initial):
    trainer = trainer_of(kit)
    path = save_checkpoint(tmp_path / "c", trainer, state_of(trainer), initial, keep=1)
    np.random.normal()
    np.random.normal(), random.random(), torch.rand(1)
    restore_training(path, trainer)
    expected = [np.random.normal() for _ in range(3)], random.random(), torch.rand(2).tolist()
    np.random.seed(9), random.seed(9), torch.manual_seed(9)
    restore_training(path, trainer)
    assert ([np.random.normal() for _ in range(3)], random.random(), torch.rand(2).tolist()) == expected
    set_random_state(checkpoints.random_state())


def test_model_of_a_checkpoint_loads_in_transformers_with_its_tokenizer_files(kit, tmp_path, initial):
    trainer = trainer_of(kit)
    train(trainer, kit, 1)
    path = save_checkpoint(tmp_path / "c", trainer, state_of(trainer), initial, keep=1)
    model = AutoModelForCausalLM.from_pretrained(path / "model")
    assert torch.equal(model.model.norm.weight, trainer.policy.model.model.norm.weight)
    assert (path / "model" / "tokenizer.json").read_text() == "{}"
    assert (path / "model" / "chat_template.jinja").exists()


def test_a_checkpoint_has_digests_of_its_own_files_and_none_of_the_initial_model(kit, tmp_path, initial):
    write_contents(initial)
    trainer = trainer_of(kit)
    train(trainer, kit, 1)
    path = save_checkpoint(tmp_path / "c", trainer, state_of(trainer), initial, keep=1)
    assert [found.parent for found in path.rglob(CONTENTS)] == [path] and find_damage(path) == ""


@pytest.mark.parametrize("moment", ["model", "training", "sync", "rename"])
def test_a_kill_at_any_moment_leaves_the_older_checkpoint_readable(kit, tmp_path, initial, monkeypatch, moment):
    trainer, root = trainer_of(kit), tmp_path / "c"
    train(trainer, kit, 1)
    older = save_checkpoint(root, trainer, state_of(trainer), initial, keep=2)
    train(trainer, kit, 1)

    class Killed(BaseException):
        pass

    def die(*args, **kwargs):
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", lambda *a, **k: None)  # a killed process cleans nothing up
        if moment == "model":
            patch.setattr(trainer.policy.model, "save_pretrained", die)
        elif moment == "training":
            patch.setattr(torch, "save", die)
        elif moment == "sync":
            patch.setattr("pipeline.runtime.folders.sync_tree", die)
        else:
            patch.setattr("pipeline.runtime.folders.os.rename", die)
        with pytest.raises(Killed):
            save_checkpoint(root, trainer, state_of(trainer), initial, keep=2)
    assert find_checkpoints(root) == [older]
    assert restore_training(older, trainer_of(kit, folder=older / "model")).updates == 1


def test_a_kill_while_an_old_checkpoint_is_deleted_leaves_no_part_of_it(kit, tmp_path, initial, monkeypatch):
    trainer, root = trainer_of(kit), tmp_path / "c"
    save_checkpoint(root, trainer, state_of(trainer), initial, keep=1)
    train(trainer, kit, 1)

    class Killed(BaseException):
        pass

    def die_halfway(path, **kwargs):
        if Path(path).exists():
            (Path(path) / "training.pt").unlink()
            raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", die_halfway)
        with pytest.raises(Killed):
            save_checkpoint(root, trainer, state_of(trainer), initial, keep=1)
    assert numbered_checkpoints(root) == find_checkpoints(root) == [root / "u000001"]
    remove_leftovers(root)
    assert list(root.iterdir()) == [root / "u000001"]


def test_damaged_and_foreign_folders_are_passed_over(kit, tmp_path, initial):
    trainer, root = trainer_of(kit), tmp_path / "c"
    paths = []
    for _ in range(3):
        train(trainer, kit, 1)
        paths.append(save_checkpoint(root, trainer, state_of(trainer), initial, keep=5))
    (paths[2] / "training.pt").write_bytes(b"short")
    (paths[1] / "state.json").unlink()
    (root / "u000099").mkdir()
    (root / "notes").mkdir()
    assert find_checkpoints(root) == [paths[0]]
    assert find_checkpoints(tmp_path / "nowhere") == []


def test_only_the_newest_checkpoints_are_kept(kit, tmp_path, initial):
    trainer, root = trainer_of(kit), tmp_path / "c"
    for _ in range(4):
        train(trainer, kit, 1)
        save_checkpoint(root, trainer, state_of(trainer), initial, keep=2)
    assert [read_state(p).updates for p in find_checkpoints(root)] == [4, 3]


def test_counters_survive(kit, tmp_path, initial):
    trainer = trainer_of(kit)
    state = CheckpointState(0, 17, {4: ["g000001", "g000002"]})
    path = save_checkpoint(tmp_path / "c", trainer, state, initial, keep=1)
    assert read_state(path) == state


def test_torn_weights_are_never_saved(kit, tmp_path, initial):
    trainer = trainer_of(kit)
    trainer.policy.interrupt.mid_update = True
    with pytest.raises(TrainingError, match="complete updates"):
        save_checkpoint(tmp_path / "c", trainer, state_of(trainer), initial, keep=1)


def test_a_checkpoint_of_another_format_is_refused(kit, tmp_path, initial, monkeypatch):
    trainer = trainer_of(kit)
    path = save_checkpoint(tmp_path / "c", trainer, CheckpointState(0, 0, {}, format=99), initial, keep=1)
    with pytest.raises(StoreError, match="format 99"):
        restore_training(path, trainer)


def test_resuming_drops_the_lines_that_will_be_made_again(tmp_path):
    path = tmp_path / "metrics.jsonl"
    with MetricsLog(path, 0) as lines:
        for step in range(1, 6):
            lines.write({"step": step, "loss": float("nan") if step == 2 else 0.5})
    with path.open("ab") as file:
        file.write(b'{"step": 6, "lo')
    with MetricsLog(path, 3) as lines:
        lines.write({"step": 4, "loss": 0.1})
    import orjson

    came = [orjson.loads(line) for line in path.read_bytes().splitlines()]
    assert [line["step"] for line in came] == [1, 2, 3, 4]
    assert (came[1]["loss"], came[3]["loss"]) == (None, 0.1)


@pytest.mark.parametrize(
    ("restored", "recorded", "written", "version"),
    [
        (None, -1, [], 0),
        (None, 0, [], 0),
        (None, 3, [2, 3], 4),
        ((10, 10), 10, [9, 10], 10),
        ((10, 10), 10, [10, 11], 12),
        ((10, 10), 14, [], 15),
        ((10, 12), 11, [12], 12),
    ],
)
def test_a_version_names_one_set_of_weights_for_ever(restored, recorded, written, version):
    progress = LearnerProgress() if restored is None else LearnerProgress(*restored)
    assert choose_version(progress, recorded, written) == version


def test_copies_are_written_without_the_gpu(tmp_path, monkeypatch):
    """The thread that writes has GPU 0 as its current one, also on ranks that compute on another."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for name in ("current_stream", "stream", "synchronize"):
        monkeypatch.setattr(torch.cuda, name, lambda *_: pytest.fail("the thread used the GPU"))
    copies = {"w": torch.arange(3.0)}
    Shards(copies, copies, SimpleNamespace(saving=None))._save(tmp_path)
    assert list((tmp_path / "weights").glob("*.distcp"))
