"""Splitting, order, padding, and poison at masked places, for every policy loss, with the real trainer and model."""

from dataclasses import replace
from itertools import product

import numpy as np
import pytest
import torch

from learner.data.microbatch import token_weights
from learner.data.rows import Batch, TokenScores
from learner.losses.loss import REASONS
from learner.losses.policy_losses import LOSSES
from learner.observability.timing import StepTimes
from learner.policy.policy import Policy
from learner.process.recorder import Update, step_line
from learner.training.trainer import Trainer
from pipeline.errors import TrainingError
from tests.unit.learner.conftest import gradients

AGGREGATIONS = ("token_mean", "sequence_mean", "sequence_sum", "sequence_sum_norm")
MASKS = (
    {"level": "token", "low": 0.02},
    {"level": "geometric", "low": 0.1, "high": 20},
    {"level": "any_token", "high": 200},
)


def trainer_of(kit, name, aggregation, learner=None) -> Trainer:
    """Everything at once: rows' weights and masks, KL, entropy, off-policy clips."""
    length = {"aggregation_length": 16} if aggregation == "sequence_sum_norm" else {}
    config = kit.run_config(
        {"grad_clip": 1e9, **(learner or {})},
        importance={"anchor": "proximal", "weight": "geometric", "masks": MASKS},
        loss={
            "policy": name, "aggregation": aggregation, "kl": "loss", "kl_coef": 0.1, "kl_estimator": "k3+",
            "entropy_bonus": 0.01, **length,
        },
    )  # fmt: skip
    return Trainer(Policy(kit.tiny_model(), config.learner, torch.device("cpu")), config)


def rows_of(kit, n=7):
    """Fresh, replayed and demonstrated rows, an advantage for each token, a trajectory of two branches."""
    rng = np.random.default_rng(3)
    out = []
    for i, row in enumerate(kit.make_rows(n)):
        kind = i % 4
        advantages = rng.normal(size=row.n_sampled).astype(np.float32)
        mu = np.zeros_like(row.behaviour_logprobs) if kind == 2 else row.behaviour_logprobs
        trajectory_index = 0 if i == 4 else i
        out.append(
            replace(
                row,
                trajectory_index=trajectory_index,
                advantages=advantages,
                replayed=kind in (1, 2),
                recorded=kind != 2,
                behaviour_logprobs=mu,
                replay_weight=0.5 if kind == 1 else 1.0,
            )
        )
    return out


def references(rows):
    """log π_ref by the trajectory's name."""
    rng = np.random.default_rng(4)
    return {row.trajectory_id: -rng.uniform(0.1, 4, row.n_sampled).astype(np.float32) for row in rows}


def gradients_with(reference, trainer, rows):
    scores = TokenScores(reference=np.concatenate([reference[row.trajectory_id] for row in rows]))
    return gradients(trainer, rows, scores)


@pytest.mark.parametrize(
    ("name", "aggregation"),
    [
        pytest.param(
            name, aggregation, marks=[pytest.mark.slow] if name != "ppo" and aggregation != "token_mean" else []
        )
        for name, aggregation in product(sorted(LOSSES), AGGREGATIONS)
    ],
)
def test_splitting_permuting_and_padding_change_neither_loss_nor_gradient(kit, name, aggregation):
    rows = rows_of(kit)
    reference = references(rows)
    whole = trainer_of(kit, name, aggregation, {"tokens_per_microbatch": 1000})
    base, expected = gradients_with(reference, whole, rows)
    shuffled = [rows[i] for i in np.random.default_rng(0).permutation(len(rows))]
    for tokens, order in ((1, rows), (30, shuffled)):
        split = trainer_of(kit, name, aggregation, {"tokens_per_microbatch": tokens})
        report, came = gradients_with(reference, split, order)
        assert report.loss == pytest.approx(base.loss, rel=1e-4, abs=1e-6)
        assert report.kl_loss == pytest.approx(base.kl_loss, rel=1e-4)
        assert report.statistics.all.reasons == base.statistics.all.reasons
        for field in ("clipped_low", "clipped_high", "truncated"):
            assert getattr(report.statistics.all, field) == getattr(base.statistics.all, field)
        scale = max(float(g.abs().max()) for g in expected.values())
        for parameter in expected:
            torch.testing.assert_close(came[parameter], expected[parameter], rtol=1e-3, atol=1e-5 * scale)
    assert base.statistics.all.reasons.total() > 0


