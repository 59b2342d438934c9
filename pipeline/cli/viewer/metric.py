"""Values that comparisons of runs are made by, with the defaults and words of each."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum


class Metric(StrEnum):
    """Value of a learning curve."""

    SUCCESS = "success"
    """Share of the training rollouts with a reward of at least ``replay.success_threshold``, of those that the replay
    stage received during the update. An update without any is no point of the curve."""
    REWARD = "reward"
    """Mean reward of the fresh trajectories of the update."""
    EVAL = "eval"
    """Score of the evaluations on held-out tasks."""


WINDOWS: Mapping[Metric, int] = {Metric.SUCCESS: 5, Metric.REWARD: 5, Metric.EVAL: 1}
"""Default number of points whose mean is compared with a target."""
TARGETS: Mapping[Metric, str] = {
    Metric.SUCCESS: "a success rate of", Metric.REWARD: "a mean reward of", Metric.EVAL: "a score of",
}  # fmt: skip
"""Words for a target."""
