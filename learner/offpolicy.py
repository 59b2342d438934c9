"""Two reactions to what is far off-policy: a mask on tokens, and a smaller step. Pure numpy, float64."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from learner.statistics import Weights


def second_moment_mask(log_ratios_N: npt.ArrayLike, second_moment_max: float) -> npt.NDArray[np.bool_]:
    """Which tokens stay so that ``mean((log π/μ)²)`` of those that stay is at most ``second_moment_max``; bool ``[N]``.

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
    """What the ESS guard multiplies the learning rate with: ``sqrt(min(1, ESS / target))``; 1 where no ratio is known.

    >>> step_factor(0.125, 0.5), step_factor(0.9, 0.5), step_factor(None, 0.5)
    (0.5, 1.0, 1.0)
    """
    return 1.0 if ess_ratio is None else math.sqrt(min(1.0, ess_ratio / target))
