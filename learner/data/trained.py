"""Facts of a trained update that CONSUMED carries beside its group ids; plain JSON values, also in checkpoints."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class TrainedGroup:
    """Facts of one trained group."""

    replayed: tuple[str, ...] = ()
    """Trajectory ids."""
    entropy: Mapping[str, float] = field(default_factory=dict)
    """Exact entropy, nats, mean over sampled tokens, by trajectory id: of what was trained, and of candidates."""
    choice_failed: bool = False
    """Its candidates could not be scored: the stored choice was trained."""


@dataclass(frozen=True, slots=True)
class Trained:
    """Facts of one update."""

    ess: Mapping[str, float | None] = field(default_factory=dict)
    """Kish's effective sample size of token ratios over N: ``all``, ``fresh``, ``replay``; and ``carried``, the
    ``Weights.carried_ratio`` of replayed tokens, or of replayed trajectories with ``replay.ess_guard.level:
    sequence``."""
    groups: Mapping[str, TrainedGroup] = field(default_factory=dict)
    policy_version: int | None = None
    """Version of the weights that the update was made from."""

    def header(self) -> dict[str, Any]:
        """The part of CONSUMED (docs/PROTOCOL.md)."""
        groups = self.groups.items()
        return {
            "replayed": {name: list(g.replayed) for name, g in groups if g.replayed},
            "ess": {source: _finite(value) for source, value in self.ess.items()},
            "entropy": {t: value for _, g in groups for t, value in g.entropy.items() if math.isfinite(value)},
            "choice_failed": sum(g.choice_failed for _, g in groups),
            **({} if self.policy_version is None else {"policy_version": self.policy_version}),
        }

    def as_json(self) -> dict[str, Any]:
        return {
            "ess": {source: _finite(value) for source, value in self.ess.items()},
            "groups": {
                name: {
                    "replayed": list(g.replayed),
                    "entropy": {t: value for t, value in g.entropy.items() if math.isfinite(value)},
                    "choice_failed": g.choice_failed,
                }
                for name, g in self.groups.items()
            },
            "policy_version": self.policy_version,
        }

    @classmethod
    def from_json(cls, raw: Mapping[str, Any]) -> Trained:
        """The inverse of :meth:`as_json`. Raises KeyError, TypeError or ValueError where it is malformed."""
        groups = {
            str(name): TrainedGroup(
                tuple(g.get("replayed", ())), dict(g.get("entropy", {})), bool(g.get("choice_failed", False))
            )
            for name, g in raw.get("groups", {}).items()
        }
        version = raw.get("policy_version")
        return cls(dict(raw.get("ess", {})), groups, None if version is None else int(version))


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None
