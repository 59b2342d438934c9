"""Corrections of off-policy tokens: importance weights, rejections, M2PO's mask, the ESS guard's step factor.

Weights and rejections come from r = π_prox/μ: μ is the policy that the engine sampled from, π_prox that of the learner
before the first optimizer step, so r holds the engine's numerical mismatch and the staleness of its weights. By level:
``token`` is r of the token, ``sequence`` the product of r over the tokens of a sequence, ``geometric`` that to the
power of 1 over their number. The sequence of a weight is the trajectory with all of its rows, that of a mask the row.

    weight   min(r, max)              truncated importance sampling (Ionides 2008; arXiv:2505.24298 for tokens)
             r^k exp(lambda (1 - r))  soft, for replayed tokens; k and lambda by the sign of A (VESPO, arXiv:2602.10693)
    mask     0 unless low ≤ r ≤ high  masked importance sampling; two-sided for tokens: IcePop (arXiv:2510.18855)

Each log-ratio is clamped to ± ``log_ratio_max`` before it is summed, and the sum again. Masked out tokens count neither
in the loss nor in a row's ratio there; in the ratios here they do, so that the order of masks changes nothing.

Dimensions: S sampled tokens of a micro-batch, N off-policy tokens of an optimizer step.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from learner.losses.base import LossRules, RowSums, log_ratio
from learner.losses.options import SoftCorrection, TruncatedCorrection

REASONS = ("", "ratio_cap", "sequence_mask", "geometric_mask", "any_token_mask")
"""Reasons for rejecting a token, by the code in ``Correction.reasons``; code 0: not rejected."""
_CODES = {"token": 1, "sequence": 2, "geometric": 3, "any_token": 4}


@dataclass(frozen=True, slots=True)
class Correction:
    """``[S]``, without gradient."""

    weights: Tensor
    """Multiplies the loss; 1 where nothing is corrected."""
    truncated: Tensor
    """bool: the weight was cut at its maximum."""
    reasons: Tensor
    """int8: code into :data:`REASONS`."""


@dataclass(frozen=True, slots=True)
class OtherRows:
    """Sums over the tokens that a token's trajectory has in other rows, float64 ``[S]``. These rows may be in other
    micro-batches or on other ranks."""

    log_ratios: Tensor
    """Sum of the clamped log-ratios log r."""
    counts: Tensor
    """Number of the tokens."""


@dataclass(frozen=True, slots=True)
class RatioInputs:
    """Tensors ``[S]`` that r of every level is made of."""

    proximal: Tensor
    """log π_prox."""
    behaviour: Tensor
    """log μ."""
    rows: Tensor | None
    """Row of each token, for levels over sequences."""
    others: OtherRows | None
    """None: every trajectory has one row."""
    log_ratio_max: float

    def ratio(self, level: str, valid: Tensor, *, trajectory: bool) -> Tensor:
        """r of each token at a level; 1 where not ``valid``. ``trajectory``: over all rows of the trajectory, else over
        the valid tokens of the token's row."""
        d = log_ratio(self.proximal, self.behaviour, valid, self.log_ratio_max).detach()
        if level in ("sequence", "geometric"):
            sums = RowSums(self.rows, valid)
            total, count = sums.sum(d.double()), sums.sum(torch.ones_like(d, dtype=torch.float64))
            if trajectory and self.others is not None:
                total, count = total + self.others.log_ratios, count + self.others.counts
            total = total / count.clamp(min=1.0) if level == "geometric" else total
            d = total.clamp(-self.log_ratio_max, self.log_ratio_max).to(d.dtype)
        return torch.where(valid, d, torch.zeros_like(d)).exp()


