"""The loss of an update's tokens: policy loss, corrections, KL and entropy, put together.

Formula, per token with ρ = π/π_old, A the advantage, w the correction of the decoupled form or of replayed
trajectories (else 1), v the weight of a replayed trajectory (else 1), m the token's mask:

    ℓ = v · w · (off · O + (1 - off) · L(lo, hi))
    loss = Σ weight · m · (ℓ + kl_coef · K - entropy_bonus · H)

L is the policy loss (``policy_losses``; by default PPO's clip, arXiv:1707.06347, with dual clip), w and a part of m are
corrections, K is the KL (:mod:`learner.losses.kl`; in the loss only where ``loss.kl`` is ``loss``). O, the loss of
off-policy tokens, is one of

    clip            L(off_lo, off_hi)                           (two clips in one loss: AgentEvolver's form)
    shaped          -A f(ρ), f(x) = x / (x + β)                 LUFFY (arXiv:2504.14945), ExGRPO (arXiv:2510.02245)
    second_moment   -A ρ; if A < 0: min(., -A c)                M2PO (arXiv:2510.01161); its mask is in ``loss_mask``

π_old of a token:

    replayed, recorded              μ
    ... with a weight over trajectories (``replay.correction``): π_prox
    replayed, unrecorded            π_prox, before the first optimizer step of the update: ρ is 1 at first
    ... with ``shaped``             1, as LUFFY sets it: f(ρ) = f(π) = π / (π + β)
    fresh (with lessons too)        μ, or in the decoupled form π_prox

Of a shaped token the gradient is ``-A f'(ρ) ρ ∇log π`` with ``f'(x) x = β x / (x + β)²``: for π_old = 1 largest where
π = β, so that improbable tokens of a demonstration are learned instead of those that are already certain.

``weight`` is the token's share of the whole optimizer step (:func:`learner.data.microbatch.token_weights`), so that
micro-batches add up.

Corrections of off-policy tokens come from r = π_prox/μ: μ is the policy that the engine sampled from, π_prox that of
the learner before the first optimizer step, so r holds the engine's numerical mismatch and the staleness of its
weights. By level: ``token`` is r of the token, ``sequence`` the product of r over the tokens of a sequence,
``geometric`` that to the power of 1 over their number. The sequence of a weight is the trajectory with all of its rows,
that of a mask the row.

    weight   min(r, max)              truncated importance sampling (Ionides 2008; arXiv:2505.24298 for tokens)
             r^k exp(lambda (1 - r))  soft, for replayed tokens; k and lambda by the sign of A (VESPO, arXiv:2602.10693)
    mask     0 unless low ≤ r ≤ high  masked importance sampling; two-sided for tokens: IcePop (arXiv:2510.18855)

Each log-ratio is clamped to ± ``LOG_RATIO_MAX`` before it is summed, and the sum again. Masked out tokens count neither
in the loss nor in a row's ratio there; in the ratios here they do, so that the order of masks changes nothing.

Dimensions: S sampled tokens of a micro-batch, N off-policy tokens of an optimizer step.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from learner.losses.base import LossRules, RowSums, Scored, TokenLosses, log_ratio
from learner.losses.kl import kl_terms
from learner.losses.options import SecondMoment, Shaped, SoftCorrection, TruncatedCorrection
from learner.losses.policy_losses import bounded, shaped
from learner.observability.statistics import LOG_RATIO_MAX

REASONS = ("", "ratio_cap", "sequence_mask", "geometric_mask", "any_token_mask")
"""Reasons for rejecting a token, by the code in ``Correction.reasons``; code 0: not rejected."""
_CODES = {"token": 1, "sequence": 2, "geometric": 3, "any_token": 4}


@dataclass(frozen=True, slots=True)
class Correction:
    """``[S]``, without gradient."""

    weights: Tensor
    """Multiplies the loss; 1 where nothing is corrected."""
    truncated: Tensor
    """bool: the weight was cut at its maximum."""
    reasons: Tensor
    """int8: code into :data:`REASONS`."""


@dataclass(frozen=True, slots=True)
class OtherRows:
    """Sums over the tokens that a token's trajectory has in other rows, float64 ``[S]``. These rows may be in other
    micro-batches or on other ranks."""

    log_ratios: Tensor
    """Sum of the clamped log-ratios log r."""
    counts: Tensor
    """Number of the tokens."""


def ratios(tokens: LossTokens, proximal: Tensor, level: str, valid: Tensor, *, trajectory: bool) -> Tensor:
    """r of each token at a level, ``[S]``; 1 where not ``valid``. ``trajectory``: over all rows of the trajectory, else
    over the valid tokens of the token's row. ``proximal``: log π_prox."""
    d = log_ratio(proximal, tokens.behaviour, valid).detach()
    if level in ("sequence", "geometric"):
        sums = RowSums(tokens.rows, valid)
        total, count = sums.sum(d.double()), sums.sum(torch.ones_like(d, dtype=torch.float64))
        if trajectory and tokens.others is not None:
            total, count = total + tokens.others.log_ratios, count + tokens.others.counts
        total = total / count.clamp(min=1.0) if level == "geometric" else total
        d = total.clamp(-LOG_RATIO_MAX, LOG_RATIO_MAX).to(d.dtype)
    return torch.where(valid, d, torch.zeros_like(d)).exp()


