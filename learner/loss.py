"""The clipped, importance-weighted policy loss over sampled tokens.

Formula (REPLAY.md section 4), per token with ρ = π/π_old, A the advantage, w the correction of the decoupled form
(else 1):

    L(lo, hi) = max(-A ρ, -A clip(ρ, 1 - lo, 1 + hi));  if A < 0: L = min(L, -A c)      clip: arXiv:1707.06347; c:
    arXiv:1912.09729 ℓ = w · (off · L(off_lo, off_hi) + (1 - off) · L(lo, hi))
    loss = Σ weight · ℓ - entropy_bonus · Σ weight · H

``weight`` is the token's share of the whole optimizer step (``batching.token_weights``): micro-batches just add up.
Dimension: S tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from learner.importance import log_ratio, truncated_weight
from pipeline.config.training import ImportanceConfig, LossConfig


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
    """For tokens of ``off_policy_S`` (replayed, or guided)."""
    dual_clip: float | None
    decoupled: bool
    """Anchor at the recomputed π_old and correct with truncated π_old/μ."""
    weight_max: float
    log_ratio_max: float
    entropy_bonus: float

    @classmethod
    def of(cls, loss: LossConfig, importance: ImportanceConfig) -> LossRules:
        return cls(
            fresh=ClipRange(loss.clip_low, loss.clip_high),
            off=ClipRange(getattr(loss, "off_clip_low", loss.clip_low), getattr(loss, "off_clip_high", 1.0)),
            dual_clip=loss.dual_clip,
            decoupled=importance.anchor == "proximal",
            weight_max=importance.weight_max,
            log_ratio_max=importance.log_ratio_max,
            entropy_bonus=loss.entropy_bonus,
        )


@dataclass(frozen=True, slots=True)
class LossTokens:
    """Tensors ``[S]`` of one micro-batch. ``proximal`` may be None where the rules are not decoupled."""

    logprobs: Tensor
    """log π, with gradient."""
    entropy: Tensor
    behaviour: Tensor
    """log μ."""
    proximal: Tensor | None
    """log π_old, without gradient."""
    advantages: Tensor
    weights: Tensor
    loss_mask: Tensor
    """bool: takes part in the loss."""
    replay_mask: Tensor
    """bool: replayed; its anchor is μ in any form."""
    off_policy: Tensor
    """bool: uses the off-policy clip."""


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
    mask = tokens.loss_mask
    anchor, correction = _anchor(tokens, rules)
    ratio = log_ratio(tokens.logprobs, anchor, mask, rules.log_ratio_max).exp()
    advantages = torch.where(mask, tokens.advantages, torch.zeros_like(tokens.advantages))
    per_token = torch.where(
        tokens.off_policy,
        clipped(ratio, advantages, rules.off, rules.dual_clip),
        clipped(ratio, advantages, rules.fresh, rules.dual_clip),
    )
    zero = torch.zeros_like(per_token)
    weighted = torch.where(mask, tokens.weights * correction * per_token, zero)
    policy = weighted.sum()
    entropy = torch.where(mask, tokens.weights * torch.where(mask, tokens.entropy, zero), zero).sum()
    loss = policy - rules.entropy_bonus * entropy if rules.entropy_bonus else policy
    detached = ratio.detach()
    low = torch.where(tokens.off_policy, 1.0 - rules.off.low, 1.0 - rules.fresh.low)
    high = torch.where(tokens.off_policy, 1.0 + rules.off.high, 1.0 + rules.fresh.high)
    return LossTerms(
        loss=loss,
        policy=policy.detach(),
        entropy=entropy.detach(),
        clipped_low=mask & (advantages < 0) & (detached < low),
        clipped_high=mask & (advantages > 0) & (detached > high),
        token_losses=weighted.detach(),
    )


def clipped(ratio_S: Tensor, advantages_S: Tensor, clip: ClipRange, dual_clip: float | None) -> Tensor:
    """``L(lo, hi)`` of each token, float ``[S]``."""
    loss = torch.maximum(-advantages_S * ratio_S, -advantages_S * ratio_S.clamp(1.0 - clip.low, 1.0 + clip.high))
    if dual_clip is None:
        return loss
    return torch.where(advantages_S < 0, torch.minimum(loss, -advantages_S * dual_clip), loss)


def _anchor(tokens: LossTokens, rules: LossRules) -> tuple[Tensor, Tensor]:
    """log π_old and the factor w of each token."""
    if not rules.decoupled:
        return tokens.behaviour, torch.ones_like(tokens.behaviour)
    proximal = tokens.logprobs.detach() if tokens.proximal is None else tokens.proximal
    fresh = tokens.loss_mask & ~tokens.replay_mask
    weight = truncated_weight(proximal, tokens.behaviour, fresh, rules.weight_max, rules.log_ratio_max)
    return torch.where(tokens.replay_mask, tokens.behaviour, proximal), weight
