"""The model folder that ranks make of their shards, in a group of one rank, against that of one process."""

import errno
import os
from dataclasses import replace
from itertools import pairwise

import numpy as np
import peft  # noqa: F401  its import takes seconds
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen3MoeConfig

from learner.checkpoints import checkpoint, model_files, shards
from learner.checkpoints.checkpoint import (
    CheckpointState,
    find_checkpoints,
    restore_training,
    save_checkpoint,
    take_image,
    write_image,
)
from learner.checkpoints.model_files import divide_names
from learner.data.rows import Batch
from learner.process.build import make_trainer
from pipeline.errors import FormatMismatch
from pipeline.runtime.folders import find_damage
from tests.support.damage import files_in

SHAPE = {"vocab_size": 23, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2,
         "num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 128}  # fmt: skip
CONFIGS = {
    "tied": LlamaConfig(**SHAPE, tie_word_embeddings=True),
    "untied": LlamaConfig(**SHAPE, tie_word_embeddings=False),
    "experts": Qwen3MoeConfig(**SHAPE, head_dim=8, moe_intermediate_size=16, num_experts=4, num_experts_per_tok=2,
                              tie_word_embeddings=False),
}  # fmt: skip
STATE = CheckpointState(0, 0, {})


@pytest.fixture
def initial(tmp_path):
    def write(name):
        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(CONFIGS[name]).save_pretrained(tmp_path / name)
        (tmp_path / name / "tokenizer.json").write_text("{}")
        return tmp_path / name

    return write


@pytest.mark.parametrize("adapters", [False, True])
@pytest.mark.parametrize("name", CONFIGS)
def test_the_model_folder_of_several_ranks_is_byte_for_byte_that_of_one(kit, initial, tmp_path, group, name, adapters):
    folder, found = initial(name), []
    config = kit.run_config({"lora": {"rank": 2, "targets": ["q_proj", "o_proj"]}} if adapters else {})
    for ranks in (None, group):
        torch.manual_seed(3)
        trainer = make_trainer(config, folder, None, ranks)
        if adapters:
            with torch.no_grad():
                for parameter in trainer.policy.parameters:
                    parameter.add_(0.5)
        path = save_checkpoint(tmp_path / f"c{len(found)}", trainer, STATE, folder, keep=1)
        assert find_damage(path) == ""
        wanted = [file for file in files_in(path) if file.startswith(("model/", "adapter/"))]
        found.append({file: (path / file).read_bytes() for file in wanted})
    alone, divided = found
    assert alone.keys() == divided.keys() and "model/model.safetensors" in alone
    assert [file for file in alone if alone[file] != divided[file]] == []


@pytest.mark.parametrize("name", CONFIGS)
def test_files_of_bounded_size_hold_the_whole_model_for_any_number_of_ranks(
    kit, initial, tmp_path, group, name, monkeypatch
):
    """Memory for one file at a time is at most that of a layer, since a layer is never divided."""
    monkeypatch.setattr(model_files, "FILE_BYTES_MAX", 1000)
    folder, config, most = initial(name), kit.run_config(), []
    trainer = make_trainer(config, folder, None, group)
    load = shards.load_shards
    monkeypatch.setattr(
        shards, "load_shards", lambda t, **k: (most.append(sum(x.nbytes for x in t.values())), load(t, **k))
    )
    path = save_checkpoint(tmp_path / "c", trainer, STATE, folder, keep=1)
    layer = sum(p.numel() * 4 for p in trainer.policy.layers[0].parameters())
    assert len(most) >= 3 and max(most) == layer
    files = [file for file in files_in(path) if file.endswith(".safetensors")]
    assert files == [f"model/model-{i + 1:05}-of-{len(most):05}.safetensors" for i in range(len(most))]
    assert sorted(path.name for path in path.iterdir()) == [
        "contents.json", "model", "shards", "state.json", "training.pt"
    ]  # fmt: skip
    expected = load_file(folder / "model.safetensors")
    came = {name: tensor for file in files for name, tensor in load_file(path / file).items()}
    assert came.keys() == expected.keys() and all(torch.equal(came[name], expected[name]) for name in expected)
    for ranks in (None, group):
        resumed = make_trainer(config, folder, path, ranks)
        restore_training(path, resumed)
        own = resumed.policy.snapshot("float32")
        assert all(torch.equal(came[name], tensor) for name, tensor in own.items())


def test_a_disk_that_is_full_while_the_model_folder_is_made_leaves_nothing_and_another_attempt_succeeds(
    kit, initial, tmp_path, group, monkeypatch
):
    folder, root = initial("tied"), tmp_path / "c"
    trainer = make_trainer(kit.run_config(), folder, None, group)
    image = take_image(trainer, STATE)
    with monkeypatch.context() as patch:
        patch.setattr(type(trainer.policy.model), "save_pretrained", _full)
        with pytest.raises(OSError, match="No space left"):
            write_image(root, image, folder, 1)
    assert list(root.iterdir()) == []
    write_image(root, image, folder, 1)
    assert [find_damage(path) for path in find_checkpoints(root)] == [""]


def test_other_ranks_follow_until_the_last_attempt_has_ended(kit, initial, tmp_path, group, monkeypatch):
    """A disk that fails while older checkpoints are removed has the whole write tried again."""
    folder, told = initial("tied"), []
    image = take_image(make_trainer(kit.run_config(), folder, None, group), STATE)
    monkeypatch.setattr(group, "broadcast_text", lambda text: told.append(text) or text)
    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "find_checkpoints", _full)
        with pytest.raises(OSError, match="No space left"):
            write_image(tmp_path / "c", image, folder, 1)
    write_image(tmp_path / "c", image, folder, 1)
    assert told.index(shards._DURABLE) == len(told) - 1


