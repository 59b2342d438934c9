"""KL to a reference: estimators, and the reward's penalty."""

import math

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given

from learner.losses.kl import kl_penalty, kl_terms
from pipeline.errors import TrainingError

logits = st.lists(st.floats(-3, 3), min_size=2, max_size=6)


def policy(values):
    theta = torch.tensor(values, dtype=torch.float64, requires_grad=True)
    return theta, torch.log_softmax(theta, 0)


def true_kl(log_pi, log_ref):
    return (log_pi.exp() * (log_pi - log_ref)).sum()


@given(logits, st.integers(0, 5))
def test_k1_and_k3_are_unbiased_and_k3_is_never_negative(values, shift):
    theta, log_pi = policy(values)
    log_ref = torch.log_softmax(theta.detach().roll(1) + shift / 5, 0)
    expected = true_kl(log_pi, log_ref).item()
    for estimator in ("k1", "k3", "k1+", "k3+"):
        terms = kl_terms(log_pi - log_ref, estimator).detach()
        assert float((log_pi.detach().exp() * terms).sum()) == pytest.approx(expected, abs=1e-12)
    assert (kl_terms(log_pi - log_ref, "k3") >= -1e-15).all()


@pytest.mark.parametrize("estimator", ["k2", "k1+", "k3+"])
@given(values=logits)
def test_the_expected_gradient_of_k2_and_of_the_straight_through_forms_is_that_of_the_kl(estimator, values):
    theta, log_pi = policy(values)
    log_ref = torch.log_softmax(theta.detach().flip(0), 0)
    sampled = (log_pi.detach().exp() * kl_terms(log_pi - log_ref, estimator)).sum()
    (came,) = torch.autograd.grad(sampled, theta, retain_graph=True)
    (expected,) = torch.autograd.grad(true_kl(log_pi, log_ref), theta)
    torch.testing.assert_close(came, expected, rtol=1e-9, atol=1e-12)


def test_the_expected_gradient_of_k1_is_zero_as_its_docstring_warns():
    theta, log_pi = policy([0.3, -1.0, 2.0])
    sampled = (log_pi.detach().exp() * kl_terms(log_pi - math.log(1 / 3), "k1")).sum()
    torch.testing.assert_close(torch.autograd.grad(sampled, theta)[0], torch.zeros(3, dtype=torch.float64))


@given(st.lists(st.tuples(st.floats(-80, 0), st.floats(-80, 0)), min_size=1, max_size=5), st.floats(0, 1))
def test_the_penalty_on_rewards_is_the_coefficient_times_the_estimate(pairs, coefficient):
    new, ref = map(np.asarray, zip(*pairs, strict=True))
    d = np.clip(new - ref, -20, 20)
    np.testing.assert_allclose(kl_penalty(new, ref, coefficient), coefficient * d, rtol=1e-12, atol=1e-15)
    for estimator, value in (("k2", d * d / 2), ("k3", np.exp(-d) - 1 + d)):
        np.testing.assert_allclose(
            kl_penalty(new, ref, coefficient, estimator), coefficient * value, rtol=1e-9, atol=1e-12
        )


def test_a_token_without_a_finite_reference_has_no_penalty():
    assert kl_penalty([-1.0, -1.0, np.nan], [-np.inf, np.nan, -1.0], 0.5).tolist() == [0, 0, 0]


def test_an_unknown_estimator_is_named():
    with pytest.raises(TrainingError, match="k9"):
        kl_terms(torch.zeros(1), "k9")
