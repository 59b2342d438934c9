"""Identities of estimators: gradients of a bandit by enumeration, invariances."""

import itertools
from dataclasses import replace

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, note, settings

from learner.advantages.estimate import ESTIMATORS
from tests.unit.advantages.cases import advantages_of, epsilon, make_scored, options_of, updates

QUARTERS = st.integers(0, 12).map(lambda i: i / 4)
"""Rewards whose sums are exact, so that equal groups are equal."""


# A bandit with three answers of known probability: all groups of G answers, with their probability.

LOGITS = np.array([0.3, -0.5, 0.1])
REWARDS = np.array([1.0, 0.0, 2.0])
PROBABILITIES = np.exp(LOGITS) / np.exp(LOGITS).sum()
SCORES = np.eye(3) - PROBABILITIES
"""Row a: gradient of log π(a) by the logits."""


def expected_gradient(size, rewards=REWARDS, greedy=None, **options):
    """E[1/G Σ A_i ∇ log π(a_i)] over all groups of ``size``."""
    out = np.zeros(3)
    for answers in itertools.product(range(3), repeat=size):
        baseline = None if greedy is None else rewards[greedy]
        scored = [make_scored(rewards[a], (0,), baseline=baseline) for a in answers]
        advantages = [float(a[0]) for a in advantages_of(scored, **options)]
        out += np.prod(PROBABILITIES[list(answers)]) * np.mean(
            [a * SCORES[i] for a, i in zip(advantages, answers, strict=True)], axis=0
        )
    return out


def gradient_of_reward(rewards=REWARDS):
    return (PROBABILITIES * rewards) @ SCORES


@pytest.mark.parametrize("size", [2, 3, 4])
def test_rloo_meets_the_gradient_of_the_expected_reward_by_enumeration(size):
    np.testing.assert_allclose(expected_gradient(size, estimator="rloo"), gradient_of_reward(), atol=1e-12)


@pytest.mark.parametrize("size", [2, 3, 4])
def test_group_mean_shrinks_the_gradient_by_the_own_share_of_the_baseline(size):
    """Dr. GRPO: the mean holds the answer itself, so the gradient is (G - 1) / G of the true one."""
    gradient = expected_gradient(size, estimator="grpo", normalize_std=False)
    np.testing.assert_allclose(gradient, gradient_of_reward() * (size - 1) / size, atol=1e-12)


@pytest.mark.parametrize("size", [1, 2])
def test_remax_meets_the_gradient_even_with_a_group_of_one(size):
    np.testing.assert_allclose(expected_gradient(size, greedy=0, estimator="remax"), gradient_of_reward(), atol=1e-12)


@pytest.mark.parametrize("size", [2, 3, 4, 5])
def test_maxrl_is_the_gradient_of_log_success_to_the_order_of_the_group_less_one(size):
    """log p = -Σ (1 - p)^k / k, so ∇ log p = Σ_{k >= 1} (1 - p)^(k - 1) ∇ p (arXiv:2602.02710, section 3)."""
    right = np.array([1.0, 0.0, 0.0])
    truncated = sum((1 - PROBABILITIES[0]) ** (k - 1) for k in range(1, size)) * gradient_of_reward(right)
    with epsilon(1e-12):
        gradient = expected_gradient(size, right, estimator="maxrl")
    np.testing.assert_allclose(gradient, truncated, atol=1e-9)


@pytest.mark.parametrize("size,k", [(3, 2), (4, 2), (4, 3)])
def test_pass_at_k_points_along_the_gradient_of_pass_at_k(size, k):
    """Up to the positive scale of its own normalisation: with binary rewards both are multiples of ∇ p."""
    right = np.array([1.0, 0.0, 0.0])
    gradient = expected_gradient(size, right, estimator="pass_at_k", k=k)
    true = k * (1 - PROBABILITIES[0]) ** (k - 1) * gradient_of_reward(right)
    cosine = gradient @ true / (np.linalg.norm(gradient) * np.linalg.norm(true))
    assert cosine == pytest.approx(1.0, abs=1e-9)


