"""Advantages of an update: the estimators by name or import path, its rows as scored trajectories, and the result back
on the rows.

A new estimator is one function, the class of its options above it, and one entry here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from learner.advantages import estimators
from learner.advantages.base import Estimates, Estimator, ScoredTrajectory, shaped
from learner.advantages.cpo import Cpo, cpo
from learner.advantages.distill import Distill, from_teacher
from learner.data.microbatch import token_offsets
from learner.data.rows import Batch, TokenArray, TokenScores
from pipeline.config.advantages import AdvantageConfig
from pipeline.config.base import Options, by_name
from pipeline.config.load import read_options
from pipeline.errors import ConfigurationError, TrainingError, boundary
from pipeline.runtime.plugins import resolve

SCORES = frozenset({"logprobs", "entropies", "reference", "values", "hinted"})
"""Fields of :class:`learner.data.rows.TokenScores` that the trainer can gather."""


class OwnEstimator(Options, extra="allow"):
    """A user's function by its import path. It reads its options as ``config.estimator.NAME``. A subclass of
    ``pipeline.config.base.Options`` as the function's attribute ``options`` gives them types and defaults."""

    name: str
    """``module:function`` or ``file.py:function``."""
    greedy_rollouts: bool = False
    """Add one greedy rollout (temperature 0) to each group. It is never trained: its reward is the ``baseline`` that
    the function sees."""


OPTIONS = by_name(
    estimators.Grpo, estimators.GroupBaseline, estimators.PassAtK, estimators.Remax, estimators.ReinforcePp,
    estimators.ReinforcePpBaseline, estimators.Gae, Cpo, Distill, OwnEstimator,
)  # fmt: skip
"""Classes of the options by name of the estimator."""
COMPARING = frozenset({"grpo", "rloo", "leave_one_out", "opo", "maxrl", "gpg", "pass_at_k", "reinforce_pp_baseline"})
"""Estimators that only compare the trajectories of a group: a group of one has advantage 0 everywhere."""


@dataclass(frozen=True, slots=True)
class Entry:
    """An estimator and the passes over the update that it needs."""

    estimate: Estimator
    needs: frozenset[str] = frozenset()
    """Names from :data:`SCORES`."""
    own_options: type[Options] | None = None
    """Class of the options of a user's function."""

    def with_options(self, config: AdvantageConfig) -> AdvantageConfig:
        """A copy with the estimator's options in their class. Raises :class:`ConfigurationError`."""
        kinds = OPTIONS if self.own_options is None else {"own": self.own_options}
        return config.model_copy(update={"estimator": read_options(config.estimator, kinds, "advantage.estimator")})


ESTIMATORS: dict[str, Entry] = {
    "grpo": Entry(estimators.by_group(estimators.grpo)),
    "rloo": Entry(estimators.by_group(estimators.rloo)),
    "leave_one_out": Entry(estimators.by_group(estimators.rloo)),
    "opo": Entry(estimators.by_group_and_length(estimators.opo)),
    "maxrl": Entry(estimators.by_group(estimators.maxrl)),
    "gpg": Entry(estimators.gpg),
    "pass_at_k": Entry(estimators.by_group(estimators.pass_at_k)),
    "remax": Entry(estimators.remax),
    "reinforce_pp": Entry(estimators.reinforce_pp),
    "reinforce_pp_baseline": Entry(estimators.reinforce_pp_baseline),
    "gae": Entry(estimators.gae, frozenset({"values"})),
    "cpo": Entry(cpo, frozenset({"logprobs", "entropies", "hinted"})),
    "distill": Entry(from_teacher("reference"), frozenset({"logprobs", "reference"})),
    "self_distill": Entry(from_teacher("hinted"), frozenset({"logprobs", "hinted"})),
}


def entry_of(config: AdvantageConfig) -> Entry:
    """The configured estimator: of this registry, or the user's own.

    A user's function ``estimate(scored, config) -> Estimates`` may have the attributes ``needs``, names of
    :data:`SCORES`, and ``options``, a subclass of :class:`pipeline.config.base.Options`. Raises
    :class:`ConfigurationError` when its path leads to no function or it needs something else.
    """
    name = config.estimator.name
    if name in ESTIMATORS:
        return ESTIMATORS[name]
    read_options(config.estimator, OPTIONS, "advantage.estimator")
    function = resolve(name, "advantage estimator")
    needs = frozenset(getattr(function, "needs", ()))
    if not needs <= SCORES:
        raise ConfigurationError(
            f"advantage estimator {name}: expected needs out of {sorted(SCORES)}, got {sorted(needs)}"
        )
    return Entry(function, needs, getattr(function, "options", None))


def needed_scores(config: AdvantageConfig) -> frozenset[str]:
    """Scores to gather for the configured estimator, out of :data:`SCORES`. Raises as
    :func:`entry_of`."""
    return entry_of(config).needs


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
            hinted = _at(scores.hinted, tokens)
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
                    hinted=None if hinted is None or np.isnan(hinted).all() else hinted,  # NaN: it has no hint
                    penalties=_at(penalties, tokens),
                )
            )
            sequence += 1
    return scored


def _at(array: TokenArray | None, tokens: npt.NDArray[np.int64]) -> npt.NDArray[np.float64] | None:
    return None if array is None else array[tokens].astype(np.float64)


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
