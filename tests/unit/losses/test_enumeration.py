"""Expected gradients of stale, mixed and replayed trajectories, by enumeration, against the true policy gradient."""

import itertools
from dataclasses import replace

import numpy as np
import pytest

from benchmarks.replay_bias import CHOICES, SPREADS, Chain, measure
from learner.advantages.group import rloo
from pipeline.config.algorithm import AdvantageConfig

NAMED = {choice.name: choice for choice in CHOICES}
UNBIASED = [choice for choice in CHOICES if "no bound" in choice.name and not choice.successes]
CHAINS = pytest.mark.parametrize("length", [2, 5])


@CHAINS
@pytest.mark.parametrize("choice", CHOICES, ids=lambda choice: choice.name)
def test_trajectories_of_the_current_policy_have_the_true_gradient_under_every_choice(choice, length):
    chain = Chain(length, SPREADS["large"], 0)
    for replayed in (False, True):
        came = chain.p_pi_N @ chain.gradients(choice.rules, replayed=replayed, of_pi=True)
        np.testing.assert_allclose(came, chain.true_gradient(), rtol=1e-9, atol=1e-12)


@CHAINS
@pytest.mark.parametrize("spread", SPREADS.values(), ids=SPREADS)
@pytest.mark.parametrize("choice", UNBIASED, ids=lambda choice: choice.name)
def test_whole_sequence_weights_are_unbiased_for_stale_mixed_and_replayed_trajectories(choice, spread, length):
    assert len(UNBIASED) == 3
    for seed in range(3):
        assert measure(Chain(length, spread, seed), choice).error < 1e-9


@CHAINS
@pytest.mark.parametrize("spread", SPREADS.values(), ids=SPREADS)
@pytest.mark.parametrize("name", ["replayed: sequence, max 2", "replayed: geometric, max 2", "replayed: soft"])
def test_a_correction_scales_the_gradient_of_each_trajectory_by_its_kernel(name, spread, length):
    chain, rules = Chain(length, spread, 1), NAMED[name].rules
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
        chain = Chain(5, SPREADS["large"], seed)
        assert measure(chain, NAMED["successes: sequence, no bound"]).cosine == pytest.approx(1)
        assert measure(chain, NAMED["successes: token, default clip"]).cosine < 0.98


def test_token_weights_can_point_away_from_the_true_gradient_where_truncated_sequence_weights_do_not():
    token, sequence = NAMED["replayed: token, default clip"], NAMED["replayed: sequence, max 2"]
    found = [[measure(Chain(8, SPREADS["large"], seed), c).cosine for c in (token, sequence)] for seed in range(10)]
    assert min(cosines[0] for cosines in found) < 0 < 0.5 < min(cosines[1] for cosines in found)
    assert all(of_token < of_sequence for of_token, of_sequence in found)


def test_bias_grows_with_the_ratios_and_truncation_buys_less_noise_with_it():
    for name in ("replayed: token, default clip", "replayed: sequence, max 2", "replayed: soft"):
        errors = [[measure(Chain(8, s, i), NAMED[name]).error for i in range(3)] for s in SPREADS.values()]
        small, large = np.mean(errors, axis=1)
        assert 0 < small < large
    whole, cut = (NAMED[f"replayed: sequence, {bound}"] for bound in ("no bound", "max 2"))
    for seed in range(3):
        chain = Chain(8, SPREADS["large"], seed)
        assert measure(chain, cut).noise < measure(chain, whole).noise


def test_the_bias_of_a_mixture_is_that_of_its_replayed_share():
    chain = Chain(5, SPREADS["large"], 2)
    for share in (0.25, 0.5):
        for name in ("replayed: token, default clip", "replayed: soft"):
            mixed = measure(chain, replace(NAMED[name], fresh_share=share)).error
            assert mixed == pytest.approx((1 - share) * measure(chain, NAMED[name]).error)


RESTARTS = pytest.mark.parametrize(("length", "restart"), [(2, 1), (5, 2), (5, 4), (8, 3)])


def restarted(length: int, restart: int, spread: str, seed: int) -> Chain:
    """A chain that begins with the first tokens of a success, after which success is neither sure nor hopeless."""
    chains = (Chain(length, SPREADS[spread], number, restart) for number in itertools.count(100 * seed))
    return next(chain for chain in chains if 0 < chain.rewards_N.sum() < len(chain.rewards_N))


@RESTARTS
def test_a_restarted_rollout_has_the_true_gradient_of_success_after_the_stored_tokens_and_none_for_these(
    length, restart
):
    for seed in range(3):
        chain = restarted(length, restart, "large", seed)
        assert chain.sequences_NT.shape == (2 ** (length - restart), length - restart)
        assert chain.p_pi_N.sum() == pytest.approx(1), "probabilities are those after the stored tokens"
        true = chain.true_gradient()
        came = chain.p_pi_N @ chain.gradients(NAMED["stale: token, no clip"].rules, replayed=False, of_pi=True)
        np.testing.assert_allclose(came, true, rtol=1e-9, atol=1e-12)
        assert np.abs(true[2 * restart :]).max() > 0 and not came[: 2 * restart].any()


@RESTARTS
@pytest.mark.parametrize("spread", SPREADS)
def test_stale_restarted_rollouts_are_corrected_by_the_weights_of_what_follows_the_stored_tokens(
    length, restart, spread
):
    """The stored tokens are in no ratio: the same policy need not have sampled them."""
    for seed in range(3):
        chain = restarted(length, restart, spread, seed)
        assert measure(chain, NAMED["stale: sequence, no bound"]).error < 1e-9


@pytest.mark.parametrize("n", [2, 3])
def test_advantages_within_a_restarted_group_give_the_true_gradient_in_expectation_over_all_groups(n):
    config = AdvantageConfig.model_validate({"estimator": "rloo"})
    chain = restarted(5, 2, "large", 0)
    chain.advantages_N = np.ones(len(chain.p_pi_N))
    gradients_NP = chain.gradients(NAMED["stale: token, no clip"].rules, replayed=False, of_pi=True)
    came = np.zeros(gradients_NP.shape[1])
    for group in itertools.product(range(len(chain.p_pi_N)), repeat=n):
        members = list(group)
        advantages = rloo(chain.rewards_N.numpy()[members], config)
        came += chain.p_pi_N[members].prod() * advantages @ gradients_NP[members] / n
    np.testing.assert_allclose(came, chain.true_gradient(), rtol=1e-9, atol=1e-12)
