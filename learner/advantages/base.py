"""Interface of the advantage estimators: scored trajectories in, advantages out. Numpy, float64, no gradient.

Dimensions: N trajectories of an update, G trajectories of a group, S trained tokens of one trajectory (in order of
position, over its branches), K turns of it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from pipeline.config.algorithm import AdvantageConfig
from pipeline.errors import TrainingError

FloatArray = npt.NDArray[np.float64]
EPSILON = 1e-6
"""Added to every standard deviation before something is divided by it."""


@dataclass(frozen=True, slots=True)
class ScoredTrajectory:
    """One trajectory as an estimator sees it.

    Raises :class:`TrainingError` for a reward that is not finite or arrays whose lengths disagree.
    """

    group: int
    """Number of its group in the update."""
    reward: float
    """Outcome: what the scorer gave."""
    turns: npt.NDArray[np.int32]
    """int32 ``[S]``: the turn that sampled each token."""
    turn_rewards: tuple[float, ...] = ()
    """``[K]``: reward given for each turn; empty where the environment gives none, or nobody recorded it."""
    replayed: bool = False
    baseline: float | None = None
    """Reward of the group's greedy rollout (ReMax)."""
    logprobs: FloatArray | None = None
    """``[S]`` log π before the update."""
    behaviour: FloatArray | None = None
    """``[S]`` log μ."""
    reference: FloatArray | None = None
    """``[S]`` log π of the reference policy."""
    entropies: FloatArray | None = None
    """``[S]`` before the update, nats."""
    values: FloatArray | None = None
    """``[S]`` the critic's value of the state before each token."""
    hinted: FloatArray | None = None
    """``[S]`` log π before the update with a hint or the solution in the prompt."""
    penalties: FloatArray | None = None
    """``[S]`` taken off the reward at each token: a KL penalty times its coefficient."""

    def __post_init__(self) -> None:
        if not np.isfinite(self.reward):
            raise TrainingError(f"expected a finite reward of every trajectory, got {self.reward!r}: check the scorer")
        if not np.isfinite(self.turn_rewards).all():
            raise TrainingError(f"expected finite rewards of all turns, got {self.turn_rewards}")
        if not self.n_tokens:
            raise TrainingError("expected at least one trained token of every trajectory, got none")
        if self.turns[0] < 0 or (np.diff(self.turns) < 0).any():
            raise TrainingError(f"expected turns in order, from 0 on, got {self.turns}")
        for name in ("logprobs", "behaviour", "reference", "entropies", "values", "hinted", "penalties"):
            array = getattr(self, name)
            if array is not None and array.shape != (self.n_tokens,):
                raise TrainingError(f"expected {name} with {self.n_tokens} entries, got shape {array.shape}")

    @property
    def n_tokens(self) -> int:
        return len(self.turns)


@dataclass(frozen=True, slots=True)
class Estimates:
    """Result of an estimator, in the order of the trajectories it got."""

    advantages: tuple[FloatArray, ...]
    """``[S]`` each."""
    returns: tuple[FloatArray, ...] | None = None
    """``[S]`` each: what a critic is to learn; None: the estimator has none."""


Estimator = Callable[[Sequence[ScoredTrajectory], AdvantageConfig], Estimates]


def groups_of(scored: Sequence[ScoredTrajectory]) -> list[npt.NDArray[np.intp]]:
    """Indices of the members of each group, int ``[G]`` each, groups by number."""
    groups = np.asarray([p.group for p in scored])
    return [np.flatnonzero(groups == group) for group in np.unique(groups)]


def needed(p: ScoredTrajectory, name: str, estimator: str) -> FloatArray:
    """An array of ``p`` that the estimator cannot do without, all finite. Raises :class:`TrainingError`."""
    array = getattr(p, name)
    if array is None:
        raise TrainingError(f"expected {name} of every trajectory for the estimator {estimator}, got none")
    if not np.isfinite(array).all():
        raise TrainingError(f"expected finite {name} for the estimator {estimator}, got {array!r}")
    return np.asarray(array, dtype=np.float64)


def spread(scored: Sequence[ScoredTrajectory], advantages_N: FloatArray) -> Estimates:
    """The same advantage on all tokens of a trajectory."""
    return Estimates(tuple(np.full(p.n_tokens, a) for p, a in zip(scored, advantages_N, strict=True)))


def whitened(parts: Sequence[FloatArray]) -> tuple[FloatArray, ...]:
    """``(x - mean) / (std + EPSILON)`` over all entries of all parts, population standard deviation; 0 where all are
    equal. Raises :class:`TrainingError` where an entry is not finite."""
    together = np.concatenate(parts)
    if not np.isfinite(together).all():
        raise TrainingError("expected finite values to whiten: check rewards, values and penalties")
    if together.max() == together.min():
        return tuple(np.zeros_like(part) for part in parts)
    mean, scale = together.mean(), together.std() + EPSILON
    return tuple((part - mean) / scale for part in parts)
