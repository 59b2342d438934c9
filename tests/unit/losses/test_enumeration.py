"""Expected gradients of stale, mixed and replayed trajectories, by enumeration, against the true policy gradient."""

import math
from dataclasses import replace
from itertools import product

import numpy as np
import pytest
import torch

from benchmarks.replay_bias import CHOICES, SPREADS, Chain, measure
from learner.advantages.estimators import rloo
from learner.losses.base import PolicyLoss
from pipeline.config.advantages import AdvantageConfig

NAMED = {choice.name: choice for choice in CHOICES}
UNBIASED = [choice for choice in CHOICES if "no bound" in choice.name and not choice.successes]
CHAINS = pytest.mark.parametrize("length", [2, 5])


@CHAINS
@pytest.mark.parametrize("choice", CHOICES, ids=lambda choice: choice.name)
def test_trajectories_of_the_current_policy_have_the_true_gradient_under_every_choice(choice, length):
    chain = Chain.random(length, SPREADS["large"], 0)
    for replayed in (False, True):
        came = chain.p_pi_N @ chain.gradients(choice.rules, replayed=replayed, of_pi=True)
        np.testing.assert_allclose(came, chain.true_gradient(), rtol=1e-9, atol=1e-12)


@CHAINS
@pytest.mark.parametrize("spread", SPREADS.values(), ids=SPREADS)
@pytest.mark.parametrize("choice", UNBIASED, ids=lambda choice: choice.name)
def test_whole_sequence_weights_are_unbiased_for_stale_mixed_and_replayed_trajectories(choice, spread, length):
    assert len(UNBIASED) == 3
    for seed in range(3):
        assert measure(Chain.random(length, spread, seed), choice).error < 1e-9


@CHAINS
@pytest.mark.parametrize("spread", SPREADS.values(), ids=SPREADS)
@pytest.mark.parametrize("name", ["replayed: sequence, max 2", "replayed: geometric, max 2", "replayed: soft"])
def test_a_correction_scales_the_gradient_of_each_trajectory_by_its_kernel(name, spread, length):
    chain, rules = Chain.random(length, spread, 1), NAMED[name].rules
    w = chain.p_pi_N / chain.p_mu_N
    kernel = {
        "sequence": np.minimum(w, 2.0),
        "geometric": np.minimum(w ** (1 / length), 2.0),
        "soft": np.where(chain.advantages_N >= 0, w**2 * np.exp(3 * (1 - w)), w**3 * np.exp(2 * (1 - w))),
    }[rules.replay_correction.name]
    came = chain.gradients(rules, replayed=True, of_pi=False)
    expected = (kernel * chain.advantages_N)[:, None] * chain.jacobian_NTP.sum(1)
    np.testing.assert_allclose(came, expected, rtol=1e-9, atol=1e-12)


def test_successes_alone_with_whole_sequence_weights_have_the_direction_of_the_true_gradient():
    for seed in range(3):
        chain = Chain.random(5, SPREADS["large"], seed)
        assert measure(chain, NAMED["successes: sequence, no bound"]).cosine == pytest.approx(1)
        assert measure(chain, NAMED["successes: token, default clip"]).cosine < 0.98


def test_token_weights_can_point_away_from_the_true_gradient_where_truncated_sequence_weights_do_not():
    token, sequence = NAMED["replayed: token, default clip"], NAMED["replayed: sequence, max 2"]
    found = [
        [measure(Chain.random(8, SPREADS["large"], seed), c).cosine for c in (token, sequence)] for seed in range(10)
    ]
    assert min(cosines[0] for cosines in found) < 0 < 0.5 < min(cosines[1] for cosines in found)
    assert all(of_token < of_sequence for of_token, of_sequence in found)


def test_bias_grows_with_the_ratios_and_truncation_buys_less_noise_with_it():
    for name in ("replayed: token, default clip", "replayed: sequence, max 2", "replayed: soft"):
        errors = [[measure(Chain.random(8, s, i), NAMED[name]).error for i in range(3)] for s in SPREADS.values()]
        small, large = np.mean(errors, axis=1)
        assert 0 < small < large
    whole, cut = (NAMED[f"replayed: sequence, {bound}"] for bound in ("no bound", "max 2"))
    for seed in range(3):
        chain = Chain.random(8, SPREADS["large"], seed)
        assert measure(chain, cut).noise < measure(chain, whole).noise


def test_the_bias_of_a_mixture_is_that_of_its_replayed_share():
    chain = Chain.random(5, SPREADS["large"], 2)
    for share in (0.25, 0.5):
        for name in ("replayed: token, default clip", "replayed: soft"):
            mixed = measure(chain, replace(NAMED[name], fresh_share=share)).error
            assert mixed == pytest.approx((1 - share) * measure(chain, NAMED[name]).error)


