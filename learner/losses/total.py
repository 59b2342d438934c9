"""The loss of an update's tokens: policy loss, corrections, KL and entropy, put together.

Formula, per token with ρ = π/π_old, A the advantage, w the correction of the decoupled form or of replayed
trajectories (else 1), v the weight of a replayed trajectory (else 1), m the token's mask:

    ℓ = v · w · (off · O + (1 - off) · L(lo, hi))
    loss = Σ weight · m · (ℓ + kl_coef · K - entropy_bonus · H)

L is the policy loss (``registry``; by default PPO's clip, arXiv:1707.06347, with dual clip), w and a part of m come
from ``corrections``, K from ``kl`` (in the loss only where ``loss.kl`` is ``loss``). O, the loss of off-policy tokens,
is one of

    clip            L(off_lo, off_hi)                           (two clips in one loss: AgentEvolver's form)
    shaped          -A f(ρ), f(x) = x / (x + β)                 LUFFY (arXiv:2504.14945), ExGRPO (arXiv:2510.02245)
    second_moment   -A ρ; if A < 0: min(., -A c)                M2PO (arXiv:2510.01161); its mask is in ``loss_mask``

π_old of a token:

    replayed, recorded              μ
    ... with a weight over trajectories (``replay.correction``): π_prox
    replayed, unrecorded            π_prox, before the first optimizer step of the update: ρ is 1 at first
    ... with ``shaped``             1, as LUFFY sets it: f(ρ) = f(π) = π / (π + β)
    fresh (guided ones too)         μ, or in the decoupled form π_prox

Of a shaped token the gradient is ``-A f'(ρ) ρ ∇log π`` with ``f'(x) x = β x / (x + β)²``: for π_old = 1 largest where
π = β, so that improbable tokens of a demonstration are learned instead of those that are already certain.

``weight`` is the token's share of the whole optimizer step (:func:`learner.data.microbatch.token_weights`), so that
micro-batches add up.
Dimension: S tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from learner.losses.base import LossRules, Scored, TokenLosses, log_ratio
from learner.losses.corrections import Correction, OtherRows, RatioInputs, corrections
from learner.losses.kl import kl_terms
from learner.losses.options import SecondMoment, Shaped
from learner.losses.policy_losses import bounded, shaped


@dataclass(frozen=True, slots=True)
class LossTokens:
    """Tensors ``[S]`` of one micro-batch."""

    logprobs: Tensor
    """log π, with gradient."""
    entropy: Tensor
    behaviour: Tensor
    """log μ."""
    proximal: Tensor | None
    """log π before the first optimizer step of the update, without gradient; None: these are the weights of now. Read
    only where the rules anchor a token there."""
    advantages: Tensor
    weights: Tensor
    loss_mask: Tensor
    """bool: takes part in the loss."""
    replay_mask: Tensor
    """bool: replayed."""
    off_policy: Tensor
    """bool: uses the off-policy loss."""
    rows: Tensor | None = None
    """int64: number of the row (a branch) in the micro-batch; for ratios over sequences. A row is never split."""
    reference: Tensor | None = None
    """log π of the reference policy."""
    recorded: Tensor | None = None
    """bool: log μ is known. None: everywhere."""
    factors: Tensor | None = None
    """Weight of the trajectory, multiplies ℓ. None: 1."""
    others: OtherRows | None = None
    """Sums over the other rows of the token's trajectory, for weights over trajectories. None: each has one row."""


@dataclass(frozen=True, slots=True)
class LossTerms:
    """``loss`` (scalar, with gradient) and, without gradient, its parts and what became of each token."""

    loss: Tensor
    policy: Tensor
    entropy: Tensor
    kl: Tensor
    """Σ weight · K; 0 without a reference."""
    clipped_low: Tensor
    """bool ``[S]``: held back by the policy loss because π is too small, or, below, too large."""
    clipped_high: Tensor
    token_losses: Tensor
    """float ``[S]``: weight · ℓ, for sums by source."""
    trained: Tensor
    """bool ``[S]``: in the loss."""
    truncated: Tensor
    """bool ``[S]``: its w was truncated."""
    reasons: Tensor
    """int8 ``[S]``: code into ``corrections.REASONS`` of what rejected the token; 0 also where ``loss_mask`` did."""
    reference_kl: Tensor
    """float ``[S]``: K; NaN outside the loss or without a finite reference."""


