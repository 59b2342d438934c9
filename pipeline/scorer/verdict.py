"""Verdict of the scorer on one trajectory: its rewards, total and failures."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

ENVIRONMENT = "environment"
"""Name of the environment's own score among the rewards."""
REASONS = (
    *("raised", "timeout", "crashed", "missing", "type", "nonfinite"),
    *("unavailable", "refused", "protocol"),
)
"""Kinds of failure. Of any part: the function raised, took too long, its process died, it gave None, something that is
no number, or no finite one. Of a server: it does not answer (or 429, 5xx), refuses the request (4xx), or says what is
not understood."""


@dataclass(frozen=True, slots=True)
class ScoreFailure:
    """Reason for which one part has no value."""

    name: str
    reason: str
    """One of :data:`REASONS`."""
    details: str = ""
    kind: str = ""
    """Class name of what the function raised."""
    traceback: str = ""

    @property
    def cause(self) -> str:
        """Name under which such failures are counted."""
        return f"{self.name} {self.reason}{' ' if self.kind else ''}{self.kind}"


@dataclass(frozen=True, slots=True)
class Verdict:
    """The weighted sum of all parts; None as soon as one part with a weight has no value."""

    reward: float | None
    rewards: Mapping[str, float | None]
    failures: tuple[ScoreFailure, ...] = field(default=())


def combine(
    parts: Mapping[str, float | None], weights: Mapping[str, float], failures: tuple[ScoreFailure, ...] = ()
) -> Verdict:
    """``reward = Σ weight · part`` over the parts whose weight is not 0."""
    reward: float | None = 0.0
    for name, weight in weights.items():
        value = parts.get(name)
        if weight == 0:
            continue
        if value is None:
            reward = None
            break
        assert reward is not None
        reward += weight * value
    if reward is not None and not math.isfinite(reward):
        return Verdict(None, parts, (*failures, ScoreFailure("reward", "nonfinite", f"the weighted sum is {reward}")))
    return Verdict(reward, parts, failures)
