"""Section ``advantage``: how rewards become advantages."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, field_validator, model_validator

from pipeline.config.base import Section

ESTIMATOR_NAMES = (
    "grpo",
    "rloo",
    "leave_one_out",
    "opo",
    "maxrl",
    "gpg",
    "pass_at_k",
    "remax",
    "reinforce_pp",
    "reinforce_pp_baseline",
    "gae",
    "cpo",
)
COMPARING = frozenset({"grpo", "rloo", "leave_one_out", "opo", "maxrl", "gpg", "pass_at_k", "reinforce_pp_baseline"})
"""Estimators that only compare the trajectories of a group: a group of one has advantage 0 everywhere."""


class AdvantageConfig(Section):
    estimator: str = "grpo"
    """``grpo`` (arXiv:2402.03300), ``rloo`` = ``leave_one_out`` (arXiv:2402.14740), ``opo`` (arXiv:2505.23585),
    ``maxrl`` (arXiv:2602.02710), ``gpg`` (arXiv:2504.02546), ``pass_at_k`` (arXiv:2508.10751), ``remax``
    (arXiv:2310.10505), ``reinforce_pp`` and ``reinforce_pp_baseline`` (arXiv:2501.03262), ``gae`` (arXiv:1506.02438),
    ``cpo``; or your own as module:function or file.py:function."""
    normalize_std: bool = True
    """Of grpo and cpo. False is Dr. GRPO (arXiv:2503.20783): no division by the standard deviation."""
    epsilon: float = Field(1e-6, gt=0)
    """Added to every standard deviation that something is divided by."""
    rewards: Literal["outcome", "turns", "both"] = "outcome"
    """``outcome``: what the scorer gave, at the last token. ``turns``: what the environment gave for each turn, at the
    turn's last token. ``both``: the turns' rewards, and at the last token what of the outcome they do not explain, so
    that they sum to the outcome. A trajectory without turn rewards has its outcome at the last token."""
    turn_weight: float = 1.0
    """Multiplies turn rewards; with functions in the scorer, set it to ``scorer.environment_weight``."""
    gamma: float = Field(1.0, gt=0, le=1)
    """Discount per trained token: of gae, remax and reinforce_pp."""
    turn_gamma: float = Field(1.0, gt=0, le=1)
    """Discount per turn: of estimators that compare a group, where ``rewards`` is not ``outcome``."""
    gae_lambda: float = Field(1.0, ge=0, le=1)
    """1: returns minus values, as is usual for long answers (arXiv:2503.24290)."""
    whiten: bool = True
    """Of gae, reinforce_pp and reinforce_pp_baseline: advantages of an update have mean 0 and standard deviation 1
    over its tokens."""
    pass_k: int = Field(4, ge=1)
    """k of pass_at_k: a set of k rollouts is as good as its best."""
    cpo_failed_mean: float = 0.0
    """cpo: a group whose mean reward is at most this has failed (difficulty +1)."""
    cpo_solved_mean: float = 1.0
    """cpo: a group whose mean reward is at least this is solved (difficulty -1)."""
    cpo_failed_weight: float = Field(1.0, ge=0)
    """cpo: weight of the dense signal in failed groups."""
    cpo_solved_weight: float = Field(0.0, ge=0)
    """cpo: weight of the dense signal in solved groups, where its sign is turned round."""
    shaping: str | None = None
    """Your own change of rewards before estimation, as module:function or file.py:function. It gets the trajectories
    as estimators see them (a list of ``Played``) and as they were played, and returns the first with other rewards."""
    overlong_tokens: int | None = Field(None, ge=1)
    """Length at which the overlong penalty is full (DAPO, arXiv:2503.14476, eq. 13), in sampled tokens of the whole
    trajectory. None: no penalty."""
    overlong_buffer: int = Field(0, ge=0)
    """The penalty rises linearly over this many tokens below ``overlong_tokens``."""
    overlong_penalty: float = Field(1.0, ge=0)
    """What an overlong trajectory loses."""
    reward_norm: Literal["none", "group", "batch"] = "none"
    """Outcomes, before estimation, minus their mean and over their standard deviation, of the group or of the update;
    with turn rewards only divided by it, as a mean taken off every turn would pay for the number of turns."""
    hint_template: str = "{prompt}\n\nHint: {hint}"
    """cpo: the first message of the user, as the learner scores it with the hint that the environment gives."""
    greedy_rollouts: bool = False
    """Order one greedy rollout (temperature 0) more for each group, which is never trained: its reward is the
    ``baseline`` that estimators see. remax orders them in any case."""

    @property
    def wants_hints(self) -> bool:
        """Whether actors keep what the prompts would have been with a hint. A user's own estimator gets hints, too."""
        return self.estimator == "cpo" or ":" in self.estimator

    @property
    def orders_greedy(self) -> bool:
        """Whether a greedy rollout belongs to each group."""
        return self.greedy_rollouts or self.estimator == "remax"

    @field_validator("estimator")
    @classmethod
    def _known(cls, name: str) -> str:
        if name not in ESTIMATOR_NAMES and ":" not in name:
            raise ValueError(
                f"expected one of {', '.join(ESTIMATOR_NAMES)}, or your own as module:function, got {name!r}"
            )
        return name

    @field_validator("hint_template")
    @classmethod
    def _has_places(cls, template: str) -> str:
        if "{prompt}" not in template or "{hint}" not in template:
            raise ValueError(f"expected {{prompt}} and {{hint}} in the template, got {template!r}")
        return template

    @model_validator(mode="after")
    def _agrees(self) -> AdvantageConfig:
        if self.overlong_tokens is not None and self.overlong_buffer > self.overlong_tokens:
            raise ValueError(
                f"advantage.overlong_buffer ({self.overlong_buffer}) must not be more than overlong_tokens "
                f"({self.overlong_tokens})"
            )
        if self.cpo_failed_mean >= self.cpo_solved_mean:
            raise ValueError(
                f"advantage.cpo_failed_mean ({self.cpo_failed_mean}) must be below cpo_solved_mean "
                f"({self.cpo_solved_mean})"
            )
        return self
