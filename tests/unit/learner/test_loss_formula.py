import math
from dataclasses import replace

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given, settings

from learner.losses.base import ClipRange, LossRules
from learner.losses.loss import LossTokens, policy_loss
from learner.losses.policy_losses import loss_rules
from learner.observability.statistics import LOG_RATIO_MAX
from pipeline.config.losses import ImportanceConfig, LossConfig


def rules(dual_clip=3.0, off_policy="clip", **given) -> LossRules:
    form = {"name": off_policy, "dual_clip": dual_clip} if off_policy == "second_moment" else off_policy
    loss = LossConfig(policy={"name": "ppo", "dual_clip": dual_clip}, off_policy=form)
    return replace(loss_rules(loss, ImportanceConfig()), **given)


def tokens(logprobs, behaviour, advantages, *, proximal=None, mask=None, replay=None, weights=None, entropy=None):
    n = len(logprobs)
    f = torch.float64
    return LossTokens(
        logprobs=torch.tensor(logprobs, dtype=f, requires_grad=True),
        entropy=torch.zeros(n, dtype=f) if entropy is None else torch.tensor(entropy, dtype=f),
        behaviour=torch.tensor(behaviour, dtype=f),
        proximal=None if proximal is None else torch.tensor(proximal, dtype=f),
        advantages=torch.tensor(advantages, dtype=f),
        weights=torch.full((n,), 1.0 / n, dtype=f) if weights is None else torch.tensor(weights, dtype=f),
        loss_mask=torch.ones(n, dtype=torch.bool) if mask is None else torch.tensor(mask),
        replay_mask=torch.zeros(n, dtype=torch.bool) if replay is None else torch.tensor(replay),
        off_policy=torch.zeros(n, dtype=torch.bool) if replay is None else torch.tensor(replay),
    )


def slow_loss(t: LossTokens, r: LossRules) -> float:
    """The formula of :mod:`learner.losses.loss`, a token at a time in Python floats."""
    total = 0.0
    for i in range(len(t.logprobs)):
        if not t.loss_mask[i]:
            continue
        new, mu, a = t.logprobs[i].item(), float(t.behaviour[i]), float(t.advantages[i])
        old, w = mu, 1.0
        if r.decoupled and not t.replay_mask[i]:
            old = float(t.proximal[i]) if t.proximal is not None else new
            w = min(math.exp(max(-LOG_RATIO_MAX, min(LOG_RATIO_MAX, old - mu))), r.weight_max)
        ratio = math.exp(max(-LOG_RATIO_MAX, min(LOG_RATIO_MAX, new - old)))
        clip = r.off if t.off_policy[i] else r.fresh
        bounded = min(max(ratio, 1 - clip.low), 1 + clip.high)
        loss = max(-a * ratio, -a * bounded)
        if a < 0 and r.options.dual_clip is not None:
            loss = min(loss, -a * r.options.dual_clip)
        total += float(t.weights[i]) * w * loss
    return total


finite = st.floats(-8, 0, allow_nan=False, width=32)
token = st.tuples(finite, finite, finite, st.floats(-3, 3, width=32), st.booleans(), st.booleans())


@settings(max_examples=150, deadline=None)
@given(st.lists(token, min_size=1, max_size=8), st.booleans(), st.sampled_from([None, 1.5, 3.0]))
def test_loss_equals_the_slow_float64_reference(rows, decoupled, dual_clip):
    new, mu, old, advantage, mask, replay = map(list, zip(*rows, strict=True))
    t = tokens(new, mu, advantage, proximal=old, mask=mask, replay=replay)
    r = rules(decoupled=decoupled, dual_clip=dual_clip)
    assert policy_loss(t, r).loss.item() == pytest.approx(slow_loss(t, r), rel=1e-9, abs=1e-12)


@settings(max_examples=60, deadline=None)
@given(st.lists(token, min_size=1, max_size=6), st.sampled_from([math.nan, math.inf, -math.inf]))
def test_nonfinite_values_at_masked_positions_change_neither_loss_nor_gradient(rows, poison):
    new, mu, old, advantage, _, replay = map(list, zip(*rows, strict=True))
    n, r = len(new), rules(decoupled=True, entropy_bonus=0.1)
    entropy = [0.5] * n
    clean = tokens(new, mu, advantage, proximal=old, replay=replay, weights=[0.1] * n, entropy=entropy)
    dirty = tokens(
        [*new, poison],
        [*mu, poison],
        [*advantage, poison],
        proximal=[*old, poison],
        replay=[*replay, True],
        weights=[0.1] * (n + 1),
        entropy=[*entropy, poison],
        mask=[True] * n + [False],
    )
    a, b = policy_loss(clean, r).loss, policy_loss(dirty, r).loss
    assert a.item() == b.item()
    (grad_a,) = torch.autograd.grad(a, clean.logprobs)
    (grad_b,) = torch.autograd.grad(b, dirty.logprobs)
    assert torch.equal(grad_a, grad_b[:n])
    assert float(grad_b[n]) == 0.0