def corrections(
    inputs: RatioInputs, fresh: Tensor, replayed: Tensor, maskable: Tensor, advantages: Tensor, rules: LossRules
) -> Correction:
    """Weights and rejections of the tokens of a micro-batch.

    ``fresh``, ``replayed``: bool ``[S]``, the tokens that get the weight of fresh, or of replayed tokens. ``maskable``:
    those that may be rejected. Sequences are taken over those.
    """
    weights, reasons = torch.ones_like(inputs.proximal), torch.zeros_like(fresh, dtype=torch.int8)
    truncated = torch.zeros_like(fresh)
    form = rules.replay_correction
    if rules.decoupled and rules.weight != "none":
        raw = inputs.ratio(rules.weight, fresh, trajectory=True)
        weights = torch.where(fresh, raw.clamp(max=rules.weight_max), weights)
        truncated = fresh & (raw > rules.weight_max)
    if isinstance(form, TruncatedCorrection):
        raw = inputs.ratio(form.name, replayed, trajectory=True)
        highest = math.inf if form.max is None else form.max
        weights = torch.where(replayed, raw.clamp(max=highest), weights)
        truncated = truncated | (replayed & (raw > highest))
    elif isinstance(form, SoftCorrection):
        raw = inputs.ratio("sequence", replayed, trajectory=True)
        weights = torch.where(replayed, soft_weights(raw, advantages, form), weights)
    for mask in rules.masks:
        level = "token" if mask.level == "any_token" else mask.level
        ratio = inputs.ratio(level, maskable, trajectory=False)
        outside = maskable & (ratio < mask.low)
        if mask.high is not None:
            outside |= maskable & (ratio > mask.high)
        if mask.level == "any_token":
            outside = maskable & RowSums(inputs.rows, maskable).any(outside)
        reasons = torch.where((reasons == 0) & outside, reasons.new_tensor(_CODES[mask.level]), reasons)
    return Correction(weights.detach(), truncated, reasons)


def soft_weights(ratios_S: Tensor, advantages_S: Tensor, form: SoftCorrection) -> Tensor:
    """``W^k exp(lambda (1 - W))``, k and lambda by the sign of A, ``[S]``: 1 at W = 1, largest at ``W = k / lambda``
    (VESPO, arXiv:2602.10693)."""
    up = advantages_S >= 0
    k = torch.where(up, ratios_S.new_tensor(form.k_positive), ratios_S.new_tensor(form.k_negative))
    rate = torch.where(up, ratios_S.new_tensor(form.lambda_positive), ratios_S.new_tensor(form.lambda_negative))
    return (torch.xlogy(k, ratios_S) + rate * (1.0 - ratios_S)).exp()


def second_moment_mask(log_ratios_N: npt.ArrayLike, second_moment_max: float) -> npt.NDArray[np.bool_]:
    """Mask of the tokens that stay, bool ``[N]``: their ``mean((log π/μ)²)`` is at most ``second_moment_max``.

    As few as possible go, those with the largest squares first (M2PO, arXiv:2510.01161). Tokens with equal squares stay
    or go together, so the order changes nothing; values that are not finite go.

    >>> second_moment_mask([0.1, -2.0, 0.2, 0.1], 0.04)
    array([ True, False,  True,  True])
    """
    squares = np.square(np.asarray(log_ratios_N, dtype=np.float64))
    squares = np.where(np.isfinite(squares), squares, np.inf)
    ordered = np.sort(squares)
    means = np.cumsum(ordered) / np.arange(1, len(ordered) + 1)
    count = int(np.searchsorted(means > second_moment_max, True))
    return squares < ordered[count] if count < len(ordered) else np.ones(len(ordered), dtype=np.bool_)


def step_factor(ess_ratio: float | None, target: float) -> float:
    """Factor of the ESS guard on the learning rate: ``sqrt(min(1, ESS / target))``; 1 where no ratio is known.

    >>> step_factor(0.125, 0.5), step_factor(0.9, 0.5), step_factor(None, 0.5)
    (0.5, 1.0, 1.0)
    """
    return 1.0 if ess_ratio is None else math.sqrt(min(1.0, ess_ratio / target))
