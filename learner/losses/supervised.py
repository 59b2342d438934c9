"""Cross-entropy on sampled tokens of demonstrations: what supervised fine-tuning minimises.

    loss = weight · Σ m · (-log π) / N

m is 1 on the demonstration's own (assistant) tokens, N their number in the whole optimizer step, over all micro-batches
and ranks. So micro-batches just add up, and neither splitting nor order nor padding change the loss. It is the policy
gradient with advantage 1 and no ratio: its gradient does not fade where π is small. Dimension: S tokens.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from learner.data.rows import Row


def cross_entropy(logprobs_S: Tensor, mask_S: Tensor, share: float) -> Tensor:
    """``-share · Σ logprobs`` over the tokens in ``mask_S`` (bool), with gradient; exactly 0 for all others, whatever
    their value. ``share``: weight of the term over N."""
    return -share * torch.where(mask_S, logprobs_S, torch.zeros_like(logprobs_S)).sum()


def is_imported(row: Row) -> bool:
    """Whether the row is a demonstration that the replay stage delivered: nobody recorded log μ of it."""
    return row.replayed and not row.recorded


def imported_share(rows: Sequence[Row], weight: float) -> float:
    """``share`` for the demonstrations among the rows of one optimizer step; 0 without any."""
    n_tokens = sum(row.n_sampled for row in rows if is_imported(row))
    return weight / n_tokens if n_tokens else 0.0
