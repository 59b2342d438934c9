"""Invalid messages in the metrics and, at a bounded rate, in the log."""

from __future__ import annotations

import logging

from pipeline.metrics.replay import ReplayMetrics
from pipeline.transport.protocol import Event

log = logging.getLogger("afterplay.replay")

LINES_PER_MINUTE = 10


class InvalidMessages:
    """Counts each invalid message by its fault, and logs the first ones of each minute."""

    def __init__(self, metrics: ReplayMetrics) -> None:
        self._metrics = metrics
        self._minute = -1
        self._in_minute = 0
        self._unlogged = 0

    def note(self, event: Event, now: float) -> None:
        """``now``: in seconds."""
        assert event.fault is not None
        self._metrics.invalid_messages_total.labels(fault=event.fault.value).inc()
        if int(now // 60) != self._minute:
            self._minute, self._in_minute = int(now // 60), 0
        self._in_minute += 1
        if self._in_minute > LINES_PER_MINUTE:
            self._unlogged += 1
            return
        more = f" ({self._unlogged} more were not logged)" if self._unlogged else ""
        self._unlogged = 0
        log.warning("%s sent an invalid message: %.500s%s", event.peer, event.reason, more)
