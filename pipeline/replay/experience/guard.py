"""How much of the replay share is left: the effective sample size of replayed tokens decides."""

from __future__ import annotations

import math

from pipeline.config.replay import EssGuardConfig


def next_factor(guard: EssGuardConfig, factor: float, ess: float | None) -> float:
    """The share's factor, in [share_min, 1], after an update whose replayed tokens had this ESS (0 to 1): Kish's times
    ``min(1, mean ratio)``. Kish's alone is 1 where every ratio is 0.01, and such replays carry nothing but a baseline.

    Below the floor it shrinks by a factor, else it grows by a constant: fast down, slow up. An update without replayed
    tokens (``ess`` None) counts as one above the floor, or a share of 0 would stay 0 for ever. An ESS that is not
    finite counts as 0.
    """
    if not guard.enabled:
        return 1.0
    if ess is not None and not (math.isfinite(ess) and ess >= guard.floor):
        return max(guard.share_min, factor * guard.shrink)
    return min(1.0, factor + guard.recover)
