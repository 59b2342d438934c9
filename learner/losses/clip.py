"""Losses that clip a ratio: of the token (PPO), of the row (GSPO), of each token in the row's geometric mean (GMPO)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from learner.losses.base import Scored, TokenLosses

if TYPE_CHECKING:
    from learner.losses.rules import LossRules


def ppo(tokens: Scored, rules: LossRules) -> TokenLosses:
    """``max(-A ρ, -A clip(ρ, 1 - lo, 1 + hi))`` with ρ the token's ratio (arXiv:1707.06347, eq. 7), dual clip."""
    return _clipped(tokens.log_ratio.exp(), tokens, rules)


def gspo(tokens: Scored, rules: LossRules) -> TokenLosses:
    """PPO's form with the row's ratio ``s = exp(mean over the row of log π/π_old)`` at every token of the row
    (arXiv:2507.18071). With ``aggregation: sequence_mean`` it is the published loss."""
    return _clipped(tokens.row_mean(tokens.log_ratio).exp(), tokens, rules)


def gspo_token(tokens: Scored, rules: LossRules) -> TokenLosses:
    """PPO's form with ``sg(s) π / sg(π)``: the row's ratio in value, each token's own gradient (arXiv:2507.18071),
    for advantages that differ within a row."""
    d = tokens.log_ratio
    mean = tokens.row_mean(d.detach())
    return _clipped((mean + d - d.detach()).exp(), tokens, rules)


def gmpo(tokens: Scored, rules: LossRules) -> TokenLosses:
    """``-A exp(mean over the row of d')``, d' the token's log-ratio clipped to ``[-lo, hi]`` on the side where its
    advantage would push it further (arXiv:2507.20673), dual clip."""
    d, up = tokens.log_ratio, tokens.advantages > 0
    bounded = torch.maximum(torch.minimum(d, tokens.high), -tokens.low)
    one_sided = torch.where(up, torch.minimum(d, bounded), torch.maximum(d, bounded))
    ratio = tokens.row_mean(one_sided).exp()
    detached = d.detach()
    return TokenLosses(
        dual_clipped(-tokens.advantages * ratio, tokens.advantages, rules.dual_clip),
        (tokens.advantages < 0) & (detached < -tokens.low),
        up & (detached > tokens.high),
    )


def dual_clipped(losses_S: Tensor, advantages_S: Tensor, dual_clip: float | None) -> Tensor:
    """``min(ℓ, -A c)`` where A < 0 (arXiv:1912.09729), float ``[S]``."""
    if dual_clip is None:
        return losses_S
    return torch.where(advantages_S < 0, torch.minimum(losses_S, -advantages_S * dual_clip), losses_S)


def _clipped(ratio_S: Tensor, tokens: Scored, rules: LossRules) -> TokenLosses:
    a, low, high = tokens.advantages, 1.0 - tokens.low, 1.0 + tokens.high
    losses = torch.maximum(-a * ratio_S, -a * ratio_S.clamp(low, high))
    detached = ratio_S.detach()
    return TokenLosses(
        dual_clipped(losses, a, rules.dual_clip), (a < 0) & (detached < low), (a > 0) & (detached > high)
    )
