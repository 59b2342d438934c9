"""Batches of optimizer steps that were not finite are written out, and can be tried again."""

from dataclasses import fields, replace

import numpy as np
import pytest
import torch

import learner.training.trainer
from learner.checkpoints.skipped_steps import KEPT_MAX, KIND, read_skipped, write_skipped
from learner.data.rows import Batch, Row, TokenScores
from learner.distributed.messages import pack
from learner.policy.policy import Policy
from learner.training.trainer import Trainer
from pipeline.errors import StoreError
from tests.unit.learner.test_learner_role import world

__all__ = ["world"]


def trainer_of(kit, **learner) -> Trainer:
    config = kit.run_config(learner)
    return Trainer(Policy(kit.tiny_model(), config.learner, torch.device("cpu")), config)


def poisoned(kit, row: int, count: int = 6) -> tuple[Row, ...]:
    rows = kit.make_rows(count)
    rows[row].advantages[:] = np.nan
    return rows


def test_a_batch_that_was_written_out_is_skipped_again_for_the_same_reason(kit, tmp_path):
    rows = poisoned(kit, 4)
    scores = TokenScores(reference=np.full(sum(row.n_sampled for row in rows), -1.5, np.float32))
    report = trainer_of(kit, minibatches=3).step(Batch(0, (), rows), 7, scores)
    assert sum(report.nonfinite.values()) == len(report.skipped.steps) == 1
    assert report.optimizer_steps == 2, "the other mini-batches are trained"
    (step,) = report.skipped.steps
    assert 4 in step.rows and len(step.rows) == 2
    found = read_skipped(write_skipped(tmp_path / "skipped", report.skipped))
    assert found.steps == report.skipped.steps
    assert (found.update, found.policy_version, found.kl_coefficient) == (0, 7, report.kl_coefficient)
    np.testing.assert_array_equal(found.token_scores.reference, scores.reference)
    for came, row in zip(found.rows, rows, strict=True):
        for f in fields(Row):
            np.testing.assert_array_equal(getattr(came, f.name), getattr(row, f.name))
    again = trainer_of(kit, minibatches=3).step(Batch(0, (), found.rows), found.policy_version, found.token_scores)
    assert (again.skipped.steps, again.nonfinite) == (report.skipped.steps, report.nonfinite)


def test_a_finite_update_has_nothing_to_write_out(kit):
    trainer = trainer_of(kit)
    assert trainer.step(Batch(0, (), kit.make_rows(3)), 0).skipped is None


@pytest.mark.parametrize("where", ["ratio", "gradient"])
def test_whatever_is_not_finite_the_batch_is_there(kit, where):
    trainer = trainer_of(kit)
    if where == "ratio":
        with torch.no_grad():
            trainer.policy.parameters[0].fill_(torch.nan)
    else:
        trainer.policy.model.model.norm.weight.register_hook(lambda g: g * float("inf"))
    rows = kit.make_rows(3)
    report = trainer.step(Batch(0, (), rows), 0)
    assert [(step.where, step.rows) for step in report.skipped.steps] == [(where, (0, 1, 2))]
    assert report.skipped.rows == rows


async def test_the_learner_writes_out_what_it_skips_and_goes_on(world, monkeypatch):
    real = learner.training.trainer.with_advantages

    def poison(batch, *rest):
        batch, scores = real(batch, *rest)
        if batch.update == 1:
            batch.rows[0].advantages[:] = np.nan
        return batch, scores

    monkeypatch.setattr(learner.training.trainer, "with_advantages", poison)
    async with world(total_steps=3) as w:
        _, run = w.learner()
        await run()
        (path,) = w.directory.skipped.iterdir()
    assert [line["nonfinite"]["loss"] for line in w.lines()] == [0, 1, 0]
    found = read_skipped(path)
    assert found.update == 1 and np.isnan(found.rows[0].advantages).all()


def test_only_the_newest_are_kept(kit, tmp_path):
    batch = trainer_of(kit).step(Batch(0, (), poisoned(kit, 0, 1)), 0).skipped
    for update in range(KEPT_MAX + 3):
        write_skipped(tmp_path, replace(batch, update=update))
    assert [read_skipped(p).update for p in sorted(tmp_path.iterdir())] == list(range(3, KEPT_MAX + 3))


def test_a_disk_that_takes_nothing_does_not_end_the_training(kit, tmp_path, caplog):
    (tmp_path / "skipped").write_text("not a folder")
    batch = trainer_of(kit).step(Batch(0, (), poisoned(kit, 0, 1)), 0).skipped
    assert write_skipped(tmp_path / "skipped", batch) is None
    assert "not written out" in caplog.text


WORDS = r"expected .*u000000\.batch to be a batch that the learner wrote out"


@pytest.mark.parametrize(
    ("content", "came"),
    [
        (b"", "something else"),
        (b"\0" * 64, "something else"),
        (b"\x05" + b"\0" * 7 + b"[1,2]", "something else"),
        (b"Afterplay skipped batch 1\n", "format 1"),
        (KIND.magic, "one whole record"),
        (KIND.magic + pack({"order": "skipped"}, {}).tobytes(), "steps"),
        (KIND.magic + pack({"order": "skipped", "rows": 3}, {}).tobytes(), "lengths"),
    ],
)
def test_another_file_is_refused(tmp_path, content, came):
    path = tmp_path / "u000000.batch"
    path.write_bytes(content)
    with pytest.raises(StoreError, match=f"{WORDS}.*{came}.*: read it with the Afterplay that wrote it"):
        read_skipped(path)
    path.unlink()
    with pytest.raises(StoreError, match=f"{WORDS}.*No such file"):
        read_skipped(path)
