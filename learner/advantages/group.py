"""Advantages from the outcomes of one group: rewards ``[G]`` in, one advantage per trajectory ``[G]`` out."""

from __future__ import annotations

import numpy as np

from learner.advantages.base import FloatArray
from pipeline.config.advantage import AdvantageConfig


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
