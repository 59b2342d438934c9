"""What an advantage estimator gets and gives. Numpy, float64, no gradient.

Dimensions: N trajectories of an update, S trained tokens of one trajectory (in order of position, over its branches),
K turns of it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from pipeline.config.advantage import AdvantageConfig
from pipeline.errors import TrainingError

FloatArray = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Played:
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
    """``[K]``: reward given for each turn; empty where the environment gives none."""
    replayed: bool = False
    baseline: float | None = None
    """Reward of the group's greedy rollout (ReMax)."""
    logprobs: FloatArray | None = None
    """``[S]`` log π today."""
    behaviour: FloatArray | None = None
    """``[S]`` log μ."""
    reference: FloatArray | None = None
    """``[S]`` log π of the reference policy."""
    entropies: FloatArray | None = None
    """``[S]`` today, nats."""
    values: FloatArray | None = None
    """``[S]`` the critic's value of the state before each token."""
    hinted: FloatArray | None = None
    """``[S]`` log π today with a hint or the solution in the prompt."""

    def __post_init__(self) -> None:
        if not np.isfinite(self.reward):
            raise TrainingError(f"expected a finite reward of every trajectory, got {self.reward!r}: check the scorer")
        if not self.n_tokens:
            raise TrainingError("expected at least one trained token of every trajectory, got none")
        for name in ("logprobs", "behaviour", "reference", "entropies", "values", "hinted"):
            array = getattr(self, name)
            if array is not None and array.shape != (self.n_tokens,):
                raise TrainingError(f"expected {name} with {self.n_tokens} entries, got shape {array.shape}")

    @property
    def n_tokens(self) -> int:
        return len(self.turns)


@dataclass(frozen=True, slots=True)
class Estimates:
    """What an estimator gives, in the order of the trajectories it got."""

    advantages: tuple[FloatArray, ...]
    """``[S]`` each."""
    returns: tuple[FloatArray, ...] | None = None
    """``[S]`` each: what a critic is to learn; None: the estimator has none."""


Estimator = Callable[[Sequence[Played], AdvantageConfig], Estimates]
GroupRule = Callable[[FloatArray, AdvantageConfig], FloatArray]
"""Rewards ``[G]`` of one group to one advantage per trajectory ``[G]``."""


def by_group(rule: GroupRule) -> Estimator:
    """An estimator that looks at the outcomes of one group at a time and gives all tokens of a trajectory the same."""

    def estimate(played: Sequence[Played], config: AdvantageConfig) -> Estimates:
        advantages = np.zeros(len(played))
        groups = np.asarray([p.group for p in played])
        rewards = np.asarray([p.reward for p in played], dtype=np.float64)
        for group in np.unique(groups):
            members = np.flatnonzero(groups == group)
            advantages[members] = rule(rewards[members], config)
        return spread(played, advantages)

    return estimate


def spread(played: Sequence[Played], advantages_N: FloatArray) -> Estimates:
    """The same advantage on all tokens of a trajectory."""
    return Estimates(tuple(np.full(p.n_tokens, a) for p, a in zip(played, advantages_N, strict=True)))
