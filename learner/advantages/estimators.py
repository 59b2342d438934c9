"""The estimators: one small pure function each, with the class of its options above it. ``cpo`` and distillation have
files of their own.

*Comparing the trajectories of a group:* returns ``[G]`` in, one advantage per trajectory out. Every rule gives exactly
0 to a group whose returns are all equal, and so to a group of one: there is nothing to compare it with, and the raw
reward in its place would push every answer up or down. Fresh, replayed and imported trajectories of a group are
compared together.

*From the returns of single tokens* (GAE, REINFORCE++, ReMax): the next state of a token is that before the trajectory's
next trained token, whatever context lies between (an answer of a tool, the chat template, a new branch): the policy did
not choose the context, so it is not discounted and no return stops at it. After the last trained token of a trajectory
the value is 0, also where a limit ended it: the limits are part of the task.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import Field

from learner.advantages.base import (
    EPSILON,
    Estimates,
    Estimator,
    FloatArray,
    ScoredTrajectory,
    discounted,
    group_returns,
    groups_of,
    needed,
    token_rewards,
    whitened,
)
from pipeline.config.advantages import AdvantageConfig
from pipeline.config.base import Options
from pipeline.errors import TrainingError

GroupRule = Callable[[FloatArray, Any], FloatArray]
"""Returns ``[G]`` of one group and the estimator's options to one advantage per trajectory ``[G]``."""
WeightedRule = Callable[[FloatArray, FloatArray, Any], FloatArray]
"""The same from returns and lengths ``[G]`` in trained tokens."""


def by_group(rule: GroupRule) -> Estimator:
    """An estimator that compares one group at a time, and gives all tokens of a trajectory the same advantage; or all
    tokens of a turn, where ``advantage.rewards`` is not ``outcome`` (see ``group_returns``)."""
    return by_group_and_length(lambda returns_G, _, options: rule(returns_G, options))


def by_group_and_length(rule: WeightedRule) -> Estimator:
    """As :func:`by_group`, of a rule that also looks at lengths."""

    def estimate(scored: Sequence[ScoredTrajectory], config: AdvantageConfig) -> Estimates:
        advantages: list[FloatArray] = [np.zeros(0)] * len(scored)
        for members in groups_of(scored):
            group = [scored[i] for i in members]
            returns_GK = group_returns(group, config)
            lengths_G = np.asarray([p.n_tokens for p in group], dtype=np.float64)
            ruled = [_ruled(rule, column, lengths_G, config.estimator) for column in returns_GK.T]
            estimates_GK = np.stack(ruled, axis=1)
            for i, p, estimates_K in zip(members, group, estimates_GK, strict=True):
                turns = np.zeros_like(p.turns) if config.rewards == "outcome" else p.turns
                advantages[i] = estimates_K[turns]
        return Estimates(tuple(advantages))

    return estimate


def _ruled(rule: WeightedRule, returns_G: FloatArray, lengths_G: FloatArray, options: Options) -> FloatArray:
    if not np.isfinite(returns_G).all():
        raise TrainingError(f"expected finite returns of a group, got {returns_G}: check rewards and penalties")
    if returns_G.max() == returns_G.min():
        return np.zeros_like(returns_G)
    return np.asarray(rule(returns_G, lengths_G, options), dtype=np.float64)


class Normalized(Options):
    """Options of estimators that may divide by the standard deviation of a group."""

    normalize_std: bool = True
    """Divide by the group's standard deviation. False is Dr. GRPO (arXiv:2503.20783)."""


class Grpo(Normalized):
    """Group-relative advantage: reward minus the group's mean, divided by its standard deviation (arXiv:2402.03300)."""

    name: Literal["grpo"] = "grpo"


def grpo(returns_G: FloatArray, options: Normalized) -> FloatArray:
    """``(R - mean) / (std + epsilon)`` with the population standard deviation of the group (arXiv:2402.03300, eq. 3).

    Without ``normalize_std`` it is ``R - mean`` (Dr. GRPO, arXiv:2503.20783).

    >>> grpo(np.array([1.0, 0.0, 0.0, 1.0]), Grpo(normalize_std=False))
    array([ 0.5, -0.5, -0.5,  0.5])
    """
    scale = float(returns_G.std()) + EPSILON if options.normalize_std else 1.0
    return np.asarray((returns_G - returns_G.mean()) / scale)


