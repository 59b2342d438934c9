"""Corrections of off-policy tokens: importance weights, rejections, M2PO's mask, the ESS guard's step factor.

Weights and rejections come from r = π_prox/μ: μ is the policy that the engine sampled from, π_prox that of the learner
before the first optimizer step, so r holds the engine's numerical mismatch and the staleness of its weights. By level:
``token`` is r of the token, ``sequence`` the product of r over the tokens of its row, ``geometric`` that to the power
of 1 over their number.

    weight   min(r, max)             truncated importance sampling (Ionides 2008; arXiv:2505.24298 for tokens)
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
from learner.observability.statistics import Weights

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


def corrections(
    proximal: Tensor, behaviour: Tensor, weighed: Tensor, maskable: Tensor, rows: Tensor | None, rules: LossRules
) -> Correction:
    """Weights and rejections of the tokens of a micro-batch.

    ``proximal`` and ``behaviour``: log π_prox and log μ. ``weighed``, ``maskable``: bool ``[S]``, the tokens that get a
    weight, or may be rejected. Rows are taken over those.
    """
    ones, reasons = torch.ones_like(proximal), torch.zeros_like(weighed, dtype=torch.int8)
    weights, truncated = ones, torch.zeros_like(weighed)
    if rules.decoupled and rules.weight != "none":
        raw = _ratio(proximal, behaviour, weighed, rows, rules.weight, rules)
        weights = torch.where(weighed, raw.clamp(max=rules.weight_max), ones)
        truncated = weighed & (raw > rules.weight_max)
    for mask in rules.masks:
        level = "token" if mask.level == "any_token" else mask.level
        ratio = _ratio(proximal, behaviour, maskable, rows, level, rules)
        outside = maskable & (ratio < mask.low)
        if mask.high is not None:
            outside |= maskable & (ratio > mask.high)
        if mask.level == "any_token":
            outside = maskable & RowSums(rows, maskable).any(outside)
        reasons = torch.where((reasons == 0) & outside, reasons.new_tensor(_CODES[mask.level]), reasons)
    return Correction(weights.detach(), truncated, reasons)


def _ratio(
    proximal: Tensor, behaviour: Tensor, valid: Tensor, rows: Tensor | None, level: str, rules: LossRules
) -> Tensor:
    """r of each token at a level, ``[S]``; 1 where not ``valid``."""
    d = log_ratio(proximal, behaviour, valid, rules.log_ratio_max).detach()
    if level == "sequence":
        d = RowSums(rows, valid).sum(d).clamp(-rules.log_ratio_max, rules.log_ratio_max)
    elif level == "geometric":
        d = RowSums(rows, valid).mean(d)
    return torch.where(valid, d, torch.zeros_like(d)).exp()


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


def token_weights_of(
    logprobs_S: npt.ArrayLike, behaviour_S: npt.ArrayLike, chosen_S: npt.NDArray[np.bool_], log_ratio_max: float
) -> Weights:
    """Ratios π/μ of the chosen tokens, clamped in log as in the loss."""
    d = np.asarray(logprobs_S, np.float64)[chosen_S] - np.asarray(behaviour_S, np.float64)[chosen_S]
    return Weights.of(np.exp(np.clip(d, -log_ratio_max, log_ratio_max)))


def step_factor(ess_ratio: float | None, target: float) -> float:
    """Factor of the ESS guard on the learning rate: ``sqrt(min(1, ESS / target))``; 1 where no ratio is known.

    >>> step_factor(0.125, 0.5), step_factor(0.9, 0.5), step_factor(None, 0.5)
    (0.5, 1.0, 1.0)
    """
    return 1.0 if ess_ratio is None else math.sqrt(min(1.0, ess_ratio / target))
