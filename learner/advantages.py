"""Advantages of one group: one function per estimator and one entry in :data:`ESTIMATORS`.

An estimator gets the rewards of one group, float64 ``[G]``, and returns one advantage per trajectory, float64 ``[G]``.
The advantage of a trajectory is that of each of its sampled tokens, in all of its branches.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from pipeline.config.training import AdvantageConfig
from pipeline.errors import TrainingError

FloatArray = npt.NDArray[np.float64]
Estimator = Callable[[FloatArray, AdvantageConfig], FloatArray]


def grpo(rewards_G: FloatArray, config: AdvantageConfig) -> FloatArray:
    """``(R - mean) / (std + epsilon)`` with the population standard deviation of the group (arXiv:2402.03300, eq. 3).

    Without ``normalize_std`` it is ``R - mean`` (arXiv:2503.20783). A group whose rewards are all equal, and so a
    group of one, has advantage exactly 0.

    >>> grpo(np.array([1.0, 0.0, 0.0, 1.0]), AdvantageConfig(normalize_std=False))
    array([ 0.5, -0.5, -0.5,  0.5])
    """
    if rewards_G.max() == rewards_G.min():
        return np.zeros_like(rewards_G)
    centred = rewards_G - rewards_G.mean()
    scale = float(rewards_G.std()) + config.epsilon if config.normalize_std else 1.0
    return np.asarray(centred / scale, dtype=np.float64)


ESTIMATORS: dict[str, Estimator] = {"grpo": grpo}


def group_advantages(rewards_G: npt.ArrayLike, config: AdvantageConfig) -> FloatArray:
    """Advantages of one group by the configured estimator.

    Raises :class:`TrainingError` for an empty group or a reward that is not finite.
    """
    rewards = np.asarray(rewards_G, dtype=np.float64)
    if rewards.ndim != 1 or len(rewards) == 0 or not np.isfinite(rewards).all():
        raise TrainingError(
            f"expected the finite rewards of at least one trajectory, got {rewards!r}: check the scorer"
        )
    return ESTIMATORS[config.estimator](rewards, config)