def corrections(tokens: LossTokens, proximal: Tensor, recorded: Tensor, rules: LossRules) -> Correction:
    """Weights and rejections of the tokens of a micro-batch, given log π_prox and where log μ is known.

    Fresh tokens, replayed ones with log μ, and those that may be rejected are three sets: sequences are taken over the
    tokens of one.
    """
    fresh = tokens.loss_mask & ~tokens.replay_mask
    replayed = tokens.loss_mask & tokens.replay_mask & recorded
    maskable = tokens.loss_mask & ~tokens.off_policy & recorded
    weights, reasons = torch.ones_like(proximal), torch.zeros_like(fresh, dtype=torch.int8)
    truncated = torch.zeros_like(fresh)
    form = rules.replay_correction
    if rules.decoupled and rules.weight != "none":
        raw = ratios(tokens, proximal, rules.weight, fresh, trajectory=True)
        weights = torch.where(fresh, raw.clamp(max=rules.weight_max), weights)
        truncated = fresh & (raw > rules.weight_max)
    if isinstance(form, TruncatedCorrection):
        raw = ratios(tokens, proximal, form.name, replayed, trajectory=True)
        highest = math.inf if form.max is None else form.max
        weights = torch.where(replayed, raw.clamp(max=highest), weights)
        truncated = truncated | (replayed & (raw > highest))
    elif isinstance(form, SoftCorrection):
        raw = ratios(tokens, proximal, "sequence", replayed, trajectory=True)
        weights = torch.where(replayed, soft_weights(raw, tokens.advantages, form), weights)
    for mask in rules.masks:
        level = "token" if mask.level == "any_token" else mask.level
        ratio = ratios(tokens, proximal, level, maskable, trajectory=False)
        outside = maskable & (ratio < mask.low)
        if mask.high is not None:
            outside |= maskable & (ratio > mask.high)
        if mask.level == "any_token":
            outside = maskable & RowSums(tokens.rows, maskable).any(outside)
        reasons = torch.where((reasons == 0) & outside, reasons.new_full((), _CODES[mask.level]), reasons)
    return Correction(weights.detach(), truncated, reasons)


def soft_weights(ratios_S: Tensor, advantages_S: Tensor, form: SoftCorrection) -> Tensor:
    """``W^k exp(lambda (1 - W))``, k and lambda by the sign of A, ``[S]``: 1 at W = 1, largest at ``W = k / lambda``
    (VESPO, arXiv:2602.10693)."""
    up = advantages_S >= 0
    k = torch.where(up, ratios_S.new_full((), form.k_positive), ratios_S.new_full((), form.k_negative))
    rate = torch.where(up, ratios_S.new_full((), form.lambda_positive), ratios_S.new_full((), form.lambda_negative))
    return (torch.xlogy(k, ratios_S) + rate * (1.0 - ratios_S)).exp()


def second_moment_mask(log_ratios_N: npt.ArrayLike, second_moment_max: float) -> npt.NDArray[np.bool_]:
    """Mask of the tokens that stay, bool ``[N]``: their ``mean((log π/μ)²)`` is at most ``second_moment_max``.

    As few as possible go, those with the largest squares first (M2PO, arXiv:2510.01161). Tokens with equal squares stay
    or go together, so the order changes nothing; values that are not finite go.

    >>> second_moment_mask([0.1, -2.0, 0.2, 0.1], 0.04)
    array([ True, False,  True,  True])
    """
    squares = np.square(np.asarray(log_ratios_N, dtype=np.float64))
    squares = np.where(np.isfinite(squares), squares, np.inf)
    ordered = np.sort(squares)
    means = np.cumsum(ordered) / np.arange(1, len(ordered) + 1)
    count = int(np.searchsorted(means > second_moment_max, True))
    return squares < ordered[count] if count < len(ordered) else np.ones(len(ordered), dtype=np.bool_)


def step_factor(ess_ratio: float | None, target: float) -> float:
    """Factor of the ESS guard on the learning rate: ``sqrt(min(1, ESS / target))``; 1 where no ratio is known.

    >>> step_factor(0.125, 0.5), step_factor(0.9, 0.5), step_factor(None, 0.5)
    (0.5, 1.0, 1.0)
    """
    return 1.0 if ess_ratio is None else math.sqrt(min(1.0, ess_ratio / target))


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
    """int8 ``[S]``: code into :data:`REASONS` of what rejected the token; 0 also where ``loss_mask`` did."""
    reference_kl: Tensor
    """float ``[S]``: K; NaN outside the loss or without a finite reference."""


def policy_loss(tokens: LossTokens, rules: LossRules) -> LossTerms:
    """The loss of one micro-batch. The sum over micro-batches is the loss of the optimizer step."""
    off = tokens.off_policy
    recorded = torch.ones_like(off) if tokens.recorded is None else tokens.recorded
    proximal = tokens.logprobs.detach() if tokens.proximal is None else tokens.proximal
    correction = corrections(tokens, proximal, recorded, rules)
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
        return torch.where(tokens.off_policy, kind.new_full((), off), kind.new_full((), fresh))

    return Scored(
        logprobs=inside(tokens.logprobs),
        old=inside(anchor),
        log_ratio=log_ratio(tokens.logprobs, anchor, mask),
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
    estimates = kl_terms(log_ratio(tokens.logprobs, tokens.reference, known), rules.kl_estimator)
    weighted = torch.where(known, tokens.weights * estimates, torch.zeros_like(estimates))
    return weighted.sum(), torch.where(known, estimates.detach(), torch.full_like(estimates, torch.nan))