@pytest.mark.parametrize("n", [2, 3])
def test_advantages_within_a_group_give_the_true_gradient_in_expectation_over_all_groups(n):
    config = AdvantageConfig.model_validate({"estimator": "rloo"})
    chain = Chain.random(3, SPREADS["large"], 0)
    chain.advantages_N = np.ones(len(chain.p_pi_N))
    gradients_NP = chain.gradients(NAMED["stale: token, no clip"].rules, replayed=False, of_pi=True)
    came = np.zeros(gradients_NP.shape[1])
    for group in product(range(len(chain.p_pi_N)), repeat=n):
        members = list(group)
        advantages = rloo(chain.rewards_N.numpy()[members], config)
        came += chain.p_pi_N[members].prod() * advantages @ gradients_NP[members] / n
    np.testing.assert_allclose(came, chain.true_gradient(), rtol=1e-9, atol=1e-12)


def chain_of(pi, mu, rewarded):
    """Probabilities of token 1: first, after 0, after 1."""
    logits = [np.log([[p[0], p[0]], p[1:]]) - np.log1p(-np.array([[p[0], p[0]], p[1:]])) for p in (pi, mu)]
    return Chain(*logits, rewarded)


@pytest.mark.parametrize(
    ("mu", "largest", "cosine"), [((0.4, 0.4, 0.2), 1.375, 0.827), ((0.25, 0.75, 0.6), 2.8, -0.65)]
)
def test_on_a_two_token_chain_token_weights_turn_the_gradient_and_sequence_weights_do_not(mu, largest, cosine):
    """The only success is the sequence 1, 0. Probabilities of a token are off by a factor of 1.4 and of 2.8 at most."""
    chain = chain_of((0.55, 0.3, 0.15), mu, [2])
    assert chain.largest_ratio == pytest.approx(largest)
    assert measure(chain, NAMED["replayed: token, default clip"]).cosine == pytest.approx(cosine, abs=0.002)
    assert measure(chain, NAMED["replayed: sequence, no bound"]).cosine == pytest.approx(1)
    assert measure(chain, NAMED["replayed: sequence, max 2"]).cosine > 0.9


def group_gradients(chain, rules, n, *, replayed=True):
    """All groups of n trajectories whose rewards differ, with their own advantages, reward minus mean of the group:
    gradients ``[G, P]``, probabilities under μ (not ``replayed``: under π) and advantages ``[G, n]``."""
    slopes = {}
    for sign in (1.0, -1.0):
        chain.advantages_N = np.full(len(chain.rewards_N), sign)
        slopes[sign] = chain.gradients(rules, replayed=replayed, of_pi=not replayed)
    rewards, p_N, found = chain.rewards_N.numpy(), chain.p_mu_N if replayed else chain.p_pi_N, []
    for group in map(list, product(range(len(rewards)), repeat=n)):
        advantages = rewards[group] - rewards[group].mean()
        if advantages.any():
            total = sum(abs(a) * slopes[math.copysign(1.0, a)][i] for i, a in zip(group, advantages, strict=True))
            found.append((total / n, p_N[group].prod(), advantages))
    return tuple(map(np.array, zip(*found, strict=True)))


def whole_groups(chain, rules, n, chosen=lambda advantages: 1.0):
    """Expected gradient of a stored group of n trajectories of μ. ``chosen``: factor on the probability of a group."""
    gradients, p, advantages = group_gradients(chain, rules, n)
    return p * np.array([chosen(each) for each in advantages]) @ gradients


@pytest.mark.parametrize("n", [2, 3])
@pytest.mark.parametrize("length", [2, 3])
@pytest.mark.parametrize("spread", SPREADS.values(), ids=SPREADS)
def test_whole_groups_with_sequence_weights_have_the_true_gradient_but_for_their_own_share_in_the_mean(
    spread, length, n
):
    """A group's mean holds the trajectory's own reward: the expectation is ``1 - 1/n`` of the true gradient, as for
    fresh groups. Groups without spread have advantages of 0, so it does not matter that they are not stored."""
    for seed in range(2):
        chain = Chain.random(length, spread, seed)
        came = whole_groups(chain, NAMED["replayed: sequence, no bound"].rules, n)
        np.testing.assert_allclose(came, (1 - 1 / n) * chain.true_gradient(), rtol=1e-9, atol=1e-12)


def cosine(a, b):
    return float(a @ b / np.linalg.norm(a) / np.linalg.norm(b))


