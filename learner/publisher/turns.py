"""Whose turn it is on a device that engines and learner share. A pure state machine: no clock, no socket, no task.

::

    ENGINES ──request──► ASKED ──last engine asleep──► LEARNER ──give_back──► ENGINES
       ▲                   │
       └─────withdraw──────┘

An engine counts as asleep only when it said so in answer to an order of this turn. One that is down may be starting
again, and then takes memory: it blocks the grant like one that is awake. One that comes up in the learner's turn (an
*intruder*) is sent to sleep at once; training is not taken back.

Invariants, property-tested: the learner is granted the device only in a moment when all engines are asleep; no engine
is told to serve while the learner holds or asks; every grant follows one request and ends in at most one return; time
asleep is counted once, whatever is repeated.
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import StrEnum


class Holder(StrEnum):
    ENGINES = "engines"
    ASKED = "asked"
    """The learner wants it; engines are falling asleep."""
    LEARNER = "learner"


class Order(StrEnum):
    SERVE = "serve"
    SLEEP = "sleep"


class Turns:
    """``engines`` by name. Times are seconds of any monotonic clock."""

    def __init__(self, engines: Iterable[str]) -> None:
        self.holder = Holder.ENGINES
        self.grants = 0
        """Times that the learner got the device."""
        self.returns = 0
        """Times that it gave it back."""
        self.intruders = 0
        """Times that an engine was awake in the learner's turn: it had restarted."""
        self._asleep_since: dict[str, float | None] = dict.fromkeys(engines)

    @property
    def granted(self) -> bool:
        return self.holder is Holder.LEARNER

    @property
    def awake(self) -> tuple[str, ...]:
        """Engines that have not said that they sleep."""
        return tuple(name for name, since in self._asleep_since.items() if since is None)

    def order(self) -> Order:
        """What every engine should do now."""
        return Order.SERVE if self.holder is Holder.ENGINES else Order.SLEEP

    def request(self) -> bool:
        """The learner wants the device; whether it has it. Harmless when repeated."""
        if self.holder is Holder.ENGINES:
            self.holder = Holder.ASKED
        return self._grant()

    def withdraw(self) -> None:
        """The learner does not want it any more. Changes nothing once it is granted."""
        if self.holder is Holder.ASKED:
            self.holder = Holder.ENGINES

    def fell_asleep(self, engine: str, now: float) -> bool:
        """``engine`` sleeps; whether the learner has the device. Harmless when repeated."""
        if self._asleep_since[engine] is None:
            self._asleep_since[engine] = now
        return self._grant()

    def woke(self, engine: str, now: float) -> float:
        """``engine`` is awake, restarted or gone; seconds that it slept, 0 if it did not."""
        since, self._asleep_since[engine] = self._asleep_since[engine], None
        if self.granted and since is not None:
            self.intruders += 1
        return 0.0 if since is None else max(0.0, now - since)

    def give_back(self) -> bool:
        """The learner is through; whether it had the device."""
        had = self.granted
        if had:
            self.returns += 1
        self.holder = Holder.ENGINES
        return had

    def _grant(self) -> bool:
        if self.holder is Holder.ASKED and not self.awake:
            self.holder = Holder.LEARNER
            self.grants += 1
        return self.granted
