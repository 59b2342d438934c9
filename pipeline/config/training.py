"""Sections about learning: groups, staleness, advantages, loss, optimizer, publication, checkpoints."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from pipeline.config.base import Section


class GroupsConfig(Section):
    """What one update is made of: ``groups_per_step`` groups of exactly ``n_rollout`` trajectories."""

    n_rollout: int = Field(8, ge=1, le=4096)
    groups_per_step: int = Field(8, ge=1, le=65_536)
    attempts_max: int = Field(3, ge=1)
    """Failed rollouts of one slot before its group is cancelled."""

    @property
    def trajectories_per_step(self) -> int:
        """B of DESIGN section 6."""
        return self.n_rollout * self.groups_per_step


class StalenessConfig(Section):
    max: int = Field(1, ge=0, le=1024)
    """η: how many updates behind the policy a trajectory may be when it is trained. 0 is strictly on-policy: play and
    training alternate. 1 lets them overlap."""
    late: Literal["train", "drop"] = "train"
    """What to do with a trajectory that exceeds the bound all the same (after a restart): train it with its importance
    weight, or drop its group. Both are counted."""


class AdvantageConfig(Section):
    estimator: Literal["grpo"] = "grpo"
    """GRPO (Shao et al. 2024, arXiv:2402.03300): reward minus the group's mean, over its standard deviation."""
    normalize_std: bool = True
    """False is Dr. GRPO (arXiv:2503.20783): no division by the standard deviation."""
    epsilon: float = Field(1e-6, gt=0)


class ImportanceConfig(Section):
    anchor: Literal["behaviour", "proximal"] = "behaviour"
    """π_old of fresh tokens: ``behaviour`` takes μ as the engine recorded it; ``proximal`` recomputes it with the
    learner's weights before the step, corrects with truncated w = π_old/μ, and clips π/π_old (decoupled PPO)."""
    weight_max: float = Field(2.0, gt=0)
    """Truncation of w in the proximal form."""
    log_ratio_max: float = Field(20.0, gt=0)
    """log-ratios are clamped to ± this before exp."""


class LossConfig(Section):
    clip_low: float = Field(0.2, ge=0, lt=1)
    clip_high: float = Field(0.28, ge=0)
    dual_clip: float | None = Field(3.0, gt=1)
    """Bound on the loss of tokens with negative advantage, as a multiple of |A| (arXiv:1912.09729). None: no bound."""
    off_clip_low: float | None = Field(None, ge=0, lt=1)
    """Lower clip of off-policy tokens (replayed; guided as ``off_clip_guided`` says). None: ``clip_low``."""
    off_clip_high: float = Field(1.0, ge=0)
    """Upper clip of off-policy tokens: 1.0 lets their ratio reach 2. Larger than the fresh clip, so that what the
    policy has half forgotten can be learned back."""
    off_clip_guided: Literal["none", "discarded", "all"] = "discarded"
    """Which trajectories whose prompt held lessons use the off-policy loss: none, those trained without the lessons
    (``lessons.train_mode``), or all."""
    off_policy: Literal["clip", "shaped", "second_moment"] = "clip"
    """Loss of off-policy tokens: clipped like fresh ones but with the off clip; ``shaped``: ``-A f(ratio)`` with
    ``f(x) = x / (x + off_shape_beta)`` (LUFFY, arXiv:2504.14945; ExGRPO, arXiv:2510.02245); ``second_moment``: no clip,
    but tokens whose log-ratios push the batch's second moment over ``second_moment_max`` are masked (M2PO,
    arXiv:2510.01161)."""
    off_shape_beta: float = Field(0.1, gt=0)
    second_moment_max: float = Field(0.04, gt=0)
    aggregation: Literal["token_mean", "sequence_mean"] = "token_mean"
    """Denominator over the whole batch: all response tokens, or sequences of token means."""
    entropy_bonus: float = Field(0.0, ge=0)


class LearnerConfig(Section):
    device: Literal["auto", "cpu", "cuda"] = "auto"
    threads: int | None = Field(None, ge=1)
    compute_dtype: Literal["float32", "bfloat16"] = "bfloat16"
    """Autocast type of the forward and backward pass; master weights are float32."""
    learning_rate: float = Field(1e-6, gt=0)
    warmup_steps: int = Field(0, ge=0)
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """After warm-up, to 0 at ``run.total_steps`` for linear and cosine."""
    betas: tuple[float, float] = (0.9, 0.999)
    weight_decay: float = Field(0.0, ge=0)
    grad_clip: float = Field(1.0, gt=0)
    """Largest global gradient norm."""
    epochs: int = Field(1, ge=1)
    """Optimizer passes over each batch."""
    minibatches: int = Field(1, ge=1)
    """Optimizer steps per pass."""
    tokens_per_microbatch: int = Field(4096, ge=1)
    """Padded tokens of one forward pass; memory follows it."""
    logits_tokens_max: int = Field(1024, ge=1)
    """Rows of the ``[tokens, vocabulary]`` matrix held at once."""
    gradient_checkpointing: bool = False
    prefetch_batches: int = Field(1, ge=1, le=64)
    """Batches that may wait decoded at the learner beyond the one in training."""


class PublishConfig(Section):
    """How new weights reach the engines."""

    keep: int = Field(2, ge=1)
    """Weight folders kept."""
    dtype: Literal["bfloat16", "float32", "float16"] = "bfloat16"
    """Type of the published weights; engines cast to their own on load."""
    timeout_seconds: float = Field(120.0, gt=0)
    """An engine that takes longer to load a version is left behind (and tried again) while the run goes on."""


class CheckpointConfig(Section):
    every: int = Field(10, ge=1)
    """Updates between checkpoints. Updates after the last one are made again, from the same groups, if the learner is
    killed."""
    keep: int = Field(2, ge=1)
    at_end: bool = True


class ScoreFunction(Section):
    """One reward function beside the environment's score."""

    path: str
    """``module:function`` or ``file.py:function``; called with a Trajectory, returns a number or None. May be async."""
    name: str | None = None
    weight: float = 1.0
    timeout_seconds: float = Field(30.0, gt=0)
    worker: bool = False
    """Run in a worker process: for functions that are slow or use the CPU."""


class ScorerConfig(Section):
    environment_weight: float = 1.0
    """Weight of the environment's own score."""
    functions: tuple[ScoreFunction, ...] = ()
    concurrency: int = Field(64, ge=1)
    """Trajectories scored at once."""
    workers: int = Field(1, ge=1)
    """Worker processes for functions with ``worker: true``."""

    @model_validator(mode="after")
    def _unique_names(self) -> ScorerConfig:
        names = [f.name or f.path for f in self.functions]
        if len(set(names)) != len(names) or "environment" in names:
            raise ValueError(f"scorer.functions need different names, none of them 'environment', got {names}")
        return self
