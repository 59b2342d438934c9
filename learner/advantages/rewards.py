"""Where the rewards of a trajectory stand: at its tokens, or at its turns."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from learner.advantages.base import FloatArray, Played
from pipeline.config.advantage import AdvantageConfig


def total(p: Played) -> float:
    """The outcome minus all penalties: the return of the trajectory without a discount."""
    return p.reward - (0.0 if p.penalties is None else float(p.penalties.sum()))


def turn_rewards(p: Played, config: AdvantageConfig) -> FloatArray:
    """Rewards by turn ``[K]``, without penalties, where ``advantage.rewards`` is not ``outcome``.

    ``turns``: those of the environment times ``turn_weight``. ``both``: the last turn also gets what of the outcome
    they leave, so that they sum to the outcome. Without turn rewards the outcome stands at the last turn.
    """
    turns = max(len(p.turn_rewards), int(p.turns[-1]) + 1)
    rewards = np.zeros(turns)
    if not p.turn_rewards:
        rewards[-1] = p.reward
        return rewards
    rewards[: len(p.turn_rewards)] = config.turn_weight * np.asarray(p.turn_rewards)
    if config.rewards == "both":
        rewards[-1] += p.reward - rewards.sum()
    return rewards


def token_rewards(p: Played, config: AdvantageConfig) -> FloatArray:
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


def group_returns(group: Sequence[Played], config: AdvantageConfig) -> FloatArray:
    """What estimators compare within a group, ``[G, K]``.

    ``outcome``: K is 1, the total of each trajectory. Otherwise K is the number of turns of the longest: entry k is
    the return from turn k on, discounted by ``turn_gamma`` per turn. A trajectory that ended before turn k stands
    there with 0, which is what it got from then on; so the others' mean stays a baseline that no own action changes.
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
