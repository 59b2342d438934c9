"""Every estimator against a slow reference, on random updates and in all modes of rewards."""

from dataclasses import replace
from math import comb, sqrt

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, note, settings

from learner.advantages.estimate import ESTIMATORS, OPTIONS, estimate, needed_scores
from pipeline.config.advantages import AdvantageConfig
from tests.unit.advantages.cases import config_of, epsilon, make_scored, updates
from tests.unit.advantages.slow import SLOW, gae_raw

POSITIVE = st.floats(0, 3, allow_nan=False, width=32)
BINARY = st.sampled_from([0.0, 1.0])
configs = st.fixed_dictionaries(
    {
        "rewards": st.sampled_from(["outcome", "turns", "both"]),
        "gamma": st.sampled_from([1.0, 0.9]),
        "turn_gamma": st.sampled_from([1.0, 0.8]),
        "gae_lambda": st.sampled_from([1.0, 0.95, 0.0]),
        "whiten": st.booleans(),
        "normalize_std": st.booleans(),
        "solved_weight": st.sampled_from([0.0, 0.5]),
        "reward_weight": st.sampled_from([0.0, 0.5]),
    }
)


def check(name, scored, config):
    note(name)
    with epsilon(1e-3):  # so that groups whose rewards differ by rounding only do not decide the test
        estimates, slow = estimate(scored, config), SLOW[name](scored, config)
    for fast, part in zip(estimates.advantages, slow, strict=True):
        np.testing.assert_allclose(fast, part, rtol=1e-7, atol=1e-8)


def test_registry_and_run_file_know_the_same_names():
    assert set(ESTIMATORS) == set(OPTIONS) - {"own"} == set(SLOW)


@settings(max_examples=40, deadline=None)
@given(scored=updates(), options=configs)
def test_estimator_equals_its_slow_reference(scored, options):
    for name in ESTIMATORS:
        if name not in ("maxrl", "pass_at_k"):
            check(name, scored, config_of(estimator=name, **options))


@settings(max_examples=40, deadline=None)
@given(scored=updates(rewards=POSITIVE))
def test_maxrl_equals_its_slow_reference(scored):
    config = config_of(estimator="maxrl")
    check("maxrl", scored, config)


@settings(max_examples=40, deadline=None)
@given(scored=updates(size_min=3), k=st.integers(1, 3), options=configs)
def test_pass_at_k_equals_the_enumeration_of_all_sets(scored, k, options):
    config = config_of(estimator="pass_at_k", k=k, **options)
    check("pass_at_k", scored, config)


@settings(max_examples=30, deadline=None)
@given(scored=updates(), options=configs, data=st.data())
def test_penalties_are_part_of_the_reward(scored, options, data):
    penalty = st.floats(-1, 1, width=32)
    scored = [
        replace(p, penalties=np.asarray(data.draw(st.lists(penalty, min_size=p.n_tokens, max_size=p.n_tokens)), float))
        for p in scored
    ]
    for name in ("grpo", "rloo", "reinforce_pp", "gae"):
        check(name, scored, config_of(estimator=name, **options))


@settings(max_examples=25, deadline=None)
@given(scored=updates(), options=configs)
def test_returns_of_gae_are_unwhitened_advantages_plus_values(scored, options):
    config = config_of(estimator="gae", **options)
    estimates = estimate(scored, config)
    for p, returns, raw in zip(scored, estimates.returns, gae_raw(scored, config), strict=True):
        np.testing.assert_allclose(returns, np.asarray(raw) + p.values, rtol=1e-9, atol=1e-9)


def test_gae_bridges_what_lies_between_sampled_tokens():
    """Two turns with any context between them: the value after the last token of the first is that before the first
    token of the second, with one discount."""
    config = config_of(estimator="gae", gamma=0.5, gae_lambda=0.0, whiten=False)
    p = make_scored(1.0, (0, 0, 3), values=[0.1, 0.2, 0.4])
    (advantages,) = estimate([p], config).advantages
    np.testing.assert_allclose(advantages, [0.5 * 0.2 - 0.1, 0.5 * 0.4 - 0.2, 1.0 - 0.4])


def test_gae_with_lambda_one_is_return_minus_value():
    rng = np.random.default_rng(0)
    p = make_scored(2.0, (0,) * 9, values=rng.normal(size=9))
    (advantages,) = estimate([p], config_of(estimator="gae", whiten=False)).advantages
    np.testing.assert_allclose(advantages, 2.0 - p.values, atol=1e-12)


def test_a_perfect_critic_leaves_no_advantage():
    p = make_scored(1.0, (0, 0, 1, 1), values=[0.125, 0.25, 0.5, 1.0])
    config = config_of(estimator="gae", gamma=0.5, gae_lambda=0.7, whiten=False)
    assert np.abs(estimate([p], config).advantages[0]).max() < 1e-12


@pytest.mark.parametrize("n,c,k", [(8, 1, 4), (8, 5, 4), (6, 3, 2), (16, 2, 8), (4, 2, 1)])
def test_pass_at_k_of_binary_rewards_is_the_published_closed_form(n, c, k):
    """arXiv:2508.10751, equations 9 to 14."""
    wrong = n - c
    mean = 1 - comb(wrong, k) / comb(n, k)
    std = sqrt(mean * (1 - mean))
    right = (1 - mean) / std if std else 0.0
    failed = (1 - mean - comb(wrong - 1, k - 1) / comb(n - 1, k - 1)) / std if std else 0.0
    scored = [make_scored(float(i < c)) for i in range(n)]
    with epsilon(1e-12):
        advantages = estimate(scored, config_of(estimator="pass_at_k", k=k)).advantages
    np.testing.assert_allclose([a[0] for a in advantages], [right] * c + [failed] * wrong, atol=1e-9)


def test_pass_at_one_is_grpo():
    rng = np.random.default_rng(3)
    scored = [make_scored(r) for r in rng.normal(size=7)]
    one = estimate(scored, config_of(estimator="pass_at_k", k=1)).advantages
    np.testing.assert_allclose(one, estimate(scored, AdvantageConfig()).advantages, rtol=1e-9)


@given(st.lists(BINARY, min_size=2, max_size=9))
def test_gpg_scales_by_the_groups_that_teach(rewards):
    idle = [make_scored(1.0, group=1), make_scored(1.0, group=1)]
    scored = [make_scored(r) for r in rewards]
    advantages = [a[0] for a in estimate(scored + idle, config_of(estimator="gpg")).advantages]
    alpha = (len(rewards) + 2) / len(rewards) if len(set(rewards)) > 1 else 1.0
    np.testing.assert_allclose(advantages, [*(alpha * (r - np.mean(rewards)) for r in rewards), 0.0, 0.0], atol=1e-12)


def test_each_estimator_says_which_passes_it_needs():
    assert needed_scores(config_of(estimator="gae")) == {"values"}
    assert needed_scores(config_of(estimator="cpo")) == {"logprobs", "entropies", "hinted"}
    assert needed_scores(config_of(estimator="distill")) == {"logprobs", "reference"}
    assert needed_scores(config_of(estimator="self_distill")) == {"logprobs", "hinted"}
    assert needed_scores(config_of(estimator="grpo")) == frozenset()
