"""Losses beside the policy loss: cross-entropy on demonstrations, and the critic's squared error.

Cross-entropy on sampled tokens is what supervised fine-tuning minimises:

    loss = weight · Σ m · (-log π) / N

m is 1 on the demonstration's own (assistant) tokens, N their number in the whole optimizer step, over all micro-batches
and ranks. So micro-batches just add up, and neither splitting nor order nor padding change the loss. It is the policy
gradient with advantage 1 and no ratio: its gradient does not fade where π is small.

Dimension: S tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from learner.data.rows import Row


def cross_entropy(logprobs_S: Tensor, mask_S: Tensor, share: float) -> Tensor:
    """``-share · Σ logprobs`` over the tokens in ``mask_S`` (bool), with gradient; exactly 0 for all others, whatever
    their value. ``share``: weight of the term over N."""
    return -share * torch.where(mask_S, logprobs_S, torch.zeros_like(logprobs_S)).sum()


def is_imported(row: Row) -> bool:
    """True if the row is a demonstration from the replay stage without recorded log μ."""
    return row.replayed and not row.recorded


def imported_share(rows: Sequence[Row], weight: float) -> float:
    """``share`` for the demonstrations among the rows of one optimizer step; 0 without any."""
    n_tokens = sum(row.n_sampled for row in rows if is_imported(row))
    return weight / n_tokens if n_tokens else 0.0


@dataclass(frozen=True, slots=True)
class ValueTerms:
    loss: Tensor
    """Scalar, with gradient."""
    clipped: Tensor
    """bool ``[S]``: the clip cut the gradient of the token."""


def value_loss(
    values: Tensor, old_values: Tensor, returns: Tensor, weights: Tensor, mask: Tensor, clip: float | None
) -> ValueTerms:
    """``Σ weight ½ max((V - R)², (V' - R)²)``, V' = V clamped to ± ``clip`` around V before the update
    (arXiv:2005.12729, section 3). Without ``clip``: ``½ (V - R)²``. All ``[S]``, ``mask`` bool; nothing is read
    where it is False.

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