class GroupBaseline(Options):
    """Estimators without options: ``rloo`` = ``leave_one_out`` (arXiv:2402.14740), ``opo`` (arXiv:2505.23585),
    ``maxrl`` (arXiv:2602.02710), ``gpg`` (arXiv:2504.02546)."""

    name: Literal["rloo", "leave_one_out", "opo", "maxrl", "gpg"]


def rloo(returns_G: FloatArray, options: GroupBaseline) -> FloatArray:
    """``R_i`` minus the mean of the others, which is ``G / (G - 1) · (R_i - mean)`` (arXiv:2402.14740).

    As the baseline does not depend on the i-th answer, the gradient of the expected reward is met without bias.
    """
    n = len(returns_G)
    return np.asarray((returns_G - returns_G.mean()) * (n / (n - 1)))


def opo(returns_G: FloatArray, lengths_G: FloatArray, options: GroupBaseline) -> FloatArray:
    """``R_i - b`` with the mean weighted by length, ``b = Σ l R / Σ l``: the baseline of least variance where the
    squared gradient of an answer grows with its length (arXiv:2505.23585)."""
    return returns_G - float(lengths_G @ returns_G) / float(lengths_G.sum())


def maxrl(returns_G: FloatArray, options: GroupBaseline) -> FloatArray:
    """``(R - mean) / (mean + epsilon)`` (arXiv:2602.02710).

    Of rewards 0 and 1 its expectation is ``Σ_{k=1..G-1} (1 - p)^(k-1) ∇p``, the gradient of log p(success) to order
    G - 1: hard tasks count more than in the gradient of p. Raises :class:`TrainingError` for a negative return, of
    which no share of successes can be taken.
    """
    if returns_G.min() < 0:
        raise TrainingError(
            f"expected returns >= 0 for the estimator maxrl, got {returns_G}: remove penalties, or choose another "
            "estimator"
        )
    return np.asarray((returns_G - returns_G.mean()) / (float(returns_G.mean()) + EPSILON))


class PassAtK(Options):
    """Advantage of the best of k rollouts (arXiv:2508.10751)."""

    name: Literal["pass_at_k"] = "pass_at_k"
    k: int = Field(4, ge=1)
    """Size of the sets whose best reward counts. At most ``groups.n_rollout``."""


def pass_at_k(returns_G: FloatArray, options: PassAtK) -> FloatArray:
    """Effect on the best of k of having the i-th answer among them: over all sets of k of the group,
    ``(mean of the best of the sets with i - mean of the best of all sets) / (std of the best of all sets + epsilon)``.

    For rewards 0 and 1 this is the closed form of arXiv:2508.10751 (section 2.4); for others the best of a set replaces
    its success, as in arXiv:2505.15201. Only ranks are counted: with returns in ascending order the j-th is the
    best of ``C(j-1, k-1)`` sets, and of ``C(j-2, k-2)`` sets that hold a given worse one.
    Raises :class:`TrainingError` for a group smaller than k.
    """
    n, k = len(returns_G), options.k
    if n < k:
        raise TrainingError(f"expected groups of at least advantage.estimator.k ({k}) trajectories, got {n}")
    order = np.argsort(returns_G, kind="stable")
    ascending = returns_G[order] - returns_G.max()
    if ascending[k - 1] == 0:  # every set of k holds one of the best
        return np.zeros(n)
    best = np.asarray([_chosen(j, k - 1) / math.comb(n, k) for j in range(n)])
    mean = float(best @ ascending)
    std = math.sqrt(float(best @ (ascending - mean) ** 2))
    sets_with_one = math.comb(n - 1, k - 1)
    above = np.asarray([_chosen(j - 1, k - 2) / sets_with_one for j in range(n)]) * ascending
    beaten = np.append(np.cumsum(above[::-1])[::-1][1:], 0.0)
    own = np.asarray([_chosen(i, k - 1) / sets_with_one for i in range(n)]) * ascending
    out = np.zeros(n)
    out[order] = (own + beaten - mean) / (std + EPSILON)
    return out


def _chosen(n: int, k: int) -> int:
    return math.comb(n, k) if n >= 0 and k >= 0 else 0


centred = by_group(lambda returns_G, options: returns_G - returns_G.mean())
"""``R - mean`` of the group."""


