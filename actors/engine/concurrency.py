"""Number of episodes that an actor plays at once, by what its engines report. A pure state machine.

It rises each time that as many episodes have ended, if all of it is used and the engines keep up: to twice as many
until they first do not, then by a constant. It falls by a factor when the engines do not keep up (additive increase,
multiplicative decrease: actors that share engines come to equal parts). Signs of too many episodes are requests that
wait for room, a full KV cache, requests that are thrown out of it, and prefixes that the cache has lost before the next
turn: fewer hits than the prompts have known tokens. After a fall the next step waits until no more episodes are played.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from actors.engine.base import EngineReport
from actors.engine.engine_state import KV_FULL

LOOK_SECONDS = 5.0
"""Time between two looks at the reports."""
WAITING_MAX = 0.1
"""Waiting requests of those in the batches that are no sign of too many: they come and go with every burst."""
HITS_MIN = 0.8
"""Share of the known prompt tokens that the caches must find."""
LOOK_TOKENS = 20_000
"""Prompt tokens after which that share is looked at."""
RISE = 1 / 32
"""Share of the upper bound, at each rise."""
FALL = 0.75


@dataclass(slots=True)
class _Tokens:
    """Prompt tokens, counted since some moment."""

    asked: float = 0.0
    known: float = 0.0
    """Tokens that the engine was given with the turn before."""
    queries: float = 0.0
    hits: float = 0.0


class ConcurrencyLimit:
    """``value`` is between ``least`` and ``most``, and begins at ``least``."""

    def __init__(self, least: int, most: int) -> None:
        self.least, self.most = least, most
        self.value = least
        self._waited = self._falling = self._fell = False
        self._ended = self._engines = 0
        self._preemptions: float | None = None
        self._then: _Tokens | None = None

    @property
    def constant(self) -> bool:
        return self.least == self.most

    def observe(self, reports: Sequence[EngineReport], playing: int, ended: int, asked: float, known: float) -> int:
        """The value from now on; call it each ``LOOK_SECONDS``. ``reports`` of all engines that have reported lately,
        while so many episodes are ``playing`` and ``ended`` have ended. ``asked``: prompt tokens of this actor so far,
        ``known`` those of them that an engine was given before."""
        if self.constant or not reports:
            return self.value
        if len(reports) != self._engines:
            self._engines, self._preemptions, self._then = len(reports), None, None
        too_many = self._too_many(reports, asked, known)
        self._falling &= playing > self.value
        if self._falling:
            self._then, self._ended = None, ended
        elif too_many:
            self.value = max(self.least, int(FALL * self.value))
            self._fell, self._falling, self._then, self._ended = True, True, None, ended
        elif playing >= self.value and ended - self._ended >= self.value:
            rise = max(1, round(RISE * self.most)) if self._fell else self.value
            self.value, self._ended = min(self.most, self.value + rise), ended
        return self.value

    def _too_many(self, reports: Sequence[EngineReport], asked: float, known: float) -> bool:
        waits = sum(r.waiting for r in reports) > WAITING_MAX * sum(r.running for r in reports)
        waited, self._waited = self._waited, waits
        preemptions = sum(r.preemptions for r in reports)
        thrown_out = self._preemptions is not None and preemptions > self._preemptions
        self._preemptions = preemptions
        full = sum(r.kv_used for r in reports) >= KV_FULL * len(reports)
        lost = self._lost(reports, asked, known)
        return (waits and waited) or full or thrown_out or lost

    def _lost(self, reports: Sequence[EngineReport], asked: float, known: float) -> bool:
        """True if the caches had too few of the known tokens since the last look."""
        total = _Tokens(asked, known, sum(r.prefix_queries for r in reports), sum(r.prefix_hits for r in reports))
        then = self._then
        if then is None or total.queries < then.queries or total.hits < then.hits:
            self._then = total
            return False
        if total.asked - then.asked < LOOK_TOKENS or total.queries == then.queries:
            return False
        self._then = total
        expected = (total.known - then.known) / (total.asked - then.asked)
        return (total.hits - then.hits) / (total.queries - then.queries) < HITS_MIN * expected
