"""The learning rate of an update: a pure function, so there is no state to save."""

from __future__ import annotations

import math

from pipeline.config.learner import LearnerConfig


def learning_rate(update: int, config: LearnerConfig, total_steps: int) -> float:
    """Learning rate of update ``update`` (counted from 0).

    Rises linearly over ``warmup_steps`` updates to ``learning_rate``, then stays, or falls to 0 at ``total_steps``.

    >>> config = LearnerConfig(learning_rate=1.0, warmup_steps=2, schedule="linear")
    >>> [learning_rate(u, config, 6) for u in range(6)]
    [0.5, 1.0, 1.0, 0.75, 0.5, 0.25]
    """
    if update < config.warmup_steps:
        return config.learning_rate * (update + 1) / config.warmup_steps
    span = max(1, total_steps - config.warmup_steps)
    done = min(1.0, (update - config.warmup_steps) / span)
    if config.schedule == "linear":
        return config.learning_rate * (1.0 - done)
    if config.schedule == "cosine":
        return config.learning_rate * 0.5 * (1.0 + math.cos(math.pi * done))
    return config.learning_rate
