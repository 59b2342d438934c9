"""Replay, demonstrations and rows with lessons through the real trainer and model."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

import learner.training.optimizer_step
from learner.data.rows import Batch
from learner.policy.policy import Policy
from learner.training.trainer import Trainer
from tests.unit.learner.conftest import gradients

FORMS = ("clip", "shaped", "second_moment")


def trainer_of(kit, learner=None, **sections) -> Trainer:
    config = kit.run_config({"grad_clip": 1e9, **(learner or {})}, **sections)
    return Trainer(Policy(kit.tiny_model(), config.learner, torch.device("cpu")), config)


def mixed(kit, n=9):
    """Fresh, replayed, demonstrated and rows with lessons."""
    out = []
    for i, row in enumerate(kit.make_rows(n)):
        kind = i % 4
        row = replace(row, replayed=kind in (1, 2), recorded=kind != 2, with_lessons=kind == 3, discarded=kind == 3,
                      replay_weight=0.5 if kind == 1 else 1.0)  # fmt: skip
        mu = np.zeros_like(row.behaviour_logprobs) if kind == 2 else row.behaviour_logprobs
        out.append(replace(row, behaviour_logprobs=mu))
    return out


def reference(kit, rows, form, bound=math.inf):
    """Gradient of the formula in :mod:`learner.losses.loss` by full logits, in float64, one token at a time."""
    model = kit.tiny_model().double()
    entries = []
    for row in rows:
        log_p = torch.log_softmax(model(torch.from_numpy(row.token_ids.astype(np.int64))[None]).logits[0] / 0.8, -1)
        for t in np.flatnonzero(row.loss_mask):
            entries.append((row, log_p[t - 1, int(row.token_ids[t])], float(row.behaviour_logprobs[t])))
    with_moment = [
        e
        for e in entries
        if (e[0].replayed or e[0].discarded) and e[0].recorded and float(e[0].advantages[0]) * (e[1].item() - e[2]) > 0
    ]
    dropped = set()
    if form == "second_moment":
        order = sorted(with_moment, key=lambda e: -abs(e[1].item() - e[2]))
        while order and np.mean([(e[1].item() - e[2]) ** 2 for e in order]) > bound:
            dropped.add(id(order.pop(0)))
    loss = 0.0
    for e in entries:
        row, new, mu = e
        if id(e) in dropped:
            continue
        anchor, a = mu, float(row.advantages[0])
        if row.replayed and not row.recorded:
            anchor = 0.0 if form == "shaped" else new.detach()
        rho, off = (new - anchor).exp(), row.replayed or row.discarded
        if off and form == "shaped":
            token = -a * rho / (rho + 0.1)
        elif off and form == "second_moment" and row.recorded:
            token = -a * rho
        else:
            token = torch.maximum(-a * rho, -a * rho.clamp(0.8, 2.0 if off else 1.28))
        token = token.clamp(max=-a * 3.0) if a < 0 else token
        loss = loss + row.replay_weight * token / len(entries)
    loss.backward()
    return loss.item(), {n: p.grad.float() for n, p in model.named_parameters()}, len(dropped)


def off_policy(form):
    return {"name": form, "max": 1.0} if form == "second_moment" else form


@pytest.mark.parametrize("form", FORMS)
def test_fresh_replayed_demonstrated_and_guided_rows_each_get_their_formula(kit, form):
    rows = mixed(kit)
    trainer = trainer_of(kit, loss={"off_policy": off_policy(form)})
    report, came = gradients(trainer, rows)
    loss, expected, dropped = reference(kit, rows, form, 1.0)
    assert report.loss == pytest.approx(loss, rel=1e-4)
    assert report.statistics.all.masked == dropped
    for name, gradient in expected.items():
        torch.testing.assert_close(came[name], gradient, rtol=2e-3, atol=2e-6)


@pytest.mark.parametrize("form", FORMS)
def test_splitting_permuting_and_padding_change_nothing_with_every_kind_of_row(kit, form):
    rows = mixed(kit)
    loss = {"off_policy": off_policy(form)}
    base, expected = gradients(trainer_of(kit, {"tokens_per_microbatch": 1000}, loss=loss), rows)
    shuffled = [rows[i] for i in np.random.default_rng(0).permutation(len(rows))]
    for tokens, order in ((1, rows), (30, shuffled)):
        report, came = gradients(trainer_of(kit, {"tokens_per_microbatch": tokens}, loss=loss), order)
        assert report.loss == pytest.approx(base.loss, rel=1e-5)
        assert report.statistics.all.masked == base.statistics.all.masked
        for name in expected:
            torch.testing.assert_close(came[name], expected[name], rtol=1e-4, atol=1e-6)


def test_tokens_masked_by_the_second_moment_are_rejected_and_keep_their_share_of_the_denominator(kit):
    rows = [replace(row, replayed=True) for row in kit.make_rows(5, advantages=[1.0] * 5)]
    rows = [replace(row, behaviour_logprobs=np.where(row.loss_mask, -50.0, 0.0).astype(np.float32)) for row in rows]
    loss = {"off_policy": {"name": "second_moment", "max": 1e-12}}
    report, came = gradients(trainer_of(kit, loss=loss), rows)
    n = sum(row.n_sampled for row in rows)
    assert (report.statistics.all.masked, report.statistics.all.tokens, report.loss) == (n, 0, 0.0)
    assert all(float(g.abs().max()) == 0 for g in came.values())


def test_the_second_moment_masks_no_token_that_returns_towards_its_behaviour_policy(kit):
    loss = {"off_policy": {"name": "second_moment", "max": 1e-12}}
    for advantage, mu in ((-1.0, -50.0), (1.0, 0.0), (0.0, -50.0)):
        rows = [replace(row, replayed=True) for row in kit.make_rows(5, advantages=[advantage] * 5)]
        rows = [replace(row, behaviour_logprobs=np.where(row.loss_mask, mu, 0.0).astype(np.float32)) for row in rows]
        report, _ = gradients(trainer_of(kit, loss=loss), rows)
        assert report.statistics.all.masked == 0


def test_poison_outside_the_mask_of_replayed_rows_changes_nothing(kit):
    rows = mixed(kit)
    poisoned = [
        replace(row, behaviour_logprobs=np.where(row.loss_mask, row.behaviour_logprobs, np.nan).astype(np.float32))
        for row in rows
    ]
    for form in FORMS:
        a, b = (gradients(trainer_of(kit, loss={"off_policy": form}), r) for r in (rows, poisoned))
        assert a[0].loss == b[0].loss
        assert all(torch.equal(a[1][name], b[1][name]) for name in a[1])


def test_several_optimizer_steps_anchor_demonstrations_at_the_policy_before_the_first(kit, monkeypatch):
    rows = [replace(row, replayed=True, recorded=False) for row in kit.make_rows(4, advantages=[1.0] * 4)]
    trainer = trainer_of(kit, {"epochs": 3, "learning_rate": 0.5})
    before = trainer.score(rows)
    seen = []
    real = learner.training.optimizer_step.loss_tokens

    def watch(part, logprobs, entropy, inputs, loss):
        seen.append(inputs.old_logprobs)
        return real(part, logprobs, entropy, inputs, loss)

    monkeypatch.setattr(learner.training.optimizer_step, "loss_tokens", watch)
    trainer.step(Batch(0, (), tuple(rows)), 0)
    assert len(seen) == 3
    for old in seen:
        np.testing.assert_allclose(old, before, atol=1e-6)


def test_unrecorded_tokens_are_in_no_ratio_statistic(kit):
    rows = mixed(kit)
    s = gradients(trainer_of(kit), rows)[0].statistics
    count = {kind: sum(r.n_sampled for i, r in enumerate(rows) if i % 4 == kind) for kind in range(4)}
    assert s.by_source["replay"].tokens == count[1] + count[2]
    assert s.by_source["replay"].ratio.count == len(s.by_source["replay"].ratios_S) == count[1]
    assert s.by_source["fresh"].ratio.count == count[0] + count[3]
    assert len(s.logprob_differences) == count[0] + count[1]
    assert s.off_share == pytest.approx(1 - count[0] / sum(count.values()))
    assert s.on_loss + s.off_loss == pytest.approx(s.all.loss, abs=1e-6)
    assert (len(s.staleness), len(s.replay_ages)) == (5, 2)
    assert set(s.entropy_by_trajectory) == {row.trajectory_index for row in rows}


def test_the_guard_scales_the_step_by_the_ess_of_all_microbatches(kit):
    rows = kit.make_rows(6)
    for tokens in (1, 1000):
        trainer = trainer_of(
            kit, {"tokens_per_microbatch": tokens}, replay={"ess_guard": {"enabled": True, "target": 0.9}}
        )
        report, _ = gradients(trainer, rows)
        ess = report.statistics.all.ratio.ess_ratio
        assert ess < 0.9
        assert report.guard_lr_factor == pytest.approx(math.sqrt(ess / 0.9), rel=1e-5)
        assert trainer.optimizer.param_groups[0]["lr"] == pytest.approx(1e-3 * report.guard_lr_factor)
        assert report.learning_rate == pytest.approx(1e-3 * report.guard_lr_factor)
    report, _ = gradients(trainer_of(kit), rows)
    assert (report.guard_lr_factor, report.learning_rate) == (1.0, 1e-3)


def test_a_replay_of_weight_zero_changes_no_gradient_but_the_denominator(kit):
    rows = kit.make_rows(4)
    with_zero = [*rows[:3], replace(rows[3], replayed=True, replay_weight=0.0)]
    _, came = gradients(trainer_of(kit), with_zero)
    _, alone = gradients(trainer_of(kit), rows[:3])
    share = sum(r.n_sampled for r in rows[:3]) / sum(r.n_sampled for r in rows)
    for name in came:
        torch.testing.assert_close(came[name], alone[name] * share, rtol=1e-4, atol=1e-6)
