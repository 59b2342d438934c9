"""One actor that probes the engines for all: chosen, and what it saw passed on.

*consumes* actors coming and going, ENGINES of the chosen actor, the newest policy version, the clock; *produces* WATCH
for the chosen actor and ENGINES for all others. So the requests that an engine gets for its state do not depend on the
number of actors. Nothing is written to the store, and no actor depends on it: one that hears nothing for some seconds
probes the engines itself (:mod:`actors.engine.pool`).
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import chain, takewhile
from typing import Any

from pipeline.errors import WireError
from pipeline.stage.group_records import SharedState, StagePart
from pipeline.stage.leases import Leases
from pipeline.store.effects import Send
from pipeline.transport.messages import Kind

SILENT_SECONDS = 3.0
"""Another actor is chosen when nothing came from the chosen one for so long. It reports once a second."""
RELAYED_MAX = 4000
"""ENGINES sent in a second, to all actors together: with many actors, reports that follow one another are passed on as
one."""
RELAY_SECONDS = 0.05
"""Shortest time between two, with few actors."""


class EngineWatch(StagePart):
    """At most one actor is chosen, and one is while any is connected."""

    def __init__(self, shared: SharedState, leases: Leases) -> None:
        super().__init__(shared)
        self._leases = leases
        self.chosen: str | None = None
        """Name of the actor that probes for all."""
        self._heard_at = float("-inf")
        self._looked = self._staleness.policy_version
        """Newest version for which the chosen actor got WATCH."""
        self._seen: dict[str, Any] | None = None
        """Newest ENGINES of the chosen actor; None: none yet."""
        self._news = False
        """True while it is not passed on."""
        self._relayed_at = float("-inf")

    def up(self, actor: str) -> None:
        """The actor was welcomed, maybe again: a process that was chosen does not know it any more."""
        if actor == self.chosen:
            self.chosen = None
        if self.chosen is not None and self._seen is not None:
            self._journal.effect(Send(actor, Kind.ENGINES, self._seen))

    def seen(self, actor: str, header: Mapping[str, Any]) -> None:
        """ENGINES. Those of an actor that is not chosen any more are passed over. Raises :class:`WireError`."""
        engines = header.get("engines")
        if not isinstance(engines, dict):
            raise WireError(f"expected engines to be a mapping of URLs, got {str(engines)[:80]}")
        if actor == self.chosen:
            self._heard_at, self._seen, self._news = self._clock.now, {"engines": engines}, True

    def plan(self) -> None:
        """Choose, tell the chosen actor to look, and pass on what is new, as far as it is time."""
        now = self._clock.now
        if not self._is_up(self.chosen) or now - self._heard_at >= SILENT_SECONDS:
            self.chosen, self._heard_at = self._next(), now
            self._seen, self._news = None, False
            self._look()
        elif self._staleness.policy_version > self._looked:
            self._look()
        if self._news and now >= self._due():
            self._news, self._relayed_at = False, now
            for name, actor in self._leases.actors.items():
                if actor.down_since is None and name != self.chosen and self._seen is not None:
                    self._journal.effect(Send(name, Kind.ENGINES, self._seen))

    def next_deadline(self) -> float | None:
        """Time at which :meth:`plan` has something to do, on the clock of ``now``."""
        if self.chosen is None:
            return None
        silent = self._heard_at + SILENT_SECONDS
        return min(silent, self._due()) if self._news else silent

    def _due(self) -> float:
        return self._relayed_at + max(RELAY_SECONDS, len(self._leases.actors) / RELAYED_MAX)

    def _look(self) -> None:
        self._looked = self._staleness.policy_version
        if self.chosen is not None:
            self._journal.effect(Send(self.chosen, Kind.WATCH, {}))

    def _is_up(self, name: str | None) -> bool:
        actor = None if name is None else self._leases.actors.get(name)
        return actor is not None and actor.down_since is None

    def _next(self) -> str | None:
        """The actor that is connected and comes after the chosen one, in the order in which they came; itself where
        there is no other."""
        names = list(self._leases.actors)
        before = len(list(takewhile(lambda name: name != self.chosen, names))) + 1
        return next((name for name in chain(names[before:], names[:before]) if self._is_up(name)), None)
