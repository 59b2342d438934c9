"""Records what each update changed in the experience, so that it is undone when a learner resumes from before it.

A record is kept until no checkpoint is left that is older than its update.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(slots=True)
class UpdateEffects:
    """State before an update, and the entries that it used."""

    update: int
    factor: float
    """The guard's."""
    started: bool
    """True if mixing had begun."""
    used: list[int] = field(default_factory=list)
    """``row_id`` of each entry that was trained as a replay."""
    entropies: list[tuple[int, float | None]] = field(default_factory=list)
    """``row_id`` of each entry that got another entropy, and the one before."""


class UpdateHistory:
    """The effects of the latest updates, the oldest first. ``changed`` is reset by its reader."""

    def __init__(self, kept: int, state: Iterable[Mapping[str, Any]] | None = None) -> None:
        self._kept = kept
        self._effects = [UpdateEffects(**effects) for effects in state or ()]
        self.changed = False

    def add(self, effects: UpdateEffects) -> None:
        self._effects.append(effects)
        self.changed = True

    def covered(self, updates: int) -> None:
        """The learner has a checkpoint of so many updates, and older ones of at most ``kept`` updates before it."""
        self._effects = [e for e in self._effects if e.update >= updates - self._kept]
        self.changed = True

    def take_back(self, updates: int) -> list[UpdateEffects]:
        """The effects of all updates from number ``updates`` on, the latest first. They are forgotten here."""
        taken = [e for e in reversed(self._effects) if e.update >= updates]
        self._effects = [e for e in self._effects if e.update < updates]
        self.changed = True
        return taken

    def state(self) -> list[dict[str, Any]]:
        """JSON that :meth:`__init__` takes back."""
        return [asdict(effects) for effects in self._effects]
