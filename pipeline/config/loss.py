"""Sections ``importance`` and ``loss``: what an advantage becomes."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from pipeline.config.base import Section


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
