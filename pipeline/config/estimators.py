"""Options of each advantage estimator (``advantage.estimator``). The functions are in ``learner.advantages``."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, model_validator

from pipeline.config.base import Choice, Section

Discount = Annotated[float, Field(gt=0, le=1)]


def _with_fields(template: str) -> str:
    if "{prompt}" not in template or "{hint}" not in template:
        raise ValueError(f"expected {{prompt}} and {{hint}} in the template, got {template!r}")
    return template


HintTemplate = Annotated[str, AfterValidator(_with_fields)]


class Grpo(Section):
    """Group-relative advantage: reward minus the group's mean, divided by its standard deviation (arXiv:2402.03300)."""

    name: Literal["grpo"] = "grpo"
    normalize_std: bool = True
    """Divide by the group's standard deviation. False is Dr. GRPO (arXiv:2503.20783)."""


class GroupBaseline(Section):
    """Estimators without options: ``rloo`` = ``leave_one_out`` (arXiv:2402.14740), ``opo`` (arXiv:2505.23585),
    ``maxrl`` (arXiv:2602.02710), ``gpg`` (arXiv:2504.02546)."""

    name: Literal["rloo", "leave_one_out", "opo", "maxrl", "gpg"]


class PassAtK(Section):
    """Advantage of the best of k rollouts (arXiv:2508.10751)."""

    name: Literal["pass_at_k"] = "pass_at_k"
    k: int = Field(4, ge=1)
    """Size of the sets whose best reward counts. At most ``groups.n_rollout``."""


class Remax(Section):
    """Reward minus the reward of a greedy rollout (arXiv:2310.10505)."""

    name: Literal["remax"] = "remax"
    gamma: Discount = 1.0
    """Discount per trained token. 1: no discount."""


class ReinforcePp(Section):
    """REINFORCE++: discounted token returns, whitened over the update (arXiv:2501.03262)."""

    name: Literal["reinforce_pp"] = "reinforce_pp"
    gamma: Discount = 1.0
    """Discount per trained token. 1: no discount."""
    whiten: bool = True
    """Give the advantages of an update mean 0 and standard deviation 1 over its tokens."""


class ReinforcePpBaseline(Section):
    """REINFORCE++ with the group's mean as baseline (arXiv:2501.03262)."""

    name: Literal["reinforce_pp_baseline"] = "reinforce_pp_baseline"
    whiten: bool = True
    """Give the advantages of an update mean 0 and standard deviation 1 over its tokens."""


class Gae(Section):
    """Generalised advantage estimation with a critic (arXiv:1506.02438)."""

    name: Literal["gae"] = "gae"
    gamma: Discount = 1.0
    """Discount per trained token. 1: no discount."""
    gae_lambda: float = Field(1.0, ge=0, le=1)
    """λ of GAE, the trade between bias and variance. 1: return minus value, the usual choice for long answers
    (arXiv:2503.24290)."""
    whiten: bool = True
    """Give the advantages of an update mean 0 and standard deviation 1 over its tokens."""


class Cpo(Section):
    """GRPO with a dense signal for failed groups: how much more likely a hint makes each sampled token."""

    name: Literal["cpo"] = "cpo"
    normalize_std: bool = True
    """Divide by the group's standard deviation."""
    failed_mean: float = 0.0
    """A group with a mean reward of at most this has failed (difficulty +1)."""
    solved_mean: float = 1.0
    """A group with a mean reward of at least this is solved (difficulty -1)."""
    failed_weight: float = Field(1.0, ge=0)
    """Weight of the dense signal in failed groups."""
    solved_weight: float = Field(0.0, ge=0)
    """Weight of the dense signal in solved groups, where its sign is reversed. 0: none."""
    hint_template: HintTemplate = "{prompt}\n\nHint: {hint}"
    """First user message as the learner scores it with a hint. ``{prompt}`` is the original message, ``{hint}`` the
    hint that the environment gives (``Episode.hint``)."""

    @model_validator(mode="after")
    def _failed_below_solved(self) -> Cpo:
        if self.failed_mean >= self.solved_mean:
            raise ValueError(f"failed_mean ({self.failed_mean}) must be below solved_mean ({self.solved_mean})")
        return self


class OwnEstimator(Section):
    """A user's function by its import path."""

    name: str
    """``module:function`` or ``file.py:function``."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Options of the function, which reads them as ``config.estimator.options``."""
    hint_template: HintTemplate = "{prompt}\n\nHint: {hint}"
    """First user message with the environment's hint, as in ``cpo``. Read only if the function needs ``hinted``."""


EstimatorOptions = Annotated[
    Grpo | GroupBaseline | PassAtK | Remax | ReinforcePp | ReinforcePpBaseline | Gae | Cpo | OwnEstimator,
    Choice("grpo"),
]
COMPARING = frozenset({"grpo", "rloo", "leave_one_out", "opo", "maxrl", "gpg", "pass_at_k", "reinforce_pp_baseline"})
"""Estimators that only compare the trajectories of a group: a group of one has advantage 0 everywhere."""
