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
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from enum import StrEnum

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
