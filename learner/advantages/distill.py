"""Distillation on the policy's own rollouts: a teacher scores the sampled tokens, and its log-ratio is the advantage.

In expectation over a token that the policy sampled, ``∇ log π · (log π_T - log π)`` is ``-∇ KL(π‖π_T)`` of that
token's distribution: the reverse KL of each token at once, with a discount of 0 (Agarwal et al., arXiv:2306.13649; Gu
et al., arXiv:2306.08543; Lu et al. 2025, "On-Policy Distillation").

Dimension: S trained tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np
from pydantic import Field

from learner.advantages.base import Estimates, Estimator, FloatArray, ScoredTrajectory, groups_of, logprobs_of, needed
from learner.advantages.estimators import Normalized, by_group, grpo
from learner.observability.statistics import LOG_RATIO_MAX
from pipeline.config.advantages import AdvantageConfig


class Distill(Normalized):
    """``distill``: the teacher is the policy of ``learner.reference``. ``self_distill``: it is the policy itself, with
    the environment's hint in its prompt (arXiv:2601.20802)."""

    name: Literal["distill", "self_distill"]
    reward_weight: float = Field(0.0, ge=0)
    """Weight of GRPO's advantage beside the teacher's. 0: rewards are not trained on."""


def from_teacher(teacher: Literal["reference", "hinted"]) -> Estimator:
    """``A_t = l_t - b + reward_weight · A_grpo`` with ``l_t = log π_T - log π``, clamped to ± ``LOG_RATIO_MAX``. The
    score ``teacher`` is log π_T; a trajectory without a hint has GRPO's part alone.

    ``b`` is the mean of ``l`` over the tokens of the other trajectories of the group, 0 without others: like every
    baseline that does not depend on the trajectory itself, it lowers the noise and leaves the expectation.
    """

    def log_ratio(p: ScoredTrajectory, name: str) -> FloatArray:
        difference = logprobs_of(p, teacher, name) - needed(p, "logprobs", name)
        return np.clip(difference, -LOG_RATIO_MAX, LOG_RATIO_MAX)

    def estimate(scored: Sequence[ScoredTrajectory], config: AdvantageConfig) -> Estimates:
        options = config.options_of(Distill)
        advantages = [options.reward_weight * a for a in by_group(grpo)(scored, config).advantages]
        for members in groups_of(scored):
            taught = [i for i in members if teacher == "reference" or scored[i].hinted is not None]
            ratios = {i: log_ratio(scored[i], options.name) for i in taught}
            for i, own in ratios.items():
                others = [ratio for j, ratio in ratios.items() if j != i]
                advantages[i] = advantages[i] + own - (np.concatenate(others).mean() if others else 0.0)
        return Estimates(tuple(advantages))

    return estimate
