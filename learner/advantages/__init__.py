"""Advantage estimators: one function each, and one entry in :data:`ESTIMATORS`."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from learner.advantages.base import Estimates, Estimator, Played, by_group
from learner.advantages.group import grpo
from pipeline.config.advantage import AdvantageConfig
from pipeline.errors import TrainingError

__all__ = ["ESTIMATORS", "Estimates", "Played", "estimate"]

ESTIMATORS: dict[str, Estimator] = {"grpo": by_group(grpo)}


def estimate(played: Sequence[Played], config: AdvantageConfig) -> Estimates:
    """Advantages of an update by the configured estimator.

    Raises :class:`TrainingError` without trajectories, or when the estimator gives arrays of other shapes or values
    that are not finite.
    """
    if not played:
        raise TrainingError("expected at least one trajectory to estimate advantages of, got none")
    estimates = ESTIMATORS[config.estimator](played, config)
    for p, advantages in zip(played, estimates.advantages, strict=True):
        if advantages.shape != (p.n_tokens,) or not np.isfinite(advantages).all():
            raise TrainingError(
                f"expected {p.n_tokens} finite advantages from the estimator {config.estimator}, got {advantages!r}"
            )
    return estimates
