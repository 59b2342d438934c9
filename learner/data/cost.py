"""Floating-point operations of a forward pass: the measure by which rows are divided among ranks, and of utilisation.

Dimensions: n tokens of a row.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import numpy.typing as npt

Count = TypeVar("Count", int, npt.NDArray[np.int64])


@dataclass(frozen=True, slots=True)
class PassCost:
    """Operations of one forward pass by what causes them. Whole numbers, so that all ranks compute the same sums."""

    token: int = 1
    """Operations of the layers' weights for each token laid."""
    pair: int = 0
    """Operations of attention for each key that a token attends to, itself included."""
    sampled: int = 0
    """Operations of the output layer for each sampled token."""
    backward: int = 2
    """The backward pass in forward passes: 1 where the weights are frozen under adapters."""

    @property
    def learning(self) -> int:
        """Forward and backward pass in forward passes. What checkpointing computes again is not counted."""
        return 1 + self.backward

    def prefix(self, n: Count) -> Count:
        """Operations for the first ``n`` tokens of a row, without the output layer."""
        return self.token * n + self.pair * (n * (n + 1) // 2)

    def operations(self, tokens: int, pairs: int, sampled: int) -> int:
        """Operations of a pass that lays ``tokens``, which attend to ``pairs`` keys in all."""
        return self.token * tokens + self.pair * pairs + self.sampled * sampled