@pytest.mark.parametrize("spread", SPREADS.values(), ids=SPREADS)
def test_groups_drawn_by_their_spread_keep_the_direction_for_rewards_of_0_and_1(spread):
    """``select: priority`` makes the step longer or shorter and does not turn it."""
    rules = NAMED["replayed: sequence, no bound"].rules
    for seed in range(3):
        chain = Chain.random(2, spread, seed)
        came = whole_groups(chain, rules, 3, lambda advantages: float(np.abs(advantages).sum()))
        assert cosine(came, chain.true_gradient()) == pytest.approx(1)


def test_whole_groups_with_token_weights_are_biased_more_where_ratios_are_large():
    rules, errors = NAMED["replayed: token, default clip"].rules, {}
    for size, spread in SPREADS.items():
        chains = [Chain.random(3, spread, seed) for seed in range(3)]
        errors[size] = [1 - cosine(whole_groups(chain, rules, 2), chain.true_gradient()) for chain in chains]
    assert 0 < np.mean(errors["small"]) < np.mean(errors["large"])


def gated_by_surprise(tokens, rules):
    """The delightful policy gradient (arXiv:2603.14608) with a ratio: ``2 sigmoid(A · -log π)`` without gradient, times
    ``-A ρ``. On-policy it is twice the published gradient."""
    gate = 2 * torch.sigmoid(-tokens.advantages * tokens.logprobs.detach())
    return -gate * tokens.advantages * tokens.log_ratio.exp()


@pytest.mark.parametrize(
    ("length", "size", "fresh", "replayed", "ungated"),
    [
        (2, "small", (1.00, 0.99), (1.00, 0.98), (1.00, 0.98)),
        (2, "large", (1.00, 0.99), (0.99, 0.83), (0.99, 0.83)),
        (8, "small", (0.94, 0.84), (0.90, 0.77), (0.98, 0.90)),
        (8, "large", (0.94, 0.84), (0.72, 0.15), (0.76, 0.12)),
    ],
)
def test_a_gate_by_advantage_and_surprise_turns_even_the_gradient_of_fresh_trajectories(
    length, size, fresh, replayed, ungated
):
    """Median and worst cosine over 20 chains. ``ungated``: of replayed trajectories."""
    plain = NAMED["replayed: token, no clip"].rules
    gated = replace(plain, policy=PolicyLoss(gated_by_surprise))
    found = {"fresh": [], "replayed": [], "ungated": []}
    for seed in range(20):
        chain = Chain.random(length, SPREADS[size], seed)
        true, came = chain.true_gradient(), {}
        came["fresh"] = chain.p_pi_N @ chain.gradients(gated, replayed=False, of_pi=True)
        came["replayed"] = chain.p_mu_N @ chain.gradients(gated, replayed=True, of_pi=False)
        came["ungated"] = chain.p_mu_N @ chain.gradients(plain, replayed=True, of_pi=False)
        for name, gradient in came.items():
            found[name].append(cosine(gradient, true))
    for name, expected in {"fresh": fresh, "replayed": replayed, "ungated": ungated}.items():
        assert (np.median(found[name]), min(found[name])) == pytest.approx(expected, abs=0.0051), name


@pytest.mark.parametrize(
    ("size", "name", "ungated", "gated", "closed"),
    [
        ("small", "replayed: token, default clip", 0.13, 0.39, 0.33),
        ("large", "replayed: token, default clip", 0.47, 0.62, 0.24),
        ("small", "replayed: sequence, no bound", 0.00, 0.39, 0.36),
        ("large", "replayed: sequence, no bound", 0.00, 0.74, 0.43),
    ],
)
def test_a_gate_by_the_norm_of_a_replayed_groups_gradient_adds_bias(size, name, ungated, gated, closed):
    """Dynamic Gradient Gating (arXiv:2605.19425) for each replayed group: closed where its norm is above the mean of
    fresh groups by more than half of their standard deviation. The logits of a chain are its last layer. Medians over
    10 chains of the distance to the true gradient over its length, and the mean share of closed groups."""
    rules, n, found = NAMED[name].rules, 2, []
    for seed in range(10):
        chain = Chain.random(3, SPREADS[size], seed)
        true = (1 - 1 / n) * chain.true_gradient()
        fresh, p, _ = group_gradients(chain, rules, n, replayed=False)
        norms = np.linalg.norm(fresh, axis=1)
        mean = p @ norms / p.sum()
        highest = mean + 0.5 * math.sqrt(p @ (norms - mean) ** 2 / p.sum())
        replayed, p, _ = group_gradients(chain, rules, n)
        is_open = np.linalg.norm(replayed, axis=1) <= highest
        errors = [np.linalg.norm(came @ replayed - true) / np.linalg.norm(true) for came in (p, p * is_open)]
        found.append((*errors, 1 - p @ is_open / p.sum()))
    came = *np.median(found, axis=0)[:2], np.mean(found, axis=0)[2]
    assert came == pytest.approx((ungated, gated, closed), abs=0.0051)