def test_replay_recorded_under_current_weights_has_ratio_one_and_the_plain_gradient():
    rng = np.random.default_rng(0)
    logprobs, advantages = list(-rng.uniform(0.1, 4, 20)), list(rng.normal(size=20))
    plain = tokens(logprobs, logprobs, advantages)
    replayed = tokens(logprobs, logprobs, advantages, replay=[True] * 20)
    losses = [policy_loss(t, rules()).loss for t in (plain, replayed)]
    assert losses[0].item() == losses[1].item() == pytest.approx(-np.mean(advantages))
    grads = [torch.autograd.grad(loss, t.logprobs)[0] for loss, t in zip(losses, (plain, replayed), strict=True)]
    assert torch.equal(*grads)
    torch.testing.assert_close(grads[0], -torch.tensor(advantages, dtype=torch.float64) / 20)


def test_without_replay_the_loss_is_plain_clipped_ppo_bit_for_bit():
    rng = np.random.default_rng(1)
    t = tokens(list(-rng.uniform(0.1, 4, 50)), list(-rng.uniform(0.1, 4, 50)), list(rng.normal(size=50)))
    ratio = (t.logprobs - t.behaviour).exp()
    plain = torch.maximum(-t.advantages * ratio, -t.advantages * ratio.clamp(0.8, 1.28))
    plain = torch.where(t.advantages < 0, torch.minimum(plain, -t.advantages * 3.0), plain)
    assert torch.equal(policy_loss(t, rules()).loss, (t.weights * plain).sum())


def test_proximal_anchor_with_current_policy_is_truncated_reinforce():
    t = tokens([-1.0, -2.0, -0.5], [-1.0, -4.0, -0.2], [1.0, 1.0, -1.0])
    loss = policy_loss(t, rules(decoupled=True)).loss
    (grad,) = torch.autograd.grad(loss, t.logprobs)
    w = [1.0, 2.0, math.exp(-0.3)]
    torch.testing.assert_close(grad, torch.tensor([-w[0] / 3, -w[1] / 3, w[2] / 3], dtype=torch.float64))


def test_extreme_log_ratios_stay_finite():
    t = tokens([0.0, -400.0, -1.0], [-400.0, 0.0, -math.inf], [1.0, -1.0, -1.0])
    terms = policy_loss(t, rules(dual_clip=None))
    (grad,) = torch.autograd.grad(terms.loss, t.logprobs)
    assert torch.isfinite(terms.loss)
    assert torch.isfinite(grad).all()


@pytest.mark.parametrize(
    ("ratio", "advantage", "low", "high"),
    [
        (0.5, -1.0, True, False),
        (0.5, 1.0, False, False),
        (1.5, 1.0, False, True),
        (1.5, -1.0, False, False),
        (1.0, 1.0, False, False),
    ],
)
def test_clipped_tokens_are_those_whose_gradient_is_zero(ratio, advantage, low, high):
    t = tokens([math.log(ratio) - 1], [-1.0], [advantage])
    terms = policy_loss(t, rules())
    (grad,) = torch.autograd.grad(terms.loss, t.logprobs)
    assert (bool(terms.clipped_low), bool(terms.clipped_high)) == (low, high)
    assert (float(grad) == 0.0) == (low or high)


def test_off_policy_clip_is_wider_and_only_for_replayed_tokens():
    new, mu = [math.log(1.5) - 1] * 2, [-1.0] * 2
    t = tokens(new, mu, [1.0, 1.0], replay=[False, True])
    (grad,) = torch.autograd.grad(policy_loss(t, rules()).loss, t.logprobs)
    assert float(grad[0]) == 0.0
    assert float(grad[1]) == pytest.approx(-0.75)


def test_rules_come_from_the_run_file():
    r = loss_rules(
        LossConfig(policy={"clip_low": 0.1, "dual_clip": None}), ImportanceConfig(anchor="proximal", weight_max=3)
    )
    assert (r.fresh, r.off, r.options.dual_clip, r.decoupled, r.weight_max) == (
        ClipRange(0.1, 0.28),
        ClipRange(0.1, 1.0),
        None,
        True,
        3,
    )


def test_full_importance_sampling_gives_the_true_gradient_of_a_bandit():
    """Summed over all actions of μ, the unclipped loss has exactly the gradient of -E_π[reward]."""
    theta = torch.tensor([0.3, -0.2, 0.7, 0.0], dtype=torch.float64, requires_grad=True)
    mu = torch.tensor([0.1, 0.2, 0.3, 0.4], dtype=torch.float64)
    reward = torch.tensor([1.0, -2.0, 0.5, 3.0], dtype=torch.float64)
    log_pi = torch.log_softmax(theta, dim=0)
    t = LossTokens(
        logprobs=log_pi,
        entropy=torch.zeros(4, dtype=torch.float64),
        behaviour=mu.log(),
        proximal=None,
        advantages=reward,
        weights=mu,
        loss_mask=torch.ones(4, dtype=torch.bool),
        replay_mask=torch.zeros(4, dtype=torch.bool),
        off_policy=torch.zeros(4, dtype=torch.bool),
    )
    unclipped = rules(fresh=ClipRange(1 - 1e-12, 1e12), dual_clip=None)
    (came,) = torch.autograd.grad(policy_loss(t, unclipped).loss, theta, retain_graph=True)
    (expected,) = torch.autograd.grad(-(log_pi.exp() * reward).sum(), theta)
    torch.testing.assert_close(came, expected, rtol=1e-10, atol=1e-12)
