"""Advantage estimators: one function each, and one entry in :data:`ESTIMATORS`."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from learner.advantages.base import Estimates, Estimator, Played, spread
from learner.advantages.group import by_group
from learner.advantages.registry import ESTIMATORS, EVIDENCE, Entry, entry_of, needed_evidence
from pipeline.config.advantage import AdvantageConfig
from pipeline.errors import TrainingError

__all__ = [
    "ESTIMATORS",
    "EVIDENCE",
    "Entry",
    "Estimates",
    "Estimator",
    "Played",
    "by_group",
    "estimate",
    "needed_evidence",
    "spread",
]


def estimate(played: Sequence[Played], config: AdvantageConfig) -> Estimates:
    """Advantages of an update by the configured estimator.

    Raises :class:`TrainingError` without trajectories, or when the estimator gives arrays of other shapes or values
    that are not finite.
    """
    if not played:
        raise TrainingError("expected at least one trajectory to estimate advantages of, got none")
    estimates = entry_of(config).estimate(played, config)
    for name in ("advantages", "returns"):
        arrays = getattr(estimates, name)
        if arrays is None and name == "returns":
            continue
        if len(arrays) != len(played):
            raise TrainingError(
                f"expected {name} of {len(played)} trajectories from the estimator {config.estimator}, got "
                f"{len(arrays)}"
            )
        for p, values in zip(played, arrays, strict=True):
            if values.shape != (p.n_tokens,) or not np.isfinite(values).all():
                raise TrainingError(
                    f"expected {p.n_tokens} finite {name} from the estimator {config.estimator}, got {values!r}"
                )
    return estimates
