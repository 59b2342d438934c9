"""Estimators from the returns of single tokens: GAE, REINFORCE++, ReMax.

The next state of a token is that before the trajectory's next trained token, whatever context lies between (an answer
of a tool, the chat template, a new branch): the policy did not choose the context, so it is not discounted
and no return stops at it. After the last trained token of a trajectory the value is 0, also where a limit ended it: the
limits are part of the task.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Literal

import numpy as np
from pydantic import Field

from learner.advantages.base import Estimates, ScoredTrajectory, needed, whitened
from learner.advantages.group import centred
from learner.advantages.rewards import discounted, token_rewards
from pipeline.config.algorithm import AdvantageConfig
from pipeline.config.base import Options
from pipeline.errors import TrainingError

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
    if options.whiten:
        return Estimates(whitened(advantages), tuple(returns))
    return Estimates(tuple(advantages), tuple(returns))


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
