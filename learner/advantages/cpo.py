"""CPO: failed groups learn from the likelihood of their tokens when the prompt has a hint.

Dimensions: G trajectories of a group, S trained tokens.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Literal

import numpy as np
from pydantic import Field, model_validator

from learner.advantages.base import Estimates, FloatArray, ScoredTrajectory, groups_of, logprobs_of, needed
from learner.advantages.estimators import Normalized, by_group, grpo
from learner.data.microbatch import token_offsets
from learner.data.rows import Batch, Row, TokenArray, trajectory_rows, with_contexts
from learner.observability.statistics import LOG_RATIO_MAX
from pipeline.config.advantages import AdvantageConfig
from pipeline.errors import TrainingError

log = logging.getLogger(__name__)


class Cpo(Normalized):
    """GRPO with a dense signal for failed groups: how much more likely a hint makes each sampled token."""

    name: Literal["cpo"] = "cpo"
    failed_mean: float = 0.0
    """A group with a mean reward of at most this has failed (difficulty +1)."""
    solved_mean: float = 1.0
    """A group with a mean reward of at least this is solved (difficulty -1)."""
    failed_weight: float = Field(1.0, ge=0)
    """Weight of the dense signal in failed groups."""
    solved_weight: float = Field(0.0, ge=0)
    """Weight of the dense signal in solved groups, where its sign is reversed. 0: none."""

    @model_validator(mode="after")
    def _failed_below_solved(self) -> Cpo:
        if self.failed_mean >= self.solved_mean:
            raise ValueError(f"failed_mean ({self.failed_mean}) must be below solved_mean ({self.solved_mean})")
        return self


def cpo(scored: Sequence[ScoredTrajectory], config: AdvantageConfig) -> Estimates:
    """GRPO, and in groups that all failed a dense signal: ``A_t = A_grpo + d · w · ĥ_t · MI_t``.

    ``MI_t = exp(g_t) (g_t - o_t)`` with g the log-probability of the token where the prompt holds a hint and o without
    one: positive on tokens that the hint makes likelier. ``ĥ_t`` is the token's entropy over the largest of its group.
    ``d`` is the difficulty of the group by its mean reward, without KL penalties, which are of both signs: +1 failed, 0
    between, -1 solved; ``w`` is ``failed_weight`` or ``solved_weight``. In between, no hint is looked at; a trajectory
    without a hint (its environment gives none, its prompt held lessons, or the hint did not fit) has no dense signal.
    """
    options = config.options_of(Cpo)
    advantages = list(by_group(grpo)(scored, config).advantages)
    for members in groups_of(scored):
        group = [scored[i] for i in members]
        sign = difficulty(np.asarray([p.reward for p in group]), options)
        weight = sign * (options.failed_weight if sign > 0 else options.solved_weight)
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


def difficulty(rewards_G: FloatArray, options: Cpo) -> int:
    """+1 failed, 0 between, -1 solved, by the group's mean reward."""
    mean = float(rewards_G.mean())
    return 1 if mean <= options.failed_mean else -1 if mean >= options.solved_mean else 0


def hint_information(p: ScoredTrajectory) -> FloatArray:
    """``exp(g) (g - o)`` ``[S]``, 0 where g is -inf; ``g - o`` is clamped to ± ``LOG_RATIO_MAX``. Raises
    :class:`TrainingError` as :func:`logprobs_of`."""
    g, o = logprobs_of(p, "hinted", "cpo"), logprobs_of(p, "logprobs", "cpo")
    possible = np.isfinite(g)
    safe = np.where(possible, g, 0.0)
    return np.where(possible, np.exp(safe) * np.clip(safe - o, -LOG_RATIO_MAX, LOG_RATIO_MAX), 0.0)


def counterfactual_logprobs(batch: Batch, score: Callable[[Sequence[Row]], TokenArray]) -> TokenArray:
    """float32 ``[S]`` by token number; NaN at tokens of trajectories without a hint.

    ``score`` gives log π of all sampled tokens of rows, in order. Raises :class:`TrainingError` where the hinted rows
    of a trajectory do not sample what its own rows do.
    """
    out = np.full(batch.n_sampled, np.nan, dtype=np.float32)
    rows_of: dict[int, list[int]] = {}
    for i, row in enumerate(batch.rows):
        rows_of.setdefault(row.trajectory_index, []).append(i)
    numbers = token_offsets(batch.rows)
    rows: list[Row] = []
    tokens = []
    sequence = 0
    for group in batch.groups:
        for trajectory in group.trajectories:
            if trajectory.hinted_contexts:
                replay = group.stored_rollout(trajectory) if group.is_replayed(trajectory) else None
                with_hint = with_contexts(trajectory, trajectory.hinted_contexts)
                hinted = trajectory_rows(with_hint, sequence, replay)
                own = [batch.rows[i] for i in rows_of[sequence]]
                ids, expected = ([row.token_ids[row.loss_mask].tolist() for row in part] for part in (hinted, own))
                if ids != expected:
                    raise TrainingError(
                        f"expected {trajectory.trajectory_id} to sample the same tokens with the hint as without"
                    )
                rows += hinted
                tokens += [np.arange(numbers[i], numbers[i] + batch.rows[i].n_sampled) for i in rows_of[sequence]]
            sequence += 1
    if rows:
        out[np.concatenate(tokens)] = score(rows)
    else:
        log.warning("no trajectory of update %d has a hint: set Episode.hint in the environment", batch.update)
    return out