def _full(*values, **options):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_training_after_the_image_changes_no_byte_of_the_checkpoint(kit, initial, tmp_path, group):
    folder = initial("untied")
    trainer = make_trainer(kit.run_config(), folder, None, group)
    image = take_image(trainer, STATE)
    with torch.no_grad():
        for parameter in trainer.policy.parameters:
            parameter.add_(1.0)
    path = write_image(tmp_path / "c", image, folder, 1)
    expected = load_file(folder / "model.safetensors")
    came = load_file(path / "model" / "model.safetensors")
    assert all(torch.equal(came[name], expected[name]) for name in expected)


def test_names_are_divided_in_order_into_files_of_which_no_two_neighbours_fit_into_one(monkeypatch):
    monkeypatch.setattr(model_files, "FILE_BYTES_MAX", 10)
    sizes = {"embed": 4, "layers.0.a": 3, "layers.0.b": 3, "layers.1.a": 6, "layers.1.b": 6, "norm": 1, "head": 9}
    files = divide_names(sizes)
    assert [name for file in files for name in file] == list(sizes)
    totals = [sum(sizes[name] for name in file) for file in files]
    assert totals == [10, 12, 10] and all(a + b > 10 for a, b in pairwise(totals))
    assert divide_names({}) == []


@pytest.mark.parametrize("ranks", [False, True])
def test_the_state_of_other_parameters_is_refused_with_what_to_do_by_one_rank_and_by_several(
    kit, initial, tmp_path, group, ranks
):
    folder, trainers = initial("tied"), []
    for backbone in ("own", "none"):
        config = kit.run_config({"critic": {"backbone": backbone}}, advantage={"estimator": "gae"})
        trainers.append(make_trainer(config, folder, None, group if ranks else None))
    saved, other = trainers
    rows = kit.make_rows(4)
    returns = np.ones(sum(row.n_sampled for row in rows), np.float32)
    saved.step(Batch(0, (), rows), 0, replace(saved.token_scores(rows), returns=returns))
    path = save_checkpoint(tmp_path / "c", saved, STATE, folder, keep=1)
    with pytest.raises(FormatMismatch, match=r"another model or critic\.backbone .*: choose another run\.name"):
        restore_training(path, other)