@pytest.mark.parametrize("name", sorted(LOSSES))
def test_masked_poison_in_the_rows_changes_not_a_bit(kit, name):
    rows = rows_of(kit, 5)
    reference = references(rows)
    poisoned = [
        replace(
            row,
            behaviour_logprobs=np.where(row.loss_mask, row.behaviour_logprobs, np.nan).astype(np.float32),
            temperatures=np.where(row.loss_mask, row.temperatures, np.nan).astype(np.float32),
        )
        for row in rows
    ]
    a, b = (gradients_with(reference, trainer_of(kit, name, "token_mean"), r) for r in (rows, poisoned))
    assert a[0].loss == b[0].loss
    assert all(torch.equal(a[1][n], b[1][n]) for n in a[1])


@pytest.mark.parametrize("name", ["ppo", "gspo", "dppo_kl"])
def test_several_optimizer_steps_share_the_anchors_of_one_pass_however_they_are_split(kit, name, monkeypatch):
    rows = rows_of(kit)
    reference = references(rows)
    weights = []
    for tokens in (1000, 1):
        trainer = trainer_of(kit, name, "token_mean", {"epochs": 3, "tokens_per_microbatch": tokens,
                                                       "learning_rate": 1e-2})  # fmt: skip
        scored, score = [], trainer.policy.score
        monkeypatch.setattr(trainer.policy, "score", lambda part: scored.append(part.n_sampled) or score(part))  # noqa: B023
        report, _ = gradients_with(reference, trainer, rows)
        assert report.optimizer_steps == 3
        anchored = sum(row.n_sampled for row in rows if not (row.replayed and row.recorded))
        assert sum(scored) == anchored + 3 * sum(row.n_sampled for row in rows)
        weights.append(trainer.policy.snapshot("float32"))
    for key, value in weights[0].items():
        torch.testing.assert_close(weights[1][key], value, rtol=1e-3, atol=2e-3)


def test_rows_without_advantage_still_feel_the_kl(kit):
    rows = [replace(row, advantages=row.advantages * 0) for row in rows_of(kit, 3)]
    reference = references(rows)
    report, came = gradients_with(reference, trainer_of(kit, "ppo", "token_mean"), rows)
    assert report.kl_loss > 0
    assert report.policy_loss == 0
    assert any(g.abs().max() > 0 for g in came.values())


def test_the_step_line_tells_the_kl_and_what_each_mask_took(kit):
    rows = rows_of(kit)
    trainer = trainer_of(kit, "gspo", "token_mean")
    report, _ = gradients_with(references(rows), trainer, rows)
    line = step_line(Update(Batch(0, (), tuple(rows)), report, StepTimes(0.0, 0.0, 0.0)))
    total = sum(row.n_sampled for row in rows)
    taken = {reason: line["rejected"][reason] for reason in REASONS[1:]}
    assert sum(taken.values()) == total - report.tokens_trained > 0
    assert line["masked_fraction"] == {"second_moment": 0.0, **{k: n / total for k, n in taken.items()}}
    assert line["kl_loss"] == pytest.approx(0.1 * line["kl_reference"] * report.tokens_trained / total, rel=1e-4)
    assert 0 <= line["clip_fraction"] <= 1
    assert 0 <= line["truncated_fraction"] <= 1


def test_sums_over_sequences_divide_by_sequences_and_by_the_constant(kit):
    rows = rows_of(kit)
    n = len({row.trajectory_index for row in rows})
    assert n == len(rows) - 1
    assert token_weights(rows, "sequence_sum") == pytest.approx([1 / n] * len(rows))
    assert token_weights(rows, "sequence_sum_norm", 16) == pytest.approx([1 / (16 * n)] * len(rows))
    with pytest.raises(TrainingError, match="aggregation_length"):
        token_weights(rows, "sequence_sum_norm")
