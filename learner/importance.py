"""Importance ratios: where first, then clamp, then exp, so that nothing masked and nothing extreme reaches a gradient.

All tensors are over the sampled tokens, ``[S]``. μ sampled the token, π_old anchors the clip, π is being trained.
"""

from __future__ import annotations

import torch
from torch import Tensor


def log_ratio(new_S: Tensor, old_S: Tensor, valid_S: Tensor, log_ratio_max: float) -> Tensor:
    """``log new - log old``, clamped to ± ``log_ratio_max`` nats; exactly 0 (ratio 1, no gradient) where not ``valid``.

    Whatever stands at invalid positions (NaN, ±inf) reaches neither the value nor the gradient.
    """
    zero = torch.zeros((), dtype=new_S.dtype, device=new_S.device)
    difference = torch.where(valid_S, new_S, zero) - torch.where(valid_S, old_S, zero)
    return difference.clamp(-log_ratio_max, log_ratio_max)