def test_opo_has_the_least_variance_of_all_baselines_where_lengths_are_the_squared_gradient():
    rng = np.random.default_rng(0)
    rewards, lengths = rng.normal(size=6), rng.integers(1, 20, 6)
    scored = [make_scored(r, (0,) * n) for r, n in zip(rewards, lengths, strict=True)]
    baseline = rewards[0] - advantages_of(scored, estimator="opo")[0][0]
    variance = lambda b: float((lengths * (rewards - b) ** 2).sum())  # noqa: E731
    assert all(variance(baseline) <= variance(baseline + d) for d in (-0.3, -1e-3, 1e-3, 0.3))


# Invariances


@settings(max_examples=40, deadline=None)
@given(scored=updates(rewards=QUARTERS, size_min=2), data=st.data())
def test_order_of_trajectories_and_numbers_of_groups_do_not_matter(scored, data):
    order = data.draw(st.permutations(range(len(scored))))
    numbers = data.draw(st.permutations(range(10)))
    moved = [replace(scored[i], group=numbers[scored[i].group]) for i in order]
    for name in ESTIMATORS:
        note(name)
        a, b = advantages_of(scored, **options_of(name)), advantages_of(moved, **options_of(name))
        for place, i in enumerate(order):
            np.testing.assert_allclose(b[place], a[i], rtol=1e-9, atol=1e-9)


@settings(max_examples=40, deadline=None)
@given(scored=updates(rewards=QUARTERS, size_min=2), constant=st.sampled_from([-8.0, 0.5, 16.0]))
def test_a_constant_added_to_all_rewards_changes_nothing(scored, constant):
    moved = [replace(p, reward=p.reward + constant) for p in scored]
    for name in ("grpo", "rloo", "opo", "gpg", "pass_at_k", "reinforce_pp_baseline", "reinforce_pp"):
        note(name)
        for x, y in zip(
            advantages_of(scored, **options_of(name)), advantages_of(moved, **options_of(name)), strict=True
        ):
            np.testing.assert_allclose(x, y, rtol=1e-7, atol=1e-7)


@settings(max_examples=40, deadline=None)
@given(scored=updates(rewards=QUARTERS, size_min=2), scale=st.sampled_from([0.25, 8.0]))
def test_the_scale_of_rewards_does_not_matter_to_normalised_estimators(scored, scale):
    scaled = [replace(p, reward=p.reward * scale) for p in scored]
    for name in ("grpo", "maxrl", "pass_at_k", "reinforce_pp", "reinforce_pp_baseline"):
        note(name)
        with epsilon(1e-9):
            small, large = (advantages_of(update, **options_of(name)) for update in (scored, scaled))
        for x, y in zip(small, large, strict=True):
            np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-5)


@settings(max_examples=40, deadline=None)
@given(scored=updates(rewards=QUARTERS, groups_max=1, size_min=2))
def test_advantages_of_a_group_sum_to_zero(scored):
    for name in ("grpo", "rloo", "gpg", "maxrl"):
        note(name)
        assert sum(a[0] for a in advantages_of(scored, **options_of(name))) == pytest.approx(0, abs=1e-6)


@settings(max_examples=40, deadline=None)
@given(scored=updates(rewards=QUARTERS))
def test_whitened_advantages_have_mean_zero_and_deviation_one_over_tokens(scored):
    for name in ("gae", "reinforce_pp", "reinforce_pp_baseline"):
        note(name)
        together = np.concatenate(advantages_of(scored, **options_of(name)))
        spread = np.concatenate(advantages_of(scored, **options_of(name), whiten=False)).std()
        assert together.mean() == pytest.approx(0, abs=1e-9)
        assert together.std() == pytest.approx(1, abs=1e-5) if spread > 1e-3 else together.std() < 1 + 1e-5


@settings(max_examples=40, deadline=None)
@given(scored=updates(rewards=QUARTERS, size_min=2))
def test_replayed_rows_are_estimated_like_fresh_ones(scored):
    fresh = [replace(p, replayed=False) for p in scored]
    for name in ESTIMATORS:
        note(name)
        for x, y in zip(
            advantages_of(scored, **options_of(name)), advantages_of(fresh, **options_of(name)), strict=True
        ):
            assert np.array_equal(x, y)
