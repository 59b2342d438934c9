"""What passes over an update found before its first optimizer step, by the number of the token in the update.

Estimators and losses say what they need; the trainer makes only those passes. Dimension: S trained tokens of the
update, in the order of its rows (``batching.token_numbers``).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

TokenArray = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class TokenScores:
    """float32 ``[S]`` each; None: not asked for."""

    logprobs: TokenArray | None = None
    """log π of the weights before the update."""
    entropies: TokenArray | None = None
    """Of those weights, nats."""
    reference: TokenArray | None = None
    """log π of the reference policy."""
    values: TokenArray | None = None
    """The critic's value of the state before each token."""
    returns: TokenArray | None = None
    """What the critic is to learn, from the estimator."""
    hinted: TokenArray | None = None
    """log π of the weights before the update, with a hint or the solution in the prompt."""
