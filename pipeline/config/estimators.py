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
    """arXiv:2402.03300."""

    name: Literal["grpo"] = "grpo"
    normalize_std: bool = True
    """False is Dr. GRPO (arXiv:2503.20783): no division by the standard deviation."""


class GroupBaseline(Section):
    """Estimators without options: ``rloo`` = ``leave_one_out`` (arXiv:2402.14740), ``opo`` (arXiv:2505.23585),
    ``maxrl`` (arXiv:2602.02710), ``gpg`` (arXiv:2504.02546)."""

    name: Literal["rloo", "leave_one_out", "opo", "maxrl", "gpg"]


class PassAtK(Section):
    """arXiv:2508.10751."""

    name: Literal["pass_at_k"] = "pass_at_k"
    k: int = Field(4, ge=1)
    """A set of k rollouts is as good as its best."""


class Remax(Section):
    """arXiv:2310.10505."""

    name: Literal["remax"] = "remax"
    gamma: Discount = 1.0
    """Discount per trained token."""


class ReinforcePp(Section):
    """REINFORCE++ (arXiv:2501.03262)."""

    name: Literal["reinforce_pp"] = "reinforce_pp"
    gamma: Discount = 1.0
    """Discount per trained token."""
    whiten: bool = True
    """Advantages of an update have mean 0 and standard deviation 1 over its tokens."""


class ReinforcePpBaseline(Section):
    """REINFORCE++ with the group's mean as baseline (arXiv:2501.03262)."""

    name: Literal["reinforce_pp_baseline"] = "reinforce_pp_baseline"
    whiten: bool = True
    """Advantages of an update have mean 0 and standard deviation 1 over its tokens."""


class Gae(Section):
    """Generalised advantage estimation with a critic (arXiv:1506.02438)."""

    name: Literal["gae"] = "gae"
    gamma: Discount = 1.0
    """Discount per trained token."""
    gae_lambda: float = Field(1.0, ge=0, le=1)
    """1: returns minus values, as is usual for long answers (arXiv:2503.24290)."""
    whiten: bool = True
    """Advantages of an update have mean 0 and standard deviation 1 over its tokens."""


class Cpo(Section):
    """GRPO with a dense signal from hints in groups that all failed."""

    name: Literal["cpo"] = "cpo"
    normalize_std: bool = True
    """False: no division by the standard deviation."""
    failed_mean: float = 0.0
    """A group whose mean reward is at most this has failed (difficulty +1)."""
    solved_mean: float = 1.0
    """A group whose mean reward is at least this is solved (difficulty -1)."""
    failed_weight: float = Field(1.0, ge=0)
    """Weight of the dense signal in failed groups."""
    solved_weight: float = Field(0.0, ge=0)
    """Weight of the dense signal in solved groups, where its sign is turned round."""
    hint_template: HintTemplate = "{prompt}\n\nHint: {hint}"
    """The first message of the user, as the learner scores it with the hint that the environment gives."""

    @model_validator(mode="after")
    def _failed_below_solved(self) -> Cpo:
        if self.failed_mean >= self.solved_mean:
            raise ValueError(f"failed_mean ({self.failed_mean}) must be below solved_mean ({self.solved_mean})")
        return self


class OwnEstimator(Section):
    """A user's function by its import path."""

    name: str
    options: dict[str, Any] = Field(default_factory=dict)
    """For the function, as ``config.estimator.options``."""
    hint_template: HintTemplate = "{prompt}\n\nHint: {hint}"
    """The first message of the user with the hint that the environment gives; read where the function needs
    ``hinted``."""


EstimatorOptions = Annotated[
    Grpo | GroupBaseline | PassAtK | Remax | ReinforcePp | ReinforcePpBaseline | Gae | Cpo | OwnEstimator,
    Choice("grpo"),
]
COMPARING = frozenset({"grpo", "rloo", "leave_one_out", "opo", "maxrl", "gpg", "pass_at_k", "reinforce_pp_baseline"})
"""Estimators that only compare the trajectories of a group: a group of one has advantage 0 everywhere."""
