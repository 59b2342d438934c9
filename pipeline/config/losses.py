"""Sections ``importance`` and ``loss`` of the run file: advantages to gradients."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from pipeline.config.base import Choice, Function, Given, Section

Level = Literal["token", "sequence", "geometric", "any_token"]


class MaskConfig(Section):
    """One rejection rule: tokens whose ratio π_prox/μ lies outside ``[low, high]`` are not trained. π_prox is the
    policy before the optimizer step, μ the behaviour policy."""

    level: Level
    """Ratio that is tested. ``token``: of each token. ``sequence``: of its row, the product over the row's tokens.
    ``geometric``: the geometric mean over the row's tokens. ``any_token``: the whole row is rejected if any token's
    ratio is outside. A row is one branch of a trajectory."""
    low: float = Field(0.0, ge=0)
    """Lower bound. 0: no lower bound."""
    high: float | None = Field(None, gt=0)
    """Upper bound. None: no upper bound."""

    def check(self) -> None:
        if self.high is None and self.low == 0:
            raise ValueError("importance.masks: a mask without low and high rejects nothing: set one of them")
        if self.high is not None and self.high <= self.low:
            raise ValueError(
                f"importance.masks: high ({self.high}) must be above low ({self.low}): else all tokens are rejected"
            )


class ImportanceConfig(Section):
    """Importance ratios: how the loss corrects for the difference between the policy in training (π) and the behaviour
    policy (μ, the engine at sampling time)."""

    anchor: Literal["behaviour", "proximal"] = "behaviour"
    """Denominator π_old of the clipped ratio for fresh tokens. ``behaviour``: μ as the engine recorded it; π/μ carries
    the whole correction. ``proximal``: the learner's weights before the step; π/π_old is clipped, and the token is
    weighted by w = π_old/μ (decoupled PPO, arXiv:2110.00641). Choose ``proximal`` if engine and learner disagree
    numerically or if staleness is above 1."""
    weight: Literal["none", "token", "sequence", "geometric"] = "token"
    """Weight w with ``anchor: proximal``, truncated at ``weight_max``. ``token``: of each token (truncated importance
    sampling; AReaL, arXiv:2505.24298). ``sequence``: the product over the trajectory. ``geometric``: the geometric mean
    over the trajectory. ``none``: 1. Replayed tokens have ``replay.correction``."""
    weight_max: float = Field(2.0, gt=0)
    """Upper bound of w with ``anchor: proximal``."""
    masks: tuple[MaskConfig, ...] = ()
    """Rejection rules for fresh tokens, by π_prox/μ. All of them apply; a token is counted for the first rule that
    rejects it. Rejected tokens still count in the denominator of the loss. Known settings: ``{level: token, high: 2}``
    with a weight is masked importance sampling; ``{level: token, low: 0.5, high: 5}`` is IcePop (arXiv:2510.18855);
    ``{level: geometric, low: 0.99, high: 1.01}`` rejects rows on which engine and learner disagree. Off-policy tokens
    (replayed, and those with lessons as ``loss.off_clip_lessons`` selects) have their own loss and are not affected."""

    def check(self) -> None:
        if self.anchor == "behaviour" and self.weight in ("sequence", "geometric"):
            raise ValueError(
                f"importance.weight is {self.weight}, but importance.anchor is behaviour: its ratio is already π/μ, so "
                "a weight would correct twice. Set importance.anchor: proximal, or omit the weight (masks work with "
                "both)"
            )


class SupervisedConfig(Section):
    """Cross-entropy on demonstrations, added to the policy loss in every optimizer step."""

    weight: float = Field(0.0, ge=0)
    """Factor on the mean cross-entropy over supervised tokens. That mean has its own denominator: the policy loss is
    not rescaled. 0: off."""
    demonstrations: Path | None = None
    """A file from ``afterplay replay export``, or JSONL in the form that ``afterplay replay import`` reads. Its
    trajectories with a reward of at least ``replay.success_threshold`` are drawn, at temperature 1. None: imported
    demonstrations without recorded log-probabilities that the update replays; they keep their off-policy loss and the
    temperature they came with."""
    batch: int = Field(8, ge=1)
    """Trajectories of ``demonstrations`` in each optimizer step."""


class LossConfig(Section):
    """From advantages to gradients: the policy loss, its aggregation, and the terms added to it."""

    policy: Annotated[Function, Choice("ppo")] = Given(name="ppo")
    """Policy loss, by name or with its options: ``gspo`` or ``{name: sapo, negative: 1.1}``. Built in: ``ppo``,
    ``gspo``, ``gspo_token``, ``gmpo``, ``cispo``, ``sapo``, ``dppo_tv``, ``dppo_kl``. Your own: ``module:function`` or
    ``file.py:function``; ``learner.losses.base.PolicyLoss`` is its interface. Options and sources:
    docs/ALGORITHMS.md."""
    off_clip_high: float | None = Field(None, ge=0)
    """Upper clip of off-policy tokens (replayed, and those of ``off_clip_lessons``). None: 1.0, so that
    their ratio can reach 2 (``cispo``, ``dppo_tv`` and ``dppo_kl``: their ``clip_high``). It is wider than the clip of
    fresh tokens so that the policy can relearn what it has partly forgotten. The lower clip is that of fresh tokens."""
    off_clip_lessons: Literal["none", "discarded", "all"] = "discarded"
    """Rollouts with lessons in the prompt that use the off-policy loss: ``none``; ``discarded``, those trained
    on the prompt without the lessons (``lessons.keep_ratio``); or ``all``."""
    off_policy: Annotated[Function, Choice("clip")] = Given(name="clip")
    """Loss of off-policy tokens, by name or with options as in ``{name: shaped, beta: 0.1}``. ``clip``: that of fresh
    tokens, with the off-policy clip. ``shaped``: ``-A f(ratio)`` with ``f(x) = x / (x + beta)`` (LUFFY,
    arXiv:2504.14945; ExGRPO, arXiv:2510.02245). ``second_moment``: no clip; of the tokens whose
    loss moves the policy further from the one that sampled them, those that push their mean squared log-ratio above
    ``max`` are masked (M2PO, arXiv:2510.01161)."""
    aggregation: Literal["token_mean", "sequence_mean", "sequence_sum", "sequence_sum_norm"] = "token_mean"
    """Aggregation of token losses over an optimizer step with T tokens and N sequences (trajectories). ``token_mean``:
    sum over T (DAPO, arXiv:2503.14476). ``sequence_mean``: mean over sequences of their token means (GRPO,
    arXiv:2402.03300; also GSPO, GMPO and SAPO as published). ``sequence_sum``: mean over sequences of their token sums.
    ``sequence_sum_norm``: ``sequence_sum`` divided by the constant ``aggregation_length`` (Dr. GRPO,
    arXiv:2503.20783)."""
    aggregation_length: int | None = Field(None, ge=1)
    """Divisor of ``sequence_sum_norm``, in tokens; usually the longest response allowed."""
    entropy_bonus: float = Field(0.0, ge=0)
    """Coefficient of the policy's entropy at each token (nats), which is subtracted from the loss. 0: no bonus."""
    kl: Literal["none", "loss", "reward"] = "none"
    """Application of the KL divergence KL(π‖π_ref) to a reference policy. ``loss``: ``kl_coef`` times its estimate is
    added to the loss of each token. ``reward``: it is subtracted from the reward of each token before advantages are
    estimated (arXiv:1909.08593). ``none``: no reference policy is loaded."""
    kl_coef: float = Field(0.001, ge=0)
    """Coefficient of the KL term."""
    kl_estimator: Literal["k1", "k2", "k3", "k1+", "k3+"] | None = None
    """KL estimator (Schulman 2020), with d = log π - log π_ref: k1 = d, k2 = d²/2, k3 = exp(-d) - 1 + d. A plus keeps
    the value and uses the gradient of k2, whose expectation under the policy is the gradient of the KL
    (arXiv:2510.01555); the expected gradient of k1 is zero. None: k3 in the loss, k1 in the reward."""
    load_balancing: float = Field(0.0, ge=0)
    """For a mixture of experts: weight of the load-balancing loss (Switch Transformers, arXiv:2101.03961), the mean
    over layers of ``experts · Σ f · P``, which is 1 when the load is even. f is an expert's share of the choices, P its
    mean router probability, over all tokens of the rows that have a gradient, context included. 0: off."""
    supervised: SupervisedConfig = SupervisedConfig()

    def check(self) -> None:
        if (self.aggregation == "sequence_sum_norm") != (self.aggregation_length is not None):
            raise ValueError(
                "loss.aggregation_length belongs to loss.aggregation: sequence_sum_norm, got "
                f"{self.aggregation_length} with {self.aggregation}: set both or neither"
            )
        if self.kl == "none" and self.kl_estimator is not None:
            raise ValueError("loss.kl is none, so loss.kl_estimator would do nothing: set loss.kl to loss or reward")
        if self.kl == "reward" and self.kl_estimator is not None and self.kl_estimator.endswith("+"):
            raise ValueError(
                f"loss.kl_estimator {self.kl_estimator} differs from {self.kl_estimator[:-1]} only in its gradient, "
                f"but a reward has no gradient: set {self.kl_estimator[:-1]}"
            )
