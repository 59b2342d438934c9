"""Sections ``advantage`` (rewards to advantages), ``importance`` and ``loss`` (advantages to gradients)."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field, model_validator

from pipeline.config.base import Options, Section, expect_kind
from pipeline.config.estimators import EstimatorOptions, Grpo
from pipeline.config.policy_losses import Clip, OffPolicyOptions, PolicyOptions, Ppo


class AdvantageConfig(Section):
    estimator: EstimatorOptions = Grpo()
    """The estimator with its options: ``{name: cpo, failed_weight: 0.5}``, or its name alone. ``grpo``, ``rloo`` =
    ``leave_one_out``, ``opo``, ``maxrl``, ``gpg``, ``pass_at_k``, ``remax``, ``reinforce_pp``,
    ``reinforce_pp_baseline``, ``gae``, ``cpo``; or your own as module:function or file.py:function. docs/LEARNER.md has
    their options and sources."""
    epsilon: float = Field(1e-6, gt=0)
    """Added to every standard deviation that something is divided by."""
    rewards: Literal["outcome", "turns", "both"] = "outcome"
    """``outcome``: what the scorer gave, at the last token. ``turns``: what the environment gave for each turn, at the
    turn's last token. ``both``: the turns' rewards, and at the last token what of the outcome they do not explain, so
    that they sum to the outcome. A trajectory without turn rewards has its outcome at the last token."""
    turn_weight: float = 1.0
    """Multiplies turn rewards; with functions in the scorer, set it to ``scorer.environment_weight``."""
    turn_gamma: float = Field(1.0, gt=0, le=1)
    """Discount per turn: of estimators that compare a group, where ``rewards`` is not ``outcome``."""
    shaping: str | None = None
    """Your own change of rewards before estimation, as module:function or file.py:function. It gets the trajectories
    as estimators see them (a list of ``ScoredTrajectory``) and as they are stored, and returns the first with other
    rewards."""
    overlong_tokens: int | None = Field(None, ge=1)
    """Length at which the overlong penalty is full (DAPO, arXiv:2503.14476, eq. 13), in sampled tokens of the whole
    trajectory. None: no penalty."""
    overlong_buffer: int = Field(0, ge=0)
    """The penalty rises linearly over this many tokens below ``overlong_tokens``."""
    overlong_penalty: float = Field(1.0, ge=0)
    """Reward that an overlong trajectory loses."""
    reward_norm: Literal["none", "group", "batch"] = "none"
    """Outcomes, before estimation, minus their mean and over their standard deviation, of the group or of the update;
    with turn rewards only divided by it, as a mean taken off every turn would pay for the number of turns."""
    greedy_rollouts: bool = False
    """Order one greedy rollout (temperature 0) more for each group, which is never trained: its reward is the
    ``baseline`` that estimators see. remax orders them in any case."""

    @property
    def hint_template(self) -> str | None:
        """The prompt with a hint, which actors keep beside the one they use; None where the estimator has no use for
        it."""
        template: str | None = getattr(self.estimator, "hint_template", None)
        return template

    @property
    def orders_greedy(self) -> bool:
        """True if a greedy rollout belongs to each group."""
        return self.greedy_rollouts or self.estimator.name == "remax"

    def options_of(self, kind: type[Options]) -> Options:
        """Options of the chosen estimator, which must be of ``kind``."""
        return expect_kind(self.estimator, kind, "advantage.estimator")

    @model_validator(mode="after")
    def _agrees(self) -> AdvantageConfig:
        if self.overlong_tokens is not None and self.overlong_buffer > self.overlong_tokens:
            raise ValueError(
                f"advantage.overlong_buffer ({self.overlong_buffer}) must not be more than overlong_tokens "
                f"({self.overlong_tokens})"
            )
        return self


Level = Literal["token", "sequence", "geometric", "any_token"]


class MaskConfig(Section):
    """Tokens that are rejected because π_prox/μ lies outside ``[low, high]``; π_prox is the policy before the step."""

    level: Level
    """Scope of the ratio: the token; its row (``sequence``: the product over the row's tokens; ``geometric``: that
    product to the power of one over their number); or the row is rejected as soon as any token's own ratio lies outside
    (``any_token``, a veto). A row is a branch of a trajectory."""
    low: float = Field(0.0, ge=0)
    high: float | None = Field(None, gt=0)
    """None: no upper bound."""

    @model_validator(mode="after")
    def _bounds(self) -> MaskConfig:
        if self.high is None and self.low == 0:
            raise ValueError("importance.masks: a mask without low and high rejects nothing: give one of them")
        if self.high is not None and self.high <= self.low:
            raise ValueError(
                f"importance.masks: high ({self.high}) must be above low ({self.low}), or everything is rejected"
            )
        return self


class ImportanceConfig(Section):
    anchor: Literal["behaviour", "proximal"] = "behaviour"
    """π_old of fresh tokens: ``behaviour`` takes μ as the engine recorded it, so that π/π_old carries the whole
    correction; ``proximal`` takes the learner's own weights before the step, corrects with w = π_old/μ, and clips
    π/π_old (decoupled PPO, arXiv:2110.00641)."""
    weight: Literal["none", "token", "sequence", "geometric"] = "token"
    """w in the proximal form, truncated at ``weight_max``: of each token (truncated importance sampling; AReaL,
    arXiv:2505.24298), of its row (product of the row's ratios), or the geometric mean over the row. ``none``: 1."""
    weight_max: float = Field(2.0, gt=0)
    """Truncation of w in the proximal form."""
    masks: tuple[MaskConfig, ...] = ()
    """Rejections by π_prox/μ of fresh tokens with the fresh loss; rejected tokens keep their share of the denominator
    and are counted by reason. All of them apply; a token counts for the first that rejects it. With
    ``{level: token, high: 2}`` and a weight it is masked importance sampling, with ``{level: token, low: 0.5,
    high: 5}`` IcePop (arXiv:2510.18855), with ``{level: geometric, low: 0.99, high: 1.01}`` rejection of whole rows
    that engine and learner disagree on. Off-policy tokens (replayed; guided as ``loss.off_clip_guided`` says) have
    their own loss and are never rejected here."""
    log_ratio_max: float = Field(20.0, gt=0)
    """log-ratios are clamped to ± this before exp."""

    @model_validator(mode="after")
    def _weight_is_used(self) -> ImportanceConfig:
        if self.anchor == "behaviour" and self.weight in ("sequence", "geometric"):
            raise ValueError(
                f"importance.weight is {self.weight}, but importance.anchor is behaviour: there π/μ is the ratio "
                "itself and a weight would correct twice. Set importance.anchor: proximal, or leave the weight out "
                "(masks work with either)"
            )
        return self


class SupervisedConfig(Section):
    """Cross-entropy beside the policy loss, in every optimizer step of RL."""

    weight: float = Field(0.0, ge=0)
    """Of the mean over supervised tokens, which has a denominator of its own: that of the policy loss does not change.
    0: off."""
    source: Literal["replayed", "file"] = "replayed"
    """``replayed``: tokens of imported demonstrations without recorded log-probabilities that the update replays; they
    keep their off-policy loss too, and the temperature they came with. ``file``: trajectories drawn from
    ``demonstrations``, at temperature 1."""
    demonstrations: Path | None = None
    """File from ``afterplay replay export``, or JSONL as ``afterplay replay import`` takes it. Only trajectories with
    a reward of at least ``replay.success_threshold`` are trained."""
    batch: int = Field(8, ge=1)
    """Trajectories of the file in each optimizer step."""

    @model_validator(mode="after")
    def _file_where_needed(self) -> SupervisedConfig:
        if self.weight and (self.source == "file") != (self.demonstrations is not None):
            raise ValueError(
                "loss.supervised.demonstrations belongs to source: file, and that needs it (a file of demonstrations)"
            )
        return self


class LossConfig(Section):
    policy: PolicyOptions = Ppo()
    """The policy loss with its options: ``{name: sapo, negative: 1.1}``, or its name alone. ``ppo``, ``gspo``,
    ``gspo_token``, ``gmpo``, ``cispo``, ``sapo``, ``dppo_tv``, ``dppo_kl``, or your own as ``module:function`` or
    ``file.py:function`` (``learner.losses.base.PolicyLoss`` says what it gets and gives). docs/LEARNER.md has their
    options and sources."""
    off_clip_low: float | None = Field(None, ge=0, le=1)
    """Lower clip of off-policy tokens (replayed; guided as ``off_clip_guided`` says). None: that of the policy loss."""
    off_clip_high: float | None = Field(None, ge=0)
    """Upper clip of off-policy tokens. None: 1.0, which lets their ratio reach 2 (cispo, dppo_tv and dppo_kl:
    their ``clip_high``). Larger than the fresh clip, so that what the policy has half forgotten can be learned back."""
    off_clip_guided: Literal["none", "discarded", "all"] = "discarded"
    """Trajectories with lessons in the prompt that use the off-policy loss: none, those trained without the lessons
    (``lessons.train_mode``), or all."""
    off_policy: OffPolicyOptions = Clip()
    """Loss of off-policy tokens: ``clip``, that of fresh ones but with the off clip; ``shaped``, ``-A f(ratio)`` with
    ``f(x) = x / (x + beta)`` (LUFFY, arXiv:2504.14945; ExGRPO, arXiv:2510.02245); ``second_moment``, no clip, but
    tokens whose log-ratios push the batch's second moment over ``max`` are masked (M2PO, arXiv:2510.01161). Alone, or
    with options as in ``{name: shaped, beta: 0.1}``."""
    aggregation: Literal["token_mean", "sequence_mean", "sequence_sum", "sequence_sum_norm"] = "token_mean"
    """Sum of the token losses of an optimizer step, T its tokens and N its sequences (trajectories): ``token_mean``
    divides by T (DAPO, arXiv:2503.14476); ``sequence_mean`` is the mean over sequences of token means (GRPO,
    arXiv:2402.03300; also GSPO, GMPO and SAPO as published); ``sequence_sum`` the mean over sequences of token sums;
    ``sequence_sum_norm`` that over the constant ``aggregation_length`` (Dr. GRPO, arXiv:2503.20783)."""
    aggregation_length: int | None = Field(None, ge=1)
    """Tokens; commonly the longest response allowed."""
    entropy_bonus: float = Field(0.0, ge=0)
    kl: Literal["none", "loss", "reward"] = "none"
    """Place of KL(π‖π_ref) to a reference policy: ``loss`` adds ``kl_coef`` times its estimate at each token;
    ``reward`` takes it from each token's reward before advantages are estimated (arXiv:1909.08593)."""
    kl_coef: float = Field(0.001, ge=0)
    """Coefficient, at the start where the controller is adaptive."""
    kl_estimator: Literal["k1", "k2", "k3", "abs", "k1+", "k3+", "abs+"] | None = None
    """With d = log π - log π_ref (Schulman 2020): k1 = d, k2 = d²/2, k3 = exp(-d) - 1 + d, abs = |d|. A plus keeps the
    value and takes the gradient of k2, whose expectation on the policy's own samples is the gradient of the KL
    (arXiv:2510.01555); that of k1 is zero. None: k3 in the loss, k1 in the reward."""
    kl_controller: Literal["fixed", "adaptive"] = "fixed"
    """``adaptive``: after each update the coefficient grows or shrinks by at most 20 % of trajectories /
    ``kl_horizon``, towards a mean KL of ``kl_target`` (arXiv:1909.08593, section 2.2)."""
    kl_target: float = Field(0.01, gt=0)
    """Nats per token, of the estimator's value."""
    kl_horizon: float = Field(10_000.0, gt=0)
    """Trajectories."""
    supervised: SupervisedConfig = SupervisedConfig()

    @model_validator(mode="after")
    def _combinations(self) -> LossConfig:
        if (self.aggregation == "sequence_sum_norm") != (self.aggregation_length is not None):
            raise ValueError(
                "loss.aggregation_length goes with loss.aggregation: sequence_sum_norm, got "
                f"{self.aggregation_length} with {self.aggregation}: set both or neither"
            )
        if self.kl == "none" and (self.kl_controller == "adaptive" or self.kl_estimator is not None):
            raise ValueError(
                "loss.kl is none, so loss.kl_estimator and loss.kl_controller would do nothing: set loss.kl to loss or "
                "reward"
            )
        if self.kl == "reward" and self.kl_estimator is not None and self.kl_estimator.endswith("+"):
            raise ValueError(
                f"loss.kl_estimator {self.kl_estimator} differs from {self.kl_estimator[:-1]} only in its gradient, "
                "but none flows through a reward: take it without the plus"
            )
        if self.kl_controller == "adaptive" and self.kl_coef == 0:
            raise ValueError("loss.kl_coef is 0 and an adaptive controller only multiplies it: start above 0")
        return self
