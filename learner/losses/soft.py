"""Losses that weigh tokens down instead of cutting them off: CISPO and SAPO."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from learner.losses.base import Scored, TokenLosses

if TYPE_CHECKING:
    from learner.losses.rules import LossRules


def cispo(tokens: Scored, rules: LossRules) -> TokenLosses:
    """``-sg(clip(ρ, 1 - lo, 1 + hi)) A log π`` (arXiv:2506.13585): every token keeps a gradient, of clipped weight.
    Tokens whose weight was clipped are counted, whatever their advantage's sign."""
    ratio, a = tokens.log_ratio.detach().exp(), tokens.advantages
    low, high = 1.0 - tokens.low, 1.0 + tokens.high
    losses = -ratio.clamp(low, high) * a * tokens.logprobs
    return TokenLosses(losses, (a != 0) & (ratio < low), (a != 0) & (ratio > high))


def sapo(tokens: Scored, rules: LossRules) -> TokenLosses:
    """``-A f(ρ)`` with ``f(x) = 4/τ sigmoid(τ (x - 1))``, τ by the sign of A (arXiv:2511.20347).

    The gradient is that of ``-A ρ`` times ``4 p (1 - p)``, p the sigmoid: 1 at ρ = 1, fading on both sides. Tokens for
    which it is below 1/2 count as clipped.
    """
    ratio, a = tokens.log_ratio.exp(), tokens.advantages
    temperature = torch.where(a > 0, ratio.new_tensor(rules.sapo_positive), ratio.new_tensor(rules.sapo_negative))
    gate = torch.sigmoid(temperature * (ratio - 1.0))
    p, moved = gate.detach(), ratio.detach()
    faded = (a != 0) & (4.0 * p * (1.0 - p) < 0.5)
    return TokenLosses(-a * gate * 4.0 / temperature, faded & (moved < 1.0), faded & (moved > 1.0))