def gpg(scored: Sequence[ScoredTrajectory], config: AdvantageConfig) -> Estimates:
    """``α (R - mean)`` with ``α = N / (N - M)``, where M of the N trajectories of the update are in groups that teach
    nothing: their zeros do not dilute the step (arXiv:2504.02546, with F_norm = 1)."""
    advantages = centred(scored, config).advantages
    idle = sum(len(m) for m in groups_of(scored) if not any(advantages[i].any() for i in m))
    alpha = len(scored) / max(1, len(scored) - idle)
    return Estimates(tuple(a * alpha for a in advantages))


Discount = Annotated[float, Field(gt=0, le=1)]


class Gae(Options):
    """Generalised advantage estimation with a critic (arXiv:1506.02438)."""

    name: Literal["gae"] = "gae"
    gamma: Discount = 1.0
    """Discount per trained token. 1: no discount."""
    gae_lambda: float = Field(1.0, ge=0, le=1)
    """λ of GAE, the trade between bias and variance. 1: return minus value, the usual choice for long answers
    (arXiv:2503.24290)."""
    whiten: bool = True
    """Give the advantages of an update mean 0 and standard deviation 1 over its tokens."""


def gae(scored: Sequence[ScoredTrajectory], config: AdvantageConfig) -> Estimates:
    """``A_t = δ_t + γ λ A_{t+1}`` with ``δ_t = r_t + γ V_{t+1} - V_t`` (arXiv:1506.02438, eq. 16).

    Returns for the critic are ``A + V`` before whitening.
    """
    options = config.options_of(Gae)
    advantages, returns = [], []
    for p in scored:
        values = needed(p, "values", "gae")
        deltas = token_rewards(p, config) + options.gamma * np.append(values[1:], 0.0) - values
        advantages.append(discounted(deltas, options.gamma * options.gae_lambda))
        returns.append(advantages[-1] + values)
    return Estimates(whitened(advantages) if options.whiten else tuple(advantages), tuple(returns))


class ReinforcePp(Options):
    """REINFORCE++: discounted token returns, whitened over the update (arXiv:2501.03262)."""

    name: Literal["reinforce_pp"] = "reinforce_pp"
    gamma: Discount = 1.0
    """Discount per trained token. 1: no discount."""
    whiten: bool = True
    """Give the advantages of an update mean 0 and standard deviation 1 over its tokens."""


def reinforce_pp(scored: Sequence[ScoredTrajectory], config: AdvantageConfig) -> Estimates:
    """Discounted returns ``G_t = r_t + γ G_{t+1}``, whitened over all tokens of the update (REINFORCE++,
    arXiv:2501.03262); a KL penalty is part of ``r_t``. Needs no group."""
    options = config.options_of(ReinforcePp)
    returns = [discounted(token_rewards(p, config), options.gamma) for p in scored]
    return Estimates(whitened(returns) if options.whiten else tuple(returns))


class ReinforcePpBaseline(Options):
    """REINFORCE++ with the group's mean as baseline (arXiv:2501.03262)."""

    name: Literal["reinforce_pp_baseline"] = "reinforce_pp_baseline"
    whiten: bool = True
    """Give the advantages of an update mean 0 and standard deviation 1 over its tokens."""


def reinforce_pp_baseline(scored: Sequence[ScoredTrajectory], config: AdvantageConfig) -> Estimates:
    """``R`` minus the group's mean, then whitened over all tokens of the update instead of divided by the group's own
    standard deviation (REINFORCE++ with baseline, arXiv:2501.03262)."""
    advantages = centred(scored, config).advantages
    whiten = config.options_of(ReinforcePpBaseline).whiten
    return Estimates(whitened(advantages) if whiten else advantages)


class Remax(Options):
    """Reward minus the reward of a greedy rollout (arXiv:2310.10505)."""

    name: Literal["remax"] = "remax"
    gamma: Discount = 1.0
    """Discount per trained token. 1: no discount."""


def remax(scored: Sequence[ScoredTrajectory], config: AdvantageConfig) -> Estimates:
    """Discounted return minus the reward of the group's greedy rollout (ReMax, arXiv:2310.10505, eq. 6).

    The baseline does not depend on what was sampled, so a group of one learns too. Raises :class:`TrainingError`
    without a baseline.
    """
    gamma, advantages = config.options_of(Remax).gamma, []
    for p in scored:
        if p.baseline is None or not np.isfinite(p.baseline):
            raise TrainingError(
                f"expected the reward of a greedy rollout of group {p.group} for the estimator remax, got "
                f"{p.baseline!r}: groups must be ordered with a greedy rollout each"
            )
        advantages.append(discounted(token_rewards(p, config), gamma) - p.baseline)
    return Estimates(tuple(advantages))
