"""The circuit breaker of one engine: whether requests may be sent there. A pure state machine; the caller tells the
time.

=========  =============================================================================================================
closed     Requests are sent.
open       None is sent. Either the engine is *down*, until a probe of its health succeeds; or too many of its requests
           failed, until a wait is over. Each opening in a row doubles the wait; jitter spreads actors that share an
           engine.
half-open  After the wait one request tries the engine, and another once that has ended or takes long. An answer closes
           the breaker, a failure opens it again.
=========  =============================================================================================================

One failed request changes nothing for the others: it is made again elsewhere. One refused connection, DNS error or
failed probe makes a closed breaker *doubted* until the next probe: no request is sent meanwhile, and no conversation
moves.

Its load as an actor sees it: what the engine reported last, and the actor's own requests since. Pure.

A step of an engine takes ``pace * (FREE_BATCH + requests)`` seconds, and samples one token for each request in its
batch. The pace follows from what the engine reports. A turn of ``n`` tokens at an engine with ``q`` requests, which has
to read ``m`` prompt tokens that it does not have in its cache, so takes about ::

    pace * (n * (FREE_BATCH + q) + PREFILL_COST * m)

Engines are compared by this. The square root of the ratio of their paces counts for a conversation that would leave a
slow engine, and where the cache of an engine is full: those that leave fill the caches of the others, and the measured
pace is one of the work that an engine happens to have. A request that waits for room in the batch counts for more than
one in it, because it waits for the end of another.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from enum import StrEnum

from actors.engine.base import EngineReport

WINDOW = 20
"""Requests whose outcomes are remembered."""

FAILURES = 5
"""Failures among them that open the breaker. At a failure rate of 30 % this takes about 17 requests; at 2 % it happens
once in 20,000."""

WAIT_SECONDS = 1.0

WAIT_SECONDS_MAX = 30.0

TRIAL_SECONDS = 10.0
"""Another request may try a half-open engine while the one before still waits: a long turn is no failure."""


class BreakerState(StrEnum):
    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half-open"


class Breaker:
    """State of one engine. It begins down; its first successful probe closes it. ``jitter`` draws from ``[0, 1)``."""

    def __init__(self, jitter: Callable[[], float]) -> None:
        self.down = True
        """True while the engine does not answer, or says that it cannot serve."""
        self.doubted = False
        """True while nobody knows whether it answers."""
        self.problem = "not probed yet"
        """Reason why it is not closed, in words."""
        self._jitter = jitter
        self._recent: deque[bool] = deque(maxlen=WINDOW)
        self._openings = 0
        self._until: float | None = None
        """End of the wait; None: closed, but for ``down``."""
        self._trial_at: float | None = None

    @property
    def closed(self) -> bool:
        """True if requests are sent without a limit."""
        return self._until is None and not (self.down or self.doubted)

    @property
    def trusted(self) -> bool:
        """True if it is closed, or will be when a probe answers."""
        return self._until is None and not self.down

    def state(self, now: float) -> BreakerState:
        if self.closed:
            return BreakerState.CLOSED
        return BreakerState.OPEN if self.down or self.doubted or now < (self._until or 0.0) else BreakerState.HALF_OPEN

    def admits(self, now: float) -> bool:
        """True if a request may be sent now."""
        if self.closed:
            return True
        if self.state(now) is not BreakerState.HALF_OPEN:
            return False
        return self._trial_at is None or now - self._trial_at >= TRIAL_SECONDS

    def sent(self, now: float) -> bool:
        """A request is sent. True if it tries a half-open engine."""
        if self.closed:
            return False
        self._trial_at = now
        return True

    def ended(self) -> None:
        """A trial ended, whatever came of it."""
        self._trial_at = None

    def answered(self, *, trial: bool = False) -> None:
        """The engine answered a request."""
        if trial and self._until is not None:
            self._until = None
            if not (self.down or self.doubted):
                self.problem = ""
            self._recent.clear()
        if self.closed:
            self._recent.append(False)
            if len(self._recent) == WINDOW:
                self._openings = 0

    def failed(self, now: float, problem: str, *, trial: bool = False) -> None:
        """A request failed at the engine. What was sent before the breaker opened says nothing new."""
        if self.closed:
            self._recent.append(True)
            failures, of = sum(self._recent), len(self._recent)
            if failures >= FAILURES:
                self._open(now, f"{failures} of its last {of} requests failed, the last one with: {problem}")
        elif trial and self._until is not None:
            self._open(now, f"it was tried again and failed: {problem}")

    def doubt(self, problem: str) -> None:
        """Send no request until the next probe: it refused a connection, has restarted, or a probe failed."""
        if not self.down:
            self.doubted, self.problem = True, problem

    def went_down(self, problem: str) -> None:
        """No request is sent until a probe succeeds: several in a row failed, or it has hung."""
        self.down, self.doubted, self.problem = True, False, problem

    def came_up(self) -> None:
        """Its health probe succeeded."""
        if self.down:
            self._recent.clear()
        if self.down or self.doubted:
            self.down = self.doubted = False
            self.problem = "" if self._until is None else "too many of its requests failed"

    def _open(self, now: float, problem: str) -> None:
        wait = min(WAIT_SECONDS * 2.0 ** min(self._openings, 16), WAIT_SECONDS_MAX)
        self._openings += 1
        self._until = now + wait * (0.5 + 0.5 * self._jitter())
        self._recent.clear()
        self.problem = problem


FREE_BATCH = 22.0
"""Requests whose share of a step costs as much as the step itself. Measured with SmolLM2 on vLLM for CPUs
(docs/RESULTS.md)."""

PREFILL_COST = 0.6
"""Cost of a prompt token that is in no cache, in tokens sampled by one request more in the batch; measured likewise. On
any engine that is bound by arithmetic both are one pass through the model, so it is near 1."""

KV_FULL = 0.95
"""Share of the KV cache beyond which a further request waits."""

PACE_SECONDS = 20.0
"""Time over which the pace of an engine is averaged."""

REST_SECONDS = 60.0
"""Time without a request after which an engine is taken to be faster than it was, so that it is tried again."""

HALVINGS_MAX = 10.0
"""Most times that its pace is halved meanwhile."""


class EngineLoad:
    """Begins without a report."""

    def __init__(self) -> None:
        self.report: EngineReport | None = None
        self.at = float("-inf")
        """Time of the report."""
        self._own = 0
        self._worked_at = float("-inf")
        self._busy = self._sampled = 0.0

    def reported(self, report: EngineReport, own: int, asked_at: float) -> None:
        """The engine answered. ``own``: requests of this actor that were in flight there when it was asked."""
        before, seconds = self.report, asked_at - self.at
        if before is not None and seconds > 0 and report.sampled >= before.sampled:
            rests = asked_at - self._worked_at > REST_SECONDS
            keep = 1.0 if rests else 0.5 ** (seconds / PACE_SECONDS)
            running = (before.running + report.running) / 2
            self._busy, self._sampled = keep * self._busy, keep * self._sampled
            if seconds <= PACE_SECONDS:  # what it did in a longer time is not known
                self._busy += seconds * running / (FREE_BATCH + running)
                self._sampled += report.sampled - before.sampled
            if running > 0 or report.sampled > before.sampled:
                self._worked_at = asked_at
        elif before is not None:
            self._busy = self._sampled = 0.0
        self.report, self._own, self.at = report, own, asked_at

    def fresh(self, since: float) -> bool:
        """True if the engine was asked at ``since`` or later, and answered."""
        return self.at >= since

    def pace(self, now: float) -> float | None:
        """Seconds of a step for each request in it, ``FREE_BATCH`` included; None where it is not known. Half of it for
        each ``REST_SECONDS`` without a request, after the first: a slow engine without work is tried again, and engines
        that rest together keep their ratio."""
        if self._sampled <= 0 or self._busy <= 0:
            return None
        halvings = (now - self._worked_at) / REST_SECONDS - 1.0
        return self._busy / self._sampled * math.exp2(-min(max(0.0, halvings), HALVINGS_MAX))

    def requests(self, own: int) -> float:
        """Requests at the engine now, those that wait by what they cost. ``own``: of this actor that are in flight."""
        report = self.report
        if report is None:
            return float(own)
        more = own - self._own
        if report.waiting + more > 0 and (report.waiting > 0 or report.kv_used >= KV_FULL):
            weight = (FREE_BATCH + report.running) / max(1.0, report.running)
            return report.running + weight * (report.waiting + more)
        return max(float(own), report.running + report.waiting + more)