def policy_loss(tokens: LossTokens, rules: LossRules) -> LossTerms:
    """The loss of one micro-batch. The sum over micro-batches is the loss of the optimizer step."""
    off = tokens.off_policy
    recorded = torch.ones_like(off) if tokens.recorded is None else tokens.recorded
    proximal = tokens.logprobs.detach() if tokens.proximal is None else tokens.proximal
    correction = _correction(tokens, proximal, recorded, rules)
    mask = tokens.loss_mask & (correction.reasons == 0)
    scored = _scored(tokens, _anchor(tokens, proximal, recorded, rules), mask, rules)
    result = rules.policy(scored, rules)
    per_token, unclipped = _mixed(scored, result, off, recorded, rules)
    zero = torch.zeros_like(per_token)
    shares = torch.where(mask, tokens.weights * correction.weights, zero)
    if tokens.factors is not None:
        shares = shares * torch.where(mask, tokens.factors, zero)
    weighted = torch.where(mask, shares * per_token, zero)
    policy = weighted.sum()
    entropy = torch.where(mask, tokens.weights * scored.entropy, zero).sum()
    loss = policy - rules.entropy_bonus * entropy if rules.entropy_bonus else policy
    kl, estimates = _reference_kl(tokens, mask, rules)
    if rules.kl_in_loss:
        loss = loss + rules.kl_coef * kl
    return LossTerms(
        loss=loss,
        policy=policy.detach(),
        entropy=entropy.detach(),
        kl=kl.detach(),
        clipped_low=mask & ~unclipped & result.clipped_low,
        clipped_high=mask & ~unclipped & result.clipped_high,
        token_losses=weighted.detach(),
        trained=mask,
        truncated=correction.truncated & mask,
        reasons=correction.reasons,
        reference_kl=estimates,
    )


def _correction(tokens: LossTokens, proximal: Tensor, recorded: Tensor, rules: LossRules) -> Correction:
    inputs = RatioInputs(proximal, tokens.behaviour, tokens.rows, tokens.others, rules.log_ratio_max)
    return corrections(
        inputs,
        tokens.loss_mask & ~tokens.replay_mask,
        tokens.loss_mask & tokens.replay_mask & recorded,
        tokens.loss_mask & ~tokens.off_policy & recorded,
        tokens.advantages,
        rules,
    )


def _anchor(tokens: LossTokens, proximal: Tensor, recorded: Tensor, rules: LossRules) -> Tensor:
    """log π_old of each token."""
    replayed = tokens.replay_mask
    anchor = torch.where(replayed, tokens.behaviour, proximal) if rules.decoupled else tokens.behaviour
    if rules.replay_correction.name != "token":
        return torch.where(replayed, proximal, anchor)
    unknown = torch.zeros_like(proximal) if rules.off_policy.name == "shaped" else proximal
    return torch.where(replayed & ~recorded, unknown, anchor)


def _scored(tokens: LossTokens, anchor: Tensor, mask: Tensor, rules: LossRules) -> Scored:
    def inside(values: Tensor) -> Tensor:
        return torch.where(mask, values, torch.zeros_like(values))

    def by_policy(off: float, fresh: float) -> Tensor:
        kind = tokens.logprobs
        return torch.where(tokens.off_policy, kind.new_tensor(off), kind.new_tensor(fresh))

    return Scored(
        logprobs=inside(tokens.logprobs),
        old=inside(anchor),
        log_ratio=log_ratio(tokens.logprobs, anchor, mask, rules.log_ratio_max),
        advantages=inside(tokens.advantages),
        mask=mask,
        low=by_policy(rules.off.low, rules.fresh.low),
        high=by_policy(rules.off.high, rules.fresh.high),
        rows=tokens.rows,
        entropy=inside(tokens.entropy),
    )


def _mixed(
    scored: Scored, result: TokenLosses, off: Tensor, recorded: Tensor, rules: LossRules
) -> tuple[Tensor, Tensor]:
    """The loss of each token, and which tokens have one without a clip. Without μ there is no second moment either, so
    those keep the off clip."""
    form = rules.off_policy
    if isinstance(form, Shaped):
        other = shaped(scored.log_ratio, scored.advantages, form.beta)
        return torch.where(off, other, result.losses), off
    if isinstance(form, SecondMoment):
        unclipped = off & recorded
        other = bounded(scored.log_ratio.exp(), scored.advantages, form.dual_clip)
        return torch.where(unclipped, other, result.losses), unclipped
    return result.losses, torch.zeros_like(off)


def _reference_kl(tokens: LossTokens, mask: Tensor, rules: LossRules) -> tuple[Tensor, Tensor]:
    """``Σ weight · K`` with gradient, and K of each token."""
    if tokens.reference is None:
        return tokens.logprobs.new_zeros(()), torch.full_like(tokens.weights, torch.nan)
    known = mask & torch.isfinite(tokens.reference)
    estimates = kl_terms(log_ratio(tokens.logprobs, tokens.reference, known, rules.log_ratio_max), rules.kl_estimator)
    weighted = torch.where(known, tokens.weights * estimates, torch.zeros_like(estimates))
    return weighted.sum(), torch.where(known, estimates.detach(), torch.full_like(estimates, torch.nan))
