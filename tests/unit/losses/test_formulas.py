"""Every policy loss and correction against its formula, in value and gradient, whatever the input."""

import math

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import Phase, given, note, settings

from learner.losses.loss import policy_loss
from learner.losses.options import SoftCorrection, TokenCorrection, TruncatedCorrection
from learner.losses.policy_losses import LOSSES, binary_kl, binary_tv
from pipeline.config.losses import MaskConfig
from tests.unit.losses.cases import POISON, hostile, poisoned, rules_of, tensors
from tests.unit.losses.slow import Token, slow_loss

NAMES = sorted(LOSSES)
PHASES = (Phase.explicit, Phase.reuse, Phase.generate)
masks = st.lists(
    st.builds(
        MaskConfig,
        level=st.sampled_from(["token", "sequence", "geometric", "any_token"]),
        low=st.sampled_from([0.1, 0.5, 0.9]),
        high=st.sampled_from([None, 1.1, 2.0, 5.0]),
    ),
    max_size=2,
).map(tuple)
CORRECTIONS = (
    TokenCorrection(),
    TruncatedCorrection(),
    TruncatedCorrection(name="geometric", max=None),
    SoftCorrection(),
)
options = st.fixed_dictionaries(
    {
        "dual_clip": st.sampled_from([None, 3.0]),
        "decoupled": st.booleans(),
        "weight": st.sampled_from(["none", "token", "sequence", "geometric"]),
        "masks": masks,
        "replay_correction": st.sampled_from(CORRECTIONS),
        "off_policy": st.sampled_from(["clip", "shaped", "second_moment"]),
        "entropy_bonus": st.sampled_from([0.0, 0.1]),
        "kl_in_loss": st.booleans(),
        "kl_coef": st.just(0.3),
        "kl_estimator": st.sampled_from(["k1", "k2", "k3", "k1+", "k3+"]),
    }
)


@settings(max_examples=60, deadline=None, phases=PHASES)
@given(tokens=hostile(), chosen=options, proximal=st.booleans())
def test_loss_and_gradient_are_those_of_the_slow_reference(tokens, chosen, proximal):
    for name in NAMES:
        note(name)
        rules = rules_of(name, **chosen)
        t = tensors(tokens, proximal=proximal)
        terms = policy_loss(t, rules)
        (came,) = torch.autograd.grad(terms.loss, t.logprobs)
        loss, expected, kept = slow_loss(tokens, rules, name, proximal=proximal)
        assert terms.loss.item() == pytest.approx(loss, rel=1e-9, abs=1e-9)
        np.testing.assert_allclose(came.numpy(), expected, rtol=1e-7, atol=1e-10 * max(1.0, np.abs(expected).max()))
        assert terms.trained.tolist() == kept
        assert not (terms.clipped_low & terms.clipped_high).any()


