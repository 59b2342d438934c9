"""DPPO: the policy gradient of tokens whose probability has not moved too far; the others are masked.

``-A min(ρ, c) M`` (arXiv:2602.04879): M is 0 where A pushes π further from π_old than the bound allows. The distance is
between two coins, "this token" and "any other": |π - π_old| (binary total variation), or the KL of π_old's
coin from π's. c is ``ratio_max``; beyond it the gradient keeps weight c.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from learner.losses.base import Scored, TokenLosses

if TYPE_CHECKING:
    from learner.losses.rules import LossRules


def dppo_tv(tokens: Scored, rules: LossRules) -> TokenLosses:
    """Masked by the binary total variation."""
    return _masked(binary_tv(tokens.logprobs, tokens.old), tokens, rules)


def dppo_kl(tokens: Scored, rules: LossRules) -> TokenLosses:
    """Masked by the binary KL."""
    return _masked(binary_kl(tokens.logprobs, tokens.old), tokens, rules)


def binary_tv(logprobs_S: Tensor, old_S: Tensor) -> Tensor:
    """``|π - π_old|``, float64 ``[S]``, without gradient."""
    return (logprobs_S.detach().double().exp() - old_S.double().exp()).abs()


def binary_kl(logprobs_S: Tensor, old_S: Tensor) -> Tensor:
    """``q log(q/p) + (1 - q) log((1 - q)/(1 - p))`` with q = π_old, p = π: float64 ``[S]``, without gradient, +inf
    where π rules out what π_old allows."""
    p, q = logprobs_S.detach().double().clamp(max=0.0), old_S.double().clamp(max=0.0)
    same, other = q.exp(), -torch.expm1(q)
    zero = torch.zeros_like(p)
    of_same = torch.where(same > 0, same * (q - p), zero)
    of_other = torch.where(other > 0, other * (_log_complement(q) - _log_complement(p)), zero)
    return (of_same + of_other).clamp(min=0.0)


def _log_complement(logprobs_S: Tensor) -> Tensor:
    """``log(1 - p)``."""
    return torch.log(-torch.expm1(logprobs_S))


def _masked(divergence_S: Tensor, tokens: Scored, rules: LossRules) -> TokenLosses:
    a, d = tokens.advantages, tokens.log_ratio
    low = (a < 0) & (d.detach() < 0) & (divergence_S > tokens.low)
    high = (a > 0) & (d.detach() > 0) & (divergence_S > tokens.high)
    weight = d.detach().exp().clamp(max=rules.ratio_max)
    losses = -a * weight * (d - d.detach()).exp()
    return TokenLosses(torch.where(low | high, torch.zeros_like(losses), losses), low, high)
