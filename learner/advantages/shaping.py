"""What happens to rewards before advantages are estimated: overlong penalty, the user's own shaping, normalisation.

The trajectories themselves keep their rewards: reports, the pool and the bias audit tell what the scorer gave.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import fields, replace

import numpy as np

from learner.advantages.base import Played, groups_of
from pipeline.config.advantage import AdvantageConfig
from pipeline.errors import TrainingError
from pipeline.schema import Trajectory
from pipeline.scorer.resolve import resolve

Shaping = Callable[[Sequence[Played], Sequence[Trajectory]], Sequence[Played]]
"""A user's function (``advantage.shaping``): the same trajectories, with other ``reward``, ``turn_rewards`` and
``baseline``."""
MAY_CHANGE = frozenset({"reward", "turn_rewards", "baseline"})


def shaped(played: Sequence[Played], trajectories: Sequence[Trajectory], config: AdvantageConfig) -> list[Played]:
    """Overlong penalty (but not on a greedy rollout's reward), then the user's shaping, then normalisation.

    Raises :class:`TrainingError` for what the user's function did, :class:`ConfigurationError` when its path leads to
    none.
    """
    out = [replace(p, reward=p.reward - overlong_loss(_sampled(p), config)) for p in played]
    if config.shaping is not None:
        out = _by_user(resolve(config.shaping, "reward shaping"), config.shaping, out, trajectories)
    return _normalised(out, config)


def overlong_loss(n_tokens: int, config: AdvantageConfig) -> float:
    """What a trajectory of ``n_tokens`` sampled tokens loses: 0 up to ``overlong_tokens - overlong_buffer``, then
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
    """How many of trajectories with these sampled tokens are penalised."""
    return sum(overlong_loss(n, config) > 0 for n in lengths)


def _sampled(p: Played) -> int:
    return p.n_tokens if p.sampled is None else p.sampled


def _by_user(
    function: Shaping, path: str, played: Sequence[Played], trajectories: Sequence[Trajectory]
) -> list[Played]:
    try:
        out = list(function(list(played), list(trajectories)))
    except Exception as error:
        raise TrainingError(f"reward shaping {path} failed with {type(error).__name__}: {error}") from error
    if len(out) != len(played) or not all(isinstance(p, Played) for p in out):
        raise TrainingError(f"expected {len(played)} Played from the reward shaping {path}, got {out!r:.200}")
    for before, after in zip(played, out, strict=True):
        changed = [f.name for f in fields(Played) if getattr(before, f.name) is not getattr(after, f.name)]
        if not MAY_CHANGE.issuperset(changed):
            raise TrainingError(f"expected the reward shaping {path} to change only rewards, it changed {changed}")
    return out


def _normalised(played: Sequence[Played], config: AdvantageConfig) -> list[Played]:
    if config.reward_norm == "none":
        return list(played)
    out = list(played)
    groups = [m.tolist() for m in groups_of(played)] if config.reward_norm == "group" else [list(range(len(played)))]
    for members in groups:
        returns_M = np.asarray([_return(played[i], config) for i in members])
        scale = float(returns_M.std()) + config.epsilon if returns_M.max() > returns_M.min() else 1.0
        mean = float(returns_M.mean()) if config.rewards == "outcome" else 0.0
        for i in members:
            p = played[i]
            turns = tuple(r / scale for r in p.turn_rewards)
            baseline = None if p.baseline is None else (p.baseline - mean) / scale
            out[i] = replace(p, reward=(p.reward - mean) / scale, turn_rewards=turns, baseline=baseline)
    return out


def _return(p: Played, config: AdvantageConfig) -> float:
    """What the trajectory got in all, by the rewards that are used."""
    if config.rewards == "turns" and p.turn_rewards:
        return config.turn_weight * sum(p.turn_rewards)
    return p.reward
