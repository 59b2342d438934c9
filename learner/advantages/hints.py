"""CPO: groups that all failed learn from how likely their tokens are once the prompt holds a hint."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from learner.advantages.base import Estimates, FloatArray, Played, groups_of, needed
from learner.advantages.group import by_group, grpo
from learner.advantages.rewards import total
from pipeline.config.advantage import AdvantageConfig
from pipeline.errors import TrainingError

LOG_RATIO_MAX = 20.0
"""``g - o`` is clamped to ± this; with ``exp(g)`` at most 1 the signal is bounded by it."""


def cpo(played: Sequence[Played], config: AdvantageConfig) -> Estimates:
    """GRPO, and in groups that all failed a dense signal: ``A_t = A_grpo + d · w · ĥ_t · MI_t``.

    ``MI_t = exp(g_t) (g_t - o_t)`` with g the log-probability of the token where the prompt holds a hint and o without
    one: positive on tokens that the hint makes likelier. ``ĥ_t`` is the token's entropy over the largest of its group.
    ``d`` is the difficulty of the group by its mean reward: +1 failed, 0 between, -1 solved; ``w`` is
    ``cpo_failed_weight`` or ``cpo_solved_weight``. In between, no hint is looked at; a trajectory without a hint (its
    environment gives none, it was played with lessons, or the hint did not fit) has no dense signal.
    """
    advantages = list(by_group(grpo)(played, config).advantages)
    for members in groups_of(played):
        group = [played[i] for i in members]
        sign = difficulty(np.asarray([total(p) for p in group]), config)
        weight = sign * (config.cpo_failed_weight if sign > 0 else config.cpo_solved_weight)
        if not weight:
            continue
        entropies = [np.maximum(needed(p, "entropies", "cpo"), 0.0) for p in group]
        largest = max(float(h.max()) for h in entropies)
        for i, p, entropy in zip(members, group, entropies, strict=True):
            if p.hinted is None:
                continue
            scale = entropy / largest if largest > 0 else np.zeros_like(entropy)
            advantages[i] = advantages[i] + weight * scale * hint_information(p)
    return Estimates(tuple(advantages))


def difficulty(rewards_G: FloatArray, config: AdvantageConfig) -> int:
    """+1 failed, 0 between, -1 solved, by the group's mean reward."""
    mean = float(rewards_G.mean())
    return 1 if mean <= config.cpo_failed_mean else -1 if mean >= config.cpo_solved_mean else 0


def hint_information(p: Played) -> FloatArray:
    """``exp(g) (g - o)`` ``[S]``, 0 where g is -inf. Raises :class:`TrainingError` for NaN or log-probabilities above
    0 by more than rounding."""
    g, o = _logprobs(p, "hinted"), _logprobs(p, "logprobs")
    possible = np.isfinite(g)
    safe = np.where(possible, g, 0.0)
    return np.where(possible, np.exp(safe) * np.clip(safe - o, -LOG_RATIO_MAX, LOG_RATIO_MAX), 0.0)


def _logprobs(p: Played, name: str) -> FloatArray:
    array: FloatArray | None = getattr(p, name)
    if array is None or np.isnan(array).any() or (array > 1e-3).any():
        raise TrainingError(f"expected {name} (log-probabilities <= 0) for the estimator cpo, got {array!r}")
    return np.minimum(array, 0.0)
