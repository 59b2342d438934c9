"""Load of one engine as an actor sees it: what the engine reported last, and the actor's own requests since. Pure.

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

from actors.engine.base import EngineReport

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
        self._at = float("-inf")
        self._own = 0
        self._worked_at = float("-inf")
        self._busy = self._sampled = 0.0

    def reported(self, report: EngineReport, own: int, asked_at: float) -> None:
        """The engine answered. ``own``: requests of this actor that were in flight there when it was asked."""
        before, seconds = self.report, asked_at - self._at
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
        self.report, self._own, self._at = report, own, asked_at

    def fresh(self, since: float) -> bool:
        """True if the engine was asked at ``since`` or later, and answered."""
        return self._at >= since

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
