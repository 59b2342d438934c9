"""KL to the reference policy: its estimators, and the penalty on rewards.

KL(π‖π_ref) to a reference policy is estimated with d = log π - log π_ref at a token that π sampled (Schulman 2020,
"Approximating KL divergence"):

    k1  d                   unbiased, of both signs
    k2  d² / 2              its expected gradient is that of the KL (arXiv:2510.01555)
    k3  exp(-d) - 1 + d     unbiased, never negative (DeepSeekMath's term, arXiv:2402.03300)

A plus (``k1+``, ``k3+``) is straight-through: that value, with the gradient of k2.

Dimension: S tokens.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from learner.observability.statistics import LOG_RATIO_MAX
from pipeline.errors import TrainingError


def kl_terms(log_ratio_S: Tensor, estimator: str) -> Tensor:
    """The estimate of each token, nats, with gradient; ``log_ratio_S`` is d, clamped. Raises :class:`TrainingError`."""
    d = log_ratio_S
    if estimator.endswith("+"):
        half = 0.5 * d.square()
        return kl_terms(d.detach(), estimator[:-1]) + (half - half.detach())
    if estimator == "k1":
        return d
    if estimator == "k2":
        return 0.5 * d.square()
    if estimator == "k3":
        return torch.expm1(-d) + d
    raise TrainingError(f"expected a KL estimator (k1, k2, k3, k1+ or k3+), got {estimator!r}")


def kl_penalty(
    logprobs_S: npt.ArrayLike, reference_S: npt.ArrayLike, coefficient: float, estimator: str = "k1"
) -> npt.NDArray[np.float64]:
    """Penalty on each token's reward, ``coefficient · estimate`` (arXiv:1909.08593, section 2.2), float64
    ``[S]``; 0 where the reference has no finite log-probability.
    """
    d = np.asarray(logprobs_S, np.float64) - np.asarray(reference_S, np.float64)
    d = np.clip(np.where(np.isfinite(d), d, 0.0), -LOG_RATIO_MAX, LOG_RATIO_MAX)
    estimate = kl_terms(torch.from_numpy(d), estimator.removesuffix("+")).numpy()
    return np.asarray(coefficient * estimate, dtype=np.float64)
