"""Losses of off-policy tokens that have no clip. Float ``[S]``."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from learner.losses.clip import dual_clipped


def bounded(ratio_S: Tensor, advantages_S: Tensor, dual_clip: float | None) -> Tensor:
    """``-A ρ`` with the dual clip alone: M2PO's loss (arXiv:2510.01161), whose mask is taken beforehand."""
    return dual_clipped(-advantages_S * ratio_S, advantages_S, dual_clip)


def shaped(log_ratio_S: Tensor, advantages_S: Tensor, beta: float) -> Tensor:
    """``-A ρ / (ρ + β)`` (LUFFY, arXiv:2504.14945; ExGRPO, arXiv:2510.02245), as ``-A sigmoid(log ρ - log β)``, which
    does not overflow. At most |A|, so the dual clip never binds."""
    return -advantages_S * torch.sigmoid(log_ratio_S - math.log(beta))
