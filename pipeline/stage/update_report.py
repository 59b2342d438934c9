"""What the learner says of an update beside the groups it trained: optional, checked before anything changes."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from pipeline.errors import WireError

ESS_OF = ("all", "fresh", "replay", "carried")


@dataclass(frozen=True, slots=True)
class UpdateReport:
    """The optional part of CONSUMED (docs/PROTOCOL.md)."""

    replayed: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """By group id: the replays that were trained."""
    ess: Mapping[str, float | None] = field(default_factory=lambda: dict.fromkeys(ESS_OF))
    """Kish effective sample size of pi/mu over recorded tokens, as a share: ``all``, ``fresh``, ``replay``.
    ``carried``: that of ``replay`` times min(1, mean ratio), which the guard of the replay share goes by."""
    entropies: Mapping[str, float] = field(default_factory=dict)
    """By trajectory id: mean exact entropy over its sampled tokens, nats."""
    choice_failed: int = 0
    """Groups for which the learner could not choose and took the stage's choice."""
    policy_version: int | None = None
    """Version of the weights that the update was made from; None: not told."""

    @classmethod
    def read(cls, header: Mapping[str, Any]) -> UpdateReport:
        """Raises :class:`WireError` for values of the wrong kind; numbers that are not finite count as unknown."""
        try:
            replayed = {str(g): tuple(map(str, ids)) for g, ids in (header.get("replayed") or {}).items()}
            ess = {key: _finite((header.get("ess") or {}).get(key)) for key in ESS_OF}
            entropies = {
                str(t): value for t, v in (header.get("entropy") or {}).items() if (value := _finite(v)) is not None
            }
            told = header.get("policy_version")
            version = None if told is None else int(told)
            return cls(replayed, ess, entropies, int(header.get("choice_failed") or 0), version)
        except (TypeError, ValueError, AttributeError) as error:
            raise WireError(f"what the learner reports of an update is not understood: {error}") from error


def _finite(value: Any) -> float | None:
    number = math.nan if value is None else float(value)
    return number if math.isfinite(number) else None
