"""Interface of the advantage estimators: scored trajectories in, advantages out, and the rewards that they see.

Rewards change before estimation: by token or turn, overlong penalty, the user's own shaping, normalisation. The
trajectories themselves keep theirs: reports, the pool and the bias audit use those of the scorer. Numpy, float64, no
gradient.

Dimensions: N trajectories of an update, G trajectories of a group, S trained tokens of one trajectory (in order of
position, over its branches), K turns of it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace

import numpy as np
import numpy.typing as npt

from pipeline.config.advantages import AdvantageConfig
from pipeline.errors import TrainingError, boundary
from pipeline.runtime.plugins import resolve
from pipeline.schema import Trajectory

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


def logprobs_of(p: ScoredTrajectory, name: str, estimator: str) -> FloatArray:
    """Log-probabilities of ``p`` that the estimator cannot do without, at most 0; -inf is one. Raises
    :class:`TrainingError` for NaN, and for one that is above 0 by more than rounding."""
    array: FloatArray | None = getattr(p, name)
    if array is None or np.isnan(array).any() or (array > 1e-3).any():
        raise TrainingError(f"expected {name} (log-probabilities <= 0) for the estimator {estimator}, got {array!r}")
    return np.minimum(array, 0.0)


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


def total(p: ScoredTrajectory) -> float:
    """The outcome minus all penalties: the return of the trajectory without a discount."""
    return p.reward - (0.0 if p.penalties is None else float(p.penalties.sum()))


def turn_rewards(p: ScoredTrajectory, config: AdvantageConfig) -> FloatArray:
    """Rewards by turn ``[K]``, without penalties, where ``advantage.rewards`` is not ``outcome``.

    ``turns``: those of the environment. ``both``: the last turn also gets what of the outcome
    they leave, so that they sum to the outcome. Without turn rewards the last turn gets the outcome.
    """
    turns = max(len(p.turn_rewards), int(p.turns[-1]) + 1)
    rewards = np.zeros(turns)
    if not p.turn_rewards:
        rewards[-1] = p.reward
        return rewards
    rewards[: len(p.turn_rewards)] = p.turn_rewards
    if config.rewards == "both":
        rewards[-1] += p.reward - rewards.sum()
    return rewards


def token_rewards(p: ScoredTrajectory, config: AdvantageConfig) -> FloatArray:
    """Rewards at the trained tokens ``[S]``, penalties taken off.

    The outcome is at the last token, the reward of a turn at the turn's last trained token. The reward of a turn of
    which nothing is trained (another turn of the trajectory is replayed alone, or it sampled nothing) is at the last
    trained token before it; with no such token nothing that is trained could change it, and it is left out.
    """
    rewards = np.zeros(p.n_tokens) if p.penalties is None else -p.penalties
    if config.rewards == "outcome":
        rewards[-1] += p.reward
        return rewards
    by_turn = turn_rewards(p, config)
    last = np.searchsorted(p.turns, np.arange(len(by_turn)), side="right") - 1
    np.add.at(rewards, last[last >= 0], by_turn[last >= 0])
    return rewards


def group_returns(group: Sequence[ScoredTrajectory], config: AdvantageConfig) -> FloatArray:
    """Returns that estimators compare within a group, ``[G, K]``.

    ``outcome``: K is 1, the total of each trajectory. Otherwise K is the number of turns of the longest: entry k is
    the return from turn k on, discounted by ``turn_gamma`` per turn. A trajectory that ended before turn k has 0
    there, which is what it got from then on; so the others' mean stays a baseline that no own action changes.
    """
    if config.rewards == "outcome":
        return np.asarray([[total(p)] for p in group])
    rewards = [turn_rewards(p, config) for p in group]
    returns = np.zeros((len(group), max(len(r) for r in rewards)))
    for row, (p, r) in enumerate(zip(group, rewards, strict=True)):
        if p.penalties is not None:
            np.subtract.at(r, p.turns, p.penalties)
        returns[row, : len(r)] = discounted(r, config.turn_gamma)
    return returns


def discounted(rewards: FloatArray, factor: float) -> FloatArray:
    """``x_t = r_t + factor · x_{t+1}``, 0 after the end.

    >>> discounted(np.array([0.0, 1.0, 2.0]), 0.5)
    array([1., 2., 2.])
    """
    if factor == 1.0:
        return np.cumsum(rewards[::-1])[::-1].copy()
    out, carried = [], 0.0
    for reward in reversed(rewards.tolist()):
        carried = reward + factor * carried
        out.append(carried)
    return np.asarray(out[::-1], dtype=np.float64)


Shaping = Callable[[Sequence[ScoredTrajectory], Sequence[Trajectory]], Sequence[ScoredTrajectory]]
"""A user's function (``advantage.shaping``): the same trajectories, with other ``reward``, ``turn_rewards`` and
``baseline``."""
MAY_CHANGE = frozenset({"reward", "turn_rewards", "baseline"})


def shaped(
    scored: Sequence[ScoredTrajectory], trajectories: Sequence[Trajectory], config: AdvantageConfig
) -> list[ScoredTrajectory]:
    """Overlong penalty (but not on a greedy rollout's reward) by all tokens that were sampled, trained or not; then the
    user's shaping, then normalisation.

    Raises :class:`TrainingError` for what the user's function gave, :class:`PlugInError` for what it raised, and
    :class:`ConfigurationError` when its path leads to none.
    """
    out = list(scored)
    if config.overlong_tokens is not None:
        out = [_less(p, overlong_loss(t.n_sampled, config)) for p, t in zip(scored, trajectories, strict=True)]
    if config.shaping is not None:
        out = _by_user(resolve(config.shaping, "reward shaping"), config.shaping, out, trajectories)
    return _normalised(out, config)


def _less(p: ScoredTrajectory, penalty: float) -> ScoredTrajectory:
    """``penalty`` off the outcome, and off the reward of the last turn, which ``rewards: turns`` reads instead."""
    turns = p.turn_rewards and (*p.turn_rewards[:-1], p.turn_rewards[-1] - penalty)
    return replace(p, reward=p.reward - penalty, turn_rewards=turns)


def overlong_loss(n_tokens: int, config: AdvantageConfig) -> float:
    """Penalty of a trajectory of ``n_tokens`` sampled tokens: 0 up to ``overlong_tokens - overlong_buffer``, then
    rising linearly to ``overlong_penalty`` at ``overlong_tokens`` (DAPO, arXiv:2503.14476, eq. 13).

    >>> config = AdvantageConfig(overlong_tokens=100, overlong_buffer=20)
    >>> [overlong_loss(n, config) for n in (80, 85, 100, 500)]
    [0.0, 0.25, 1.0, 1.0]
    """
    if config.overlong_tokens is None:
        return 0.0
    over = n_tokens - (config.overlong_tokens - config.overlong_buffer)
    share = float(over > 0) if config.overlong_buffer == 0 else min(1.0, max(0.0, over / config.overlong_buffer))
    return share * config.overlong_penalty


def overlong_count(lengths: Sequence[int], config: AdvantageConfig) -> int:
    """Number of these lengths in sampled tokens that are penalised."""
    return sum(overlong_loss(n, config) > 0 for n in lengths)


def _by_user(
    function: Shaping, path: str, scored: Sequence[ScoredTrajectory], trajectories: Sequence[Trajectory]
) -> list[ScoredTrajectory]:
    with boundary(f"advantage.shaping {path}"):
        out = list(function(list(scored), list(trajectories)))
    if len(out) != len(scored) or not all(isinstance(p, ScoredTrajectory) for p in out):
        raise TrainingError(
            f"expected {len(scored)} ScoredTrajectory from the reward shaping {path}, got {len(out)}: {out!r:.100}"
        )
    for before, after in zip(scored, out, strict=True):
        changed = [f.name for f in fields(ScoredTrajectory) if getattr(before, f.name) is not getattr(after, f.name)]
        if not MAY_CHANGE.issuperset(changed):
            raise TrainingError(f"expected the reward shaping {path} to change only rewards, but it changed {changed}")
    return out


def _normalised(scored: Sequence[ScoredTrajectory], config: AdvantageConfig) -> list[ScoredTrajectory]:
    out = list(scored)
    if config.reward_norm == "none":
        return out
    groups = [m.tolist() for m in groups_of(scored)] if config.reward_norm == "group" else [list(range(len(scored)))]
    for members in groups:
        given = [scored[i].turn_rewards if config.rewards == "turns" else () for i in members]
        returns_M = np.asarray([sum(r) if r else scored[i].reward for i, r in zip(members, given, strict=True)])
        scale = float(returns_M.std()) + EPSILON if returns_M.max() > returns_M.min() else 1.0
        mean = float(returns_M.mean()) if config.rewards == "outcome" else 0.0
        for i in members:
            p = scored[i]
            turns = tuple(r / scale for r in p.turn_rewards)
            baseline = None if p.baseline is None else (p.baseline - mean) / scale
            out[i] = replace(p, reward=(p.reward - mean) / scale, turn_rewards=turns, baseline=baseline)
    return out