@settings(max_examples=30, deadline=None, phases=PHASES)
@given(tokens=hostile(), chosen=options)
def test_loss_and_gradient_stay_finite_in_float32(tokens, chosen):
    for name in NAMES:
        note(name)
        t = tensors(tokens, dtype=torch.float32)
        terms = policy_loss(t, rules_of(name, **chosen))
        (grad,) = torch.autograd.grad(terms.loss, t.logprobs)
        assert torch.isfinite(terms.loss)
        assert torch.isfinite(grad).all()
        assert grad.dtype == terms.loss.dtype == torch.float32


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("poison", POISON)
def test_masked_poison_changes_not_a_bit_in_its_row_or_another(name, poison):
    rng = np.random.default_rng(0)
    clean = [Token(*-rng.uniform(0.1, 3, 4), rng.normal(), row=i // 3, replayed=i > 5) for i in range(9)]
    dirty = [*clean[:2], poisoned(clean[0], poison), *clean[2:], *[poisoned(Token(0, 0, 0, 0, 0, row=3), poison)] * 2]
    rules = rules_of(name, decoupled=True, weight="sequence", masks=(MaskConfig(level="geometric", low=0.01),),
                     kl_in_loss=True, kl_coef=0.1, entropy_bonus=0.1)  # fmt: skip
    a, b = tensors(clean), tensors(dirty)
    loss_a, loss_b = policy_loss(a, rules).loss, policy_loss(b, rules).loss
    (grad_a,), (grad_b,) = torch.autograd.grad(loss_a, a.logprobs), torch.autograd.grad(loss_b, b.logprobs)
    assert loss_a.item() == pytest.approx(loss_b.item(), rel=1e-14)
    real = [i for i, t in enumerate(dirty) if t.mask]
    torch.testing.assert_close(grad_b[real], grad_a, rtol=1e-13, atol=0)
    assert not grad_b[[i for i in range(len(dirty)) if i not in real]].any()


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("decoupled", [False, True])
@pytest.mark.parametrize("replayed", [False, True])
def test_on_policy_every_loss_has_the_plain_policy_gradient(name, decoupled, replayed):
    """The ratio is 1. Losses over a row spread the row's mean advantage over its tokens."""
    rng = np.random.default_rng(1)
    tokens = [
        Token(x, x, x, x, rng.normal(), row=i // 4, replayed=replayed) for i, x in enumerate(-rng.uniform(0.1, 4, 11))
    ]
    t = tensors(tokens)
    rules = rules_of(name, decoupled=decoupled, masks=(MaskConfig(level="sequence", low=0.99, high=1.01),))
    terms = policy_loss(t, rules)
    (came,) = torch.autograd.grad(terms.loss, t.logprobs)
    plain = -0.125 * np.asarray([x.advantage for x in tokens])
    if name in ("gspo", "gmpo"):
        plain = np.concatenate([np.full(len(part), part.mean()) for part in (plain[:4], plain[4:8], plain[8:])])
    np.testing.assert_allclose(came.numpy(), plain, rtol=1e-12)
    assert not (terms.clipped_low | terms.clipped_high).any()


@pytest.mark.parametrize("name", NAMES)
def test_without_off_policy_tokens_their_settings_change_not_a_bit(name):
    rng = np.random.default_rng(2)
    tokens = [Token(*-rng.uniform(0.1, 3, 4), rng.normal(), row=i // 3) for i in range(10)]
    losses = set()
    for form in ("clip", "shaped", "second_moment"):
        losses.add(policy_loss(tensors(tokens), rules_of(name, off_policy=form)).loss.item())
    assert len(losses) == 1


@pytest.mark.parametrize("name", NAMES)
def test_nothing_at_all_is_a_loss_of_zero(name):
    for tokens in ([], [poisoned(Token(0, 0, 0, 0, 0), np.nan)] * 3):
        t = tensors(tokens)
        terms = policy_loss(t, rules_of(name, masks=(MaskConfig(level="any_token", low=0.5),), kl_in_loss=True))
        (grad,) = torch.autograd.grad(terms.loss, t.logprobs)
        assert (terms.loss.item(), grad.tolist()) == (0.0, [0.0] * len(tokens))


@settings(max_examples=25, deadline=None, phases=PHASES)
@given(tokens=hostile(2.0), seed=st.integers(0, 99))
def test_the_order_of_tokens_changes_nothing(tokens, seed):
    order = np.random.default_rng(seed).permutation(len(tokens))
    for name in NAMES:
        note(name)
        rules = rules_of(name, decoupled=True, weight="geometric")
        a, b = tensors(tokens), tensors([tokens[i] for i in order])
        loss_a, loss_b = policy_loss(a, rules).loss, policy_loss(b, rules).loss
        (grad_a,), (grad_b,) = torch.autograd.grad(loss_a, a.logprobs), torch.autograd.grad(loss_b, b.logprobs)
        assert loss_a.item() == pytest.approx(loss_b.item(), rel=1e-12, abs=1e-14)
        torch.testing.assert_close(grad_b, grad_a[torch.from_numpy(order)], rtol=1e-10, atol=1e-12)


@settings(max_examples=40, deadline=None, phases=PHASES)
@given(tokens=hostile(2.0))
def test_clipped_tokens_have_no_gradient_of_their_own(tokens):
    alike = [Token(**{**t.__dict__, "advantage": 1.0}) for t in tokens]
    for name in ("ppo", "gspo", "gspo_token", "dppo_tv", "dppo_kl"):
        # of gspo the row's ratio is every token's: one advantage for the row, and the whole row is clipped
        t = tensors(alike if name == "gspo" else tokens)
        terms = policy_loss(t, rules_of(name, dual_clip=None))
        (grad,) = torch.autograd.grad(terms.loss, t.logprobs)
        assert not grad[terms.clipped_low | terms.clipped_high].any(), name


@pytest.mark.parametrize("name", ["dppo_tv", "dppo_kl"])
def test_dppo_masks_exactly_what_moves_on_beyond_the_bound(name):
    grid = [0.001, 0.05, 0.3, 0.5, 0.7, 0.95, 0.999]
    for p in grid:
        for q in grid:
            tv, kl = abs(p - q), q * math.log(q / p) + (1 - q) * math.log((1 - q) / (1 - p))
            both = torch.tensor([math.log(p)]), torch.tensor([math.log(q)])
            assert (binary_tv(*both).item(), binary_kl(*both).item()) == pytest.approx((tv, kl), rel=1e-4, abs=1e-7)
            far = tv > 0.15 if name == "dppo_tv" else kl > 0.05
            for a in (1.0, -1.0):
                t = tensors([Token(math.log(p), math.log(q), 0.0, 0.0, a, weight=1.0)])
                terms = policy_loss(t, rules_of(name))
                (grad,) = torch.autograd.grad(terms.loss, t.logprobs)
                masked = far and (p > q if a > 0 else p < q)
                assert bool(terms.clipped_high if a > 0 else terms.clipped_low) == masked
                assert grad.item() == pytest.approx(0.0 if masked else -a * min(p / q, 20.0))


def test_cispo_keeps_the_gradient_of_clipped_tokens_and_sapo_lets_it_fade():
    tokens = [Token(-0.5, -4.0, 0.0, 0.0, 1.0, row=i) for i in range(1)]
    for name, weight in (("cispo", 5.0), ("sapo", None)):
        t = tensors(tokens)
        terms = policy_loss(t, rules_of(name))
        (grad,) = torch.autograd.grad(terms.loss, t.logprobs)
        assert terms.clipped_high.all()
        if weight is not None:
            assert grad.item() == pytest.approx(-0.125 * weight)
        else:
            assert 0 < -grad.item() < 0.1 * 0.125 * np.exp(3.5)
