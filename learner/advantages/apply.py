"""Advantages of an update: its rows as scored trajectories, the estimator, and its result back on the rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from learner.advantages.base import Estimates, ScoredTrajectory
from learner.advantages.registry import entry_of
from learner.advantages.rewards import shaped
from learner.data.microbatch import token_offsets
from learner.data.rows import Batch, TokenArray, TokenScores
from pipeline.config.algorithm import AdvantageConfig
from pipeline.errors import TrainingError, boundary


def estimate(scored: Sequence[ScoredTrajectory], config: AdvantageConfig) -> Estimates:
    """Advantages of an update by the configured estimator.

    Raises :class:`TrainingError` without trajectories, or when the estimator gives arrays of other shapes or values
    that are not finite, and :class:`PlugInError` for what it raises.
    """
    if not scored:
        raise TrainingError("expected at least one trajectory to estimate advantages of, got none")
    where = f"advantage.estimator {config.estimator.name}"
    entry = entry_of(config)
    config = entry.with_options(config)
    with boundary(where):
        estimates = entry.estimate(scored, config)
    if not isinstance(estimates, Estimates):
        raise TrainingError(
            f"{where}: expected Estimates (from learner.advantages.base import Estimates), got "
            f"{type(estimates).__name__}: {estimates!r:.200}"
        )
    for name in ("advantages", "returns"):
        arrays = getattr(estimates, name)
        if arrays is None and name == "returns":
            continue
        if not isinstance(arrays, Sequence) or len(arrays) != len(scored):
            raise TrainingError(
                f"{where}: expected {name} as a tuple of {len(scored)} arrays, one for each trajectory, got "
                f"{type(arrays).__name__}: {arrays!r:.200}"
            )
        for p, values in zip(scored, arrays, strict=True):
            shape = getattr(values, "shape", None)
            if shape != (p.n_tokens,) or not np.isfinite(values).all():
                raise TrainingError(
                    f"{where}: expected an array of {p.n_tokens} finite {name}, one for each trained token, got "
                    f"{type(values).__name__} {values!r:.200}"
                )
    return estimates


def with_advantages(
    batch: Batch,
    scores: TokenScores,
    config: AdvantageConfig,
    penalties: TokenArray | None = None,
    turn_weight: float = 1.0,
) -> tuple[Batch, TokenScores]:
    """The batch with estimated advantages, and the scores with the returns where the estimator gives some.

    Fresh and replayed trajectories of a group are estimated together, from the rewards as ``advantage`` shapes them.
    ``penalties`` float32 ``[S]`` by token number: taken off the rewards (a KL penalty times its coefficient).
    ``turn_weight``: factor on the environment's turn rewards.
    The whole update must be given at once: groups and whitening go over all of it. Raises :class:`TrainingError`.
    """
    scored = shaped(scored_of(batch, scores, penalties, turn_weight), batch.trajectories, config)
    estimates = estimate(scored, config)
    advantages = _by_token(batch, estimates.advantages)
    first = token_offsets(batch.rows)
    rows = tuple(
        replace(row, advantages=advantages[at : at + row.n_sampled]) for row, at in zip(batch.rows, first, strict=True)
    )
    returns = None if estimates.returns is None else _by_token(batch, estimates.returns)
    return replace(batch, rows=rows), replace(scores, returns=returns)


def scored_of(
    batch: Batch, scores: TokenScores, penalties: TokenArray | None = None, turn_weight: float = 1.0
) -> list[ScoredTrajectory]:
    """One for each trajectory of the batch, by ``Row.trajectory_index``, with its rewards as they were given."""
    numbers = _tokens_of_sequences(batch)
    turns = np.concatenate([row.turns[row.loss_mask] for row in batch.rows])
    behaviour = np.concatenate([row.behaviour_logprobs[row.loss_mask] for row in batch.rows]).astype(np.float64)
    scored = []
    sequence = 0
    for g, group in enumerate(batch.groups):
        for trajectory in group.trajectories:
            if trajectory.reward is None:
                raise TrainingError(
                    f"expected a reward on {trajectory.trajectory_id}, got None: only scored groups are dispatched"
                )
            tokens = numbers[sequence]
            scored.append(
                ScoredTrajectory(
                    group=g,
                    reward=trajectory.reward,
                    turns=turns[tokens].astype(np.int32),
                    turn_rewards=tuple(turn_weight * r for r in trajectory.turn_rewards or ()),
                    baseline=group.plan.baseline,
                    replayed=group.is_replayed(trajectory),
                    behaviour=behaviour[tokens] if trajectory.recorded else None,
                    logprobs=_at(scores.logprobs, tokens),
                    reference=_at(scores.reference, tokens),
                    entropies=_at(scores.entropies, tokens),
                    values=_at(scores.values, tokens),
                    hinted=_unless_missing(_at(scores.hinted, tokens)),
                    penalties=_at(penalties, tokens),
                )
            )
            sequence += 1
    return scored


def _at(array: TokenArray | None, tokens: npt.NDArray[np.int64]) -> npt.NDArray[np.float64] | None:
    return None if array is None else array[tokens].astype(np.float64)


def _unless_missing(array: npt.NDArray[np.float64] | None) -> npt.NDArray[np.float64] | None:
    """None where all is NaN: the trajectory has no hint."""
    return None if array is None or np.isnan(array).all() else array


def _tokens_of_sequences(batch: Batch) -> list[npt.NDArray[np.int64]]:
    """Token numbers of each trajectory, int64 ``[S]`` each, its branches one after the other."""
    trajectory_index_S = np.repeat([row.trajectory_index for row in batch.rows], [row.n_sampled for row in batch.rows])
    order = np.argsort(trajectory_index_S, kind="stable")
    counts = np.bincount(trajectory_index_S, minlength=len(batch.trajectories))
    return np.split(order, np.cumsum(counts)[:-1])


def _by_token(batch: Batch, parts: tuple[npt.NDArray[np.float64], ...]) -> TokenArray:
    """Values of each trajectory's tokens at their numbers in the update, float32."""
    out = np.zeros(batch.n_sampled, dtype=np.float32)
    for tokens, values in zip(_tokens_of_sequences(batch), parts, strict=True):
        out[tokens] = values
    return out
