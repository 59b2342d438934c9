"""Expected gradients of stale, mixed and replayed trajectories, by enumeration, against the true policy gradient."""

from dataclasses import replace

import numpy as np
import pytest

from benchmarks.replay_bias import CHOICES, SPREADS, Chain, measure

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
