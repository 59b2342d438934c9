"""A learner resumes from the newest checkpoint whose every byte is what was written, and says what it passed over."""

import json
import shutil

import pytest

from learner.checkpoints.best import keep_best
from learner.checkpoints.checkpoint import (
    CheckpointState,
    find_checkpoints,
    find_resumption,
    restore_training,
    save_checkpoint,
)
from learner.data.rows import Batch
from learner.training.trainer import Trainer
from pipeline.errors import DamagedFiles, FormatMismatch
from pipeline.runtime.folders import damaged_folders, find_damage, write_contents
from tests.support.damage import DAMAGES, files_in, flip
from tests.unit.learner.conftest import make_rows, run_config, tiny_policy


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Checkpoints of 1, 2 and 4 updates, and the sums of the policy's weights at each."""
    root = tmp_path_factory.mktemp("saved")
    trainer = Trainer(tiny_policy(), run_config())
    initial = root / "model"
    trainer.policy.model.save_pretrained(initial)
    (initial / "tokenizer.json").write_text("{}")
    for updates in (1, 2, 4):
        while trainer.updates < updates:
            trainer.step(Batch(trainer.updates, (), make_rows(4, seed=trainer.updates)), trainer.updates)
        save_checkpoint(root / "checkpoints", trainer, CheckpointState(updates, updates, {}), initial, keep=3)
    return root / "checkpoints"


@pytest.fixture
def root(saved, tmp_path):
    return shutil.copytree(saved, tmp_path / "checkpoints")


FILES = [
    "state.json",
    "contents.json",
    "training.pt",
    "model/config.json",
    "model/generation_config.json",
    "model/model.safetensors",
    "model/tokenizer.json",
]


def test_every_file_of_a_checkpoint_is_damaged_below(root):
    assert files_in(root / "u000004") == sorted(FILES)


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("file", FILES)
def test_whatever_is_damaged_in_the_newest_the_one_before_is_used_and_told(root, file, damage):
    DAMAGES[damage](root / "u000004" / file)
    found = find_resumption(root)
    assert found.checkpoint == root / "u000002"
    [sentence] = found.damaged
    assert "u000004 is damaged" in sentence and "resumes from u000002; updates to make again: 2" in sentence
    assert file in sentence or damage in ("flip", "zero")
    assert (root / "u000004.damaged").is_dir() and not (root / "u000004").exists()
    assert damaged_folders(root)["u000004.damaged"]["sentence"] == sentence
    again = find_resumption(root)
    assert (again.checkpoint, again.damaged) == (root / "u000002", ()), "it is told once, and never chosen again"
    assert restore_training(again.checkpoint, Trainer(tiny_policy(), run_config())).updates == 2


def test_an_intact_newest_checkpoint_is_used_and_nothing_is_said(root):
    found = find_resumption(root)
    assert (found.checkpoint, found.damaged) == (root / "u000004", ())
    assert find_resumption(root / "nowhere").checkpoint is None


def test_several_damaged_ones_are_each_told(root):
    flip(root / "u000004" / "training.pt")
    flip(root / "u000002" / "model" / "model.safetensors")
    found = find_resumption(root)
    assert found.checkpoint == root / "u000001"
    assert "again: 3" in found.damaged[0] and "again: 1" in found.damaged[1]


def test_a_second_damaged_one_of_a_number_does_not_replace_the_first(root):
    flip(root / "u000004" / "training.pt")
    find_resumption(root)
    shutil.copytree(root / "u000002", root / "u000004")
    flip(root / "u000004" / "training.pt")
    find_resumption(root)
    assert set(damaged_folders(root)) == {"u000004.damaged", "u000004.damaged-2"}


def test_without_an_intact_one_every_start_says_the_same_sentence_and_none_begins_anew(root):
    for path in find_checkpoints(root):
        flip(path / "training.pt")
    said = []
    for _ in range(2):
        with pytest.raises(DamagedFiles, match="only damaged ones") as caught:
            find_resumption(root)
        said.append(str(caught.value))
    assert said[0] == said[1]
    assert said[0].count("training.pt does not hold the bytes that were written") == 3 and "--fresh" in said[0]


def test_pruning_counts_and_deletes_no_damaged_one(root, saved):
    flip(root / "u000004" / "training.pt")
    find_resumption(root)
    trainer = Trainer(tiny_policy(), run_config())
    restore_training(root / "u000002", trainer)
    save_checkpoint(root, trainer, CheckpointState(5, 5, {}), saved.parent / "model", keep=2)
    assert [path.name for path in find_checkpoints(root)] == ["u000005", "u000002"]
    assert (root / "u000004.damaged").is_dir()


def test_damaged_weights_do_not_become_the_best(root):
    best = {"evaluation": 4, "updates": 4, "policy_version": 4, "metric": "score", "value": 0.5}
    flip(root / "u000004" / "model" / "model.safetensors")
    assert keep_best(root, best) is None
    good = {**best, "updates": 2, "policy_version": 2}
    kept = keep_best(root, good)
    assert kept is not None and find_damage(kept) == "", "evaluation.json beside the files is no damage"


def test_a_checkpoint_of_another_format_is_refused_and_not_called_damaged(root):
    (root / "u000004" / "contents.json").unlink()
    state = json.loads((root / "u000004" / "state.json").read_text())
    (root / "u000004" / "state.json").write_text(json.dumps({**state, "format": 1}))
    with pytest.raises(FormatMismatch, match="format 1"):
        find_resumption(root)
    assert (root / "u000004").is_dir()


def test_contents_cover_every_file_below_and_are_replaced_as_a_whole(tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "b").write_bytes(b"x" * 10)
    (tmp_path / "empty").write_bytes(b"")
    assert write_contents(tmp_path) == 10
    assert find_damage(tmp_path) == ""
    (tmp_path / "more").write_text("added files do not count")
    assert find_damage(tmp_path) == ""
    flip(tmp_path / "a" / "b")
    assert find_damage(tmp_path, digests=False) == ""
    assert find_damage(tmp_path) == "a/b does not hold the bytes that were written"
    write_contents(tmp_path)
    assert find_damage(tmp_path) == ""
