"""The critic's loss."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class ValueTerms:
    loss: Tensor
    """Scalar, with gradient."""
    clipped: Tensor
    """bool ``[S]``: the clip cut the gradient of the token."""


def value_loss(
    values: Tensor, old_values: Tensor, returns: Tensor, weights: Tensor, mask: Tensor, clip: float | None
) -> ValueTerms:
    """``Σ weight ½ max((V - R)², (V' - R)²)``, V' = V kept within ± ``clip`` of V before the update (arXiv:2005.12729,
    section 3). Without ``clip``: ``½ (V - R)²``. All ``[S]``, ``mask`` bool; nothing at mask 0 is read.

    ``weights`` are the token's shares of the optimizer step, as in the policy loss: micro-batches add up.
    """
    zero = torch.zeros_like(values)
    v, old, r = (torch.where(mask, x, zero) for x in (values, old_values.to(values.dtype), returns.to(values.dtype)))
    loss = (v - r).square()
    clipped = torch.zeros_like(mask)
    if clip is not None:
        bounded = old + (v - old).clamp(-clip, clip)
        other = (bounded - r).square()
        clipped = mask & ((v - old).detach().abs() > clip) & (other > loss).detach()
        loss = torch.maximum(loss, other)
    return ValueTerms((torch.where(mask, weights.to(values.dtype), zero) * 0.5 * loss).sum(), clipped)
