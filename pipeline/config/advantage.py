"""Section ``advantage``: how rewards become advantages."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from pipeline.config.base import Section


class AdvantageConfig(Section):
    estimator: Literal["grpo"] = "grpo"
    """GRPO (Shao et al. 2024, arXiv:2402.03300): reward minus the group's mean, over its standard deviation."""
    normalize_std: bool = True
    """False is Dr. GRPO (arXiv:2503.20783): no division by the standard deviation."""
    epsilon: float = Field(1e-6, gt=0)
