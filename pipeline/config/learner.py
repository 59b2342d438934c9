"""Section ``learner``: model in memory, optimizer, passes over a batch."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from pipeline.config.base import Section


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
