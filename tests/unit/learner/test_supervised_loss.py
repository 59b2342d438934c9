"""The cross-entropy: against a slow reference over full logits, alone and mixed into an update."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import orjson
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from learner.data.demonstrations import Demonstrations
from learner.data.division import divide
from learner.data.rows import Batch
from learner.distributed.ranks import Ranks
from learner.losses.auxiliary import cross_entropy, imported_share
from learner.observability.timing import Stopwatch
from learner.policy.policy import Policy
from learner.training.optimizer_step import add_supervised_gradients
from learner.training.report import StepSums
from learner.training.trainer import Trainer
from pipeline.config import RunConfig
from tests.unit.learner.conftest import gradients_of
from tests.unit.learner.test_learner_role import world

__all__ = ["world"]


def trainer_of(kit, learner=None, demonstrations=None, **sections) -> Trainer:
    config = kit.run_config({"grad_clip": 1e9, **(learner or {})}, **sections)
    return Trainer(Policy(kit.tiny_model(), config.learner, torch.device("cpu")), config, demonstrations=demonstrations)


def gradients(trainer, act):
    """Gradients that ``act`` hands to the optimizer, and its report."""
    report, seen = gradients_of(trainer, act)
    assert seen, "there was no optimizer step"
    return report, seen


def slow_reference(kit, rows):
    """Mean of -log softmax at temperature 1 over sampled tokens, row by row, float64; and its gradient."""
    model = kit.tiny_model().double()
    total, loss = sum(row.n_sampled for row in rows), 0.0
    for row in rows:
        logits = model(torch.from_numpy(row.token_ids.astype(np.int64))[None]).logits[0].log_softmax(-1)
        for t in np.flatnonzero(row.loss_mask):
            loss = loss - logits[t - 1, int(row.token_ids[t])] / total
    loss.backward()
    return float(loss.detach()), {n: p.grad.float() for n, p in model.named_parameters()}


def ones(rows):
    return tuple(replace(row, temperatures=np.ones_like(row.temperatures)) for row in rows)


@pytest.mark.parametrize("tokens", [1, 30, 1000])
def test_the_gradient_is_that_of_the_token_mean_however_it_is_split(kit, tokens) -> None:
    rows = ones(kit.make_rows(7))
    policy = trainer_of(kit, {"tokens_per_microbatch": tokens}).policy
    shuffled = [rows[i] for i in np.random.default_rng(tokens).permutation(7)]
    found = float(add_supervised_gradients(policy, shuffled, 1.0, Stopwatch(policy.device), StepSums()))
    loss, expected = slow_reference(kit, rows)
    assert found == pytest.approx(loss, rel=1e-5)
    for name, p in policy.named_parameters:
        torch.testing.assert_close(p.grad, expected[name], rtol=1e-3, atol=1e-6)


@settings(max_examples=80, deadline=None)
@given(st.lists(st.tuples(st.floats(-30, 0), st.booleans()), min_size=1, max_size=12), st.integers(0, 12))
def test_tokens_outside_the_mask_change_nothing_whatever_they_hold(tokens, cut) -> None:
    values = torch.tensor([v if m else float("nan") for v, m in tokens], dtype=torch.float64, requires_grad=True)
    mask = torch.tensor([m for _, m in tokens])
    loss = cross_entropy(values, mask, 0.5)
    assert float(loss.detach()) == pytest.approx(-0.5 * sum(v for v, m in tokens if m))
    loss.backward()
    assert values.grad.tolist() == [-0.5 if m else 0.0 for _, m in tokens]
    parts = cross_entropy(values[:cut], mask[:cut], 0.5) + cross_entropy(values[cut:], mask[cut:], 0.5)
    assert float(parts.detach()) == pytest.approx(float(loss.detach()))


def test_imported_demonstrations_of_an_update_have_a_denominator_of_their_own(kit) -> None:
    rows = list(ones(kit.make_rows(6, replayed=[False, True, True, False, True, False])))
    rows[1], rows[4] = replace(rows[1], recorded=False), replace(rows[4], recorded=False)
    own = rows[1].n_sampled + rows[4].n_sampled
    assert imported_share(rows, 0.5) == pytest.approx(0.5 / own)
    sections = {"replay": {"enabled": True}, "groups": {"n_rollout": 4, "groups_per_step": 2}}

    def step(weight, tokens=1000):
        trainer = trainer_of(
            kit, {"tokens_per_microbatch": tokens}, loss={"supervised": {"weight": weight}}, **sections
        )
        return gradients(trainer, lambda: trainer.step(Batch(0, (), tuple(rows)), 0))

    (base, without), (mixed, with_it), (_, split) = step(0.0), step(0.5), step(0.5, tokens=1)
    loss, expected = slow_reference(kit, [rows[1], rows[4]])
    assert mixed.supervised_loss == pytest.approx(loss, rel=1e-5) and mixed.supervised_tokens == own
    assert base.supervised_loss == 0 and base.supervised_tokens == 0
    assert mixed.loss == pytest.approx(base.loss + 0.5 * loss, rel=1e-5)
    assert mixed.policy_loss == pytest.approx(base.policy_loss, rel=1e-6)
    for name, gradient in with_it.items():
        torch.testing.assert_close(gradient, without[name] + 0.5 * expected[name], rtol=1e-3, atol=1e-6)
        torch.testing.assert_close(split[name], gradient, rtol=1e-3, atol=1e-6)


def test_imported_demonstrations_without_advantage_are_learned_all_the_same(kit) -> None:
    rows = list(ones(kit.make_rows(3, advantages=[0.0, 0.0, 0.0], replayed=[True, False, False])))
    rows[0] = replace(rows[0], recorded=False)
    trainer = trainer_of(kit, loss={"supervised": {"weight": 1.0}}, replay={"enabled": True})
    report, found = gradients(trainer, lambda: trainer.step(Batch(0, (), tuple(rows)), 0))
    _, expected = slow_reference(kit, rows[:1])
    assert report.optimizer_steps == 1
    for name, gradient in found.items():
        torch.testing.assert_close(gradient, expected[name], rtol=1e-3, atol=1e-6)


def test_each_optimizer_step_draws_and_counts_its_own_demonstrations_and_adds_their_gradient(kit) -> None:
    demonstrations = Demonstrations(tuple((row,) for row in ones(kit.make_rows(5, seed=3))))
    rows = kit.make_rows(4)
    loss = {"supervised": {"weight": 0.25, "demonstrations": "x", "batch": 2}}
    trainer = trainer_of(kit, demonstrations=demonstrations, loss=loss)
    report, found = gradients(trainer, lambda: trainer.step(Batch(0, (), rows), 0))
    plain = trainer_of(kit)
    base, without = gradients(plain, lambda: plain.step(Batch(0, (), rows), 0))
    value, expected = slow_reference(kit, demonstrations.draw((0, 1), 0, 2))
    assert report.supervised_loss == pytest.approx(value, rel=1e-5)
    assert report.loss == pytest.approx(base.loss + 0.25 * value, rel=1e-5)
    assert report.tokens_trained == base.tokens_trained, "the statistics are those of the update"
    for name, gradient in found.items():
        torch.testing.assert_close(gradient, without[name] + 0.25 * expected[name], rtol=1e-3, atol=1e-6)
    seen = []
    draw = Demonstrations.draw
    several = trainer_of(kit, {"minibatches": 2, "epochs": 2}, demonstrations=demonstrations, loss=loss)
    spy = lambda self, seed, step, batch: seen.append(step) or draw(self, seed, step, batch)  # noqa: E731
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Demonstrations, "draw", spy)
        reports = [several.step(Batch(update, (), rows), update) for update in (0, 1)]
    assert seen == list(range(8))
    drawn = [sum(row.n_sampled for row in demonstrations.draw((0, 1), step, 2)) for step in seen]
    assert [report.supervised_tokens for report in reports] == [sum(drawn[:4]), sum(drawn[4:])]


def test_a_step_whose_cross_entropy_is_not_finite_is_skipped_and_counted(kit, monkeypatch) -> None:
    demonstrations = Demonstrations(tuple((row,) for row in ones(kit.make_rows(2))))
    loss = {"supervised": {"weight": 1.0, "demonstrations": "x", "batch": 2}}
    trainer = trainer_of(kit, demonstrations=demonstrations, loss=loss)
    kept = trainer.policy.snapshot("float32")
    monkeypatch.setattr(
        "learner.training.optimizer_step.cross_entropy", lambda logprobs, *_: logprobs.sum() * float("nan")
    )
    report = trainer.step(Batch(0, (), kit.make_rows(4)), 0)
    assert report.optimizer_steps == 0 and report.nonfinite["loss"] == sum(report.nonfinite.values()) == 1
    assert all(torch.equal(tensor, kept[name]) for name, tensor in trainer.policy.snapshot("float32").items())


async def test_demonstrations_beside_rl_are_in_every_step_of_a_learner(world, tmp_path) -> None:
    """Their tokens are those that the actor of these tests samples, after the context that it sends."""
    file = tmp_path / "toy.jsonl"
    turns = [[{"context_ids": [1, 2], "completion_ids": [3 + i, 4]}] for i in range(4)]
    lines = [{"environment": "toy", "seed": i, "reward": 1, "turns": turn} for i, turn in enumerate(turns)]
    file.write_bytes(b"\n".join(map(orjson.dumps, lines)) + b"\n")
    supervised = {"weight": 0.5, "batch": 2, "demonstrations": str(file)}
    async with world(loss={"supervised": supervised}) as w:
        ctx = await w.learn()
    lines = w.lines()
    assert [line["supervised_tokens"] for line in lines] == [4, 4, 4]
    assert all(line["optimizer_steps"] == 1 and line["supervised_loss"] > 0 for line in lines)
    assert ctx.registry.get_sample_value("afterplay_learner_loss", {"term": "supervised"}) > 0


def test_demonstrations_that_are_replayed_need_replay() -> None:
    with pytest.raises(ValueError, match=r"replay\.enabled is false"):
        RunConfig.model_validate({"loss": {"supervised": {"weight": 1}}})
    RunConfig.model_validate({"loss": {"supervised": {"weight": 1, "demonstrations": "x"}}})


class _OneOf(Ranks):
    """One of several ranks, without the others: what it adds up is its own share. Another has one micro-batch more."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size

    def mine(self, rows, form, tokens_max):
        return [], divide(rows, self.size, form)[self.rank]

    def padded(self, parts):
        return [*parts, None]


@pytest.mark.parametrize("size", [2, 3, 5])
def test_the_shares_of_all_ranks_add_up_to_the_gradient_of_one(kit, size) -> None:
    rows = ones(kit.make_rows(4))
    policy, total = trainer_of(kit, {"tokens_per_microbatch": 20}).policy, 0.0
    for rank in range(size):
        policy.ranks = _OneOf(rank, size)
        total += float(add_supervised_gradients(policy, rows, 1.0, Stopwatch(policy.device), StepSums()))
    loss, expected = slow_reference(kit, rows)
    assert total == pytest.approx(loss, rel=1e-5)
    for name, p in policy.named_parameters:
        torch.testing.assert_close(p.grad, expected[name], rtol=1e-3, atol=1e-6)
