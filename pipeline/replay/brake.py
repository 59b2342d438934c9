"""Slows admission down while nothing succeeds: a broken environment must not turn into a flood of orders."""

from __future__ import annotations

from dataclasses import dataclass

GROUPS_FREE = 4
"""Groups that may be given up one after another before new ones have to wait."""
WAIT_SECONDS = 0.25
WAIT_SECONDS_MAX = 15.0


@dataclass(slots=True)
class Brake:
    """Pure; times are those of the caller's clock, seconds."""

    failures: int = 0
    """Groups given up since the last one that was completed."""
    until: float = 0.0
    reason: str = ""
    """What the last rollout failed with."""

    def failed(self, now: float) -> None:
        """A group was given up because its rollouts fail."""
        self.failures += 1
        if self.failures > GROUPS_FREE:
            doublings = min(self.failures - GROUPS_FREE - 1, 16)
            self.until = now + min(WAIT_SECONDS * 2.0**doublings, WAIT_SECONDS_MAX)

    def succeeded(self) -> None:
        """A group was completed."""
        self.failures, self.until = 0, 0.0

    def holds(self, now: float) -> bool:
        """Whether new groups have to wait."""
        return now < self.until
