"""The clipped, importance-weighted policy loss over sampled tokens.

Formula (REPLAY.md section 4), per token with ρ = π/π_old, A the advantage, w the correction of the decoupled form
(else 1), v the weight of a replayed trajectory (else 1):

    L(lo, hi) = max(-A ρ, -A clip(ρ, 1 - lo, 1 + hi));  if A < 0: L = min(L, -A c)      clip: arXiv:1707.06347; c:
    arXiv:1912.09729 ℓ = v · w · (off · O + (1 - off) · L(lo, hi))
    loss = Σ weight · ℓ - entropy_bonus · Σ weight · H

O, the loss of off-policy tokens, is one of

    clip            L(off_lo, off_hi)                           (two clips in one loss: AgentEvolver's form)
    shaped          -A f(ρ), f(x) = x / (x + β)                 LUFFY (arXiv:2504.14945), ExGRPO (arXiv:2510.02245)
    second_moment   -A ρ; if A < 0: min(., -A c)                M2PO (arXiv:2510.01161); its mask is in ``loss_mask``

π_old of a token:

    replayed, recorded              μ
    replayed, unrecorded            today's π, before the first optimizer step of the update: ρ is 1 at first
    ... with ``shaped``             1, as LUFFY sets it: f(ρ) = f(π) = π / (π + β)
    replayed, all of them, where ``use_recorded`` is False: today's π
    fresh (guided ones too)         μ, or in the decoupled form today's π

Of a shaped token the gradient is ``-A f'(ρ) ρ ∇log π`` with ``f'(x) x = β x / (x + β)²``: for π_old = 1 largest where
π = β, so that improbable tokens of a demonstration are learned instead of those that are certain already.

``weight`` is the token's share of the whole optimizer step (``batching.token_weights``): micro-batches just add up.
Dimension: S tokens.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from learner.importance import log_ratio, truncated_weight
from pipeline.config.loss import ImportanceConfig, LossConfig


@dataclass(frozen=True, slots=True)
class ClipRange:
    """The ratio is clipped to ``[1 - low, 1 + high]``."""

    low: float
    high: float


@dataclass(frozen=True, slots=True)
class LossRules:
    """What the loss needs from the run file."""

    fresh: ClipRange
    off: ClipRange
    """For off-policy tokens (replayed, or guided)."""
    dual_clip: float | None
    decoupled: bool
    """Anchor at the recomputed π_old and correct with truncated π_old/μ."""
    weight_max: float
    log_ratio_max: float
    entropy_bonus: float
    off_policy: Literal["clip", "shaped", "second_moment"] = "clip"
    shape_beta: float = 0.1
    use_recorded: bool = True
    """Replayed tokens are anchored at recorded μ where there is one."""

    @classmethod
    def of(cls, loss: LossConfig, importance: ImportanceConfig, use_recorded: bool = True) -> LossRules:
        return cls(
            fresh=ClipRange(loss.clip_low, loss.clip_high),
            off=ClipRange(loss.clip_low if loss.off_clip_low is None else loss.off_clip_low, loss.off_clip_high),
            dual_clip=loss.dual_clip,
            decoupled=importance.anchor == "proximal",
            weight_max=importance.weight_max,
            log_ratio_max=importance.log_ratio_max,
            entropy_bonus=loss.entropy_bonus,
            off_policy=loss.off_policy,
            shape_beta=loss.off_shape_beta,
            use_recorded=use_recorded,
        )

    def anchored_today(self, *, replayed: bool, recorded: bool) -> bool:
        """Whether such tokens are anchored at log π before the first optimizer step of the update."""
        if not replayed:
            return self.decoupled
        return not self.use_recorded or (not recorded and self.off_policy != "shaped")


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


@dataclass(frozen=True, slots=True)
class LossTerms:
    """``loss`` (scalar, with gradient) and, without gradient, its parts and which tokens were clipped."""

    loss: Tensor
    policy: Tensor
    entropy: Tensor
    clipped_low: Tensor
    clipped_high: Tensor
    token_losses: Tensor
    """float ``[S]``: weight · ℓ, for sums by source."""


def policy_loss(tokens: LossTokens, rules: LossRules) -> LossTerms:
    """The loss of one micro-batch. The sum over micro-batches is the loss of the optimizer step."""
    mask, off = tokens.loss_mask, tokens.off_policy
    recorded = torch.ones_like(mask) if tokens.recorded is None else tokens.recorded
    anchor, correction = _anchor(tokens, rules, recorded)
    d = log_ratio(tokens.logprobs, anchor, mask, rules.log_ratio_max)
    ratio = d.exp()
    advantages = torch.where(mask, tokens.advantages, torch.zeros_like(tokens.advantages))
    unclipped = _unclipped(off, recorded, rules)
    per_token = clipped(ratio, advantages, rules.fresh, rules.dual_clip)
    if bool(off.any()):
        clip_off = clipped(ratio, advantages, rules.off, rules.dual_clip)
        per_token = torch.where(off, clip_off, per_token)
        if rules.off_policy == "shaped":
            per_token = torch.where(unclipped, shaped(d, advantages, rules.shape_beta), per_token)
        elif rules.off_policy == "second_moment":
            per_token = torch.where(unclipped, bounded(ratio, advantages, rules.dual_clip), per_token)
    zero = torch.zeros_like(per_token)
    if tokens.factors is not None:
        per_token = torch.where(mask, tokens.factors * per_token, zero)
    weighted = torch.where(mask, tokens.weights * correction * per_token, zero)
    policy = weighted.sum()
    entropy = torch.where(mask, tokens.weights * torch.where(mask, tokens.entropy, zero), zero).sum()
    loss = policy - rules.entropy_bonus * entropy if rules.entropy_bonus else policy
    detached = ratio.detach()
    low = torch.where(off, 1.0 - rules.off.low, 1.0 - rules.fresh.low)
    high = torch.where(off, 1.0 + rules.off.high, 1.0 + rules.fresh.high)
    has_clip = mask & ~unclipped
    return LossTerms(
        loss=loss,
        policy=policy.detach(),
        entropy=entropy.detach(),
        clipped_low=has_clip & (advantages < 0) & (detached < low),
        clipped_high=has_clip & (advantages > 0) & (detached > high),
        token_losses=weighted.detach(),
    )


def clipped(ratio_S: Tensor, advantages_S: Tensor, clip: ClipRange, dual_clip: float | None) -> Tensor:
    """``L(lo, hi)`` of each token, float ``[S]``."""
    loss = torch.maximum(-advantages_S * ratio_S, -advantages_S * ratio_S.clamp(1.0 - clip.low, 1.0 + clip.high))
    return _dual(loss, advantages_S, dual_clip)


def bounded(ratio_S: Tensor, advantages_S: Tensor, dual_clip: float | None) -> Tensor:
    """``-A ρ`` with the dual clip alone, float ``[S]``."""
    return _dual(-advantages_S * ratio_S, advantages_S, dual_clip)


def shaped(log_ratio_S: Tensor, advantages_S: Tensor, beta: float) -> Tensor:
    """``-A ρ / (ρ + β)``, float ``[S]``, as ``-A sigmoid(log ρ - log β)``, which does not overflow. At most |A|, so
    the dual clip never binds."""
    return -advantages_S * torch.sigmoid(log_ratio_S - math.log(beta))


def _dual(loss_S: Tensor, advantages_S: Tensor, dual_clip: float | None) -> Tensor:
    if dual_clip is None:
        return loss_S
    return torch.where(advantages_S < 0, torch.minimum(loss_S, -advantages_S * dual_clip), loss_S)


def _unclipped(off: Tensor, recorded: Tensor, rules: LossRules) -> Tensor:
    """bool ``[S]``: off-policy tokens whose loss has no clip. Without μ there is no second moment either, so those
    keep the off clip."""
    if rules.off_policy == "shaped":
        return off
    if rules.off_policy == "second_moment" and rules.use_recorded:
        return off & recorded
    return torch.zeros_like(off)


def _anchor(tokens: LossTokens, rules: LossRules, recorded: Tensor) -> tuple[Tensor, Tensor]:
    """log π_old and the factor w of each token."""
    replayed = tokens.replay_mask
    today = tokens.logprobs.detach() if tokens.proximal is None else tokens.proximal
    if rules.decoupled:
        anchor = torch.where(replayed, tokens.behaviour, today)
        fresh = tokens.loss_mask & ~replayed
        weight = truncated_weight(today, tokens.behaviour, fresh, rules.weight_max, rules.log_ratio_max)
    else:
        anchor, weight = tokens.behaviour, torch.ones_like(tokens.behaviour)
    if not rules.use_recorded:
        return torch.where(replayed, today, anchor), weight
    unknown = torch.zeros_like(today) if rules.off_policy == "shaped" else today
    return torch.where(replayed & ~recorded, unknown, anchor), weight
