"""Invalid messages: each is counted, few are logged."""

from __future__ import annotations

import logging

from pipeline.metrics.base import CollectorRegistry
from pipeline.metrics.replay import FAULTS, ReplayMetrics
from pipeline.stage.invalid_messages import LINES_PER_MINUTE, InvalidMessages
from pipeline.transport.protocol import Event, EventKind, MessageFault


def test_every_invalid_message_is_counted_by_its_fault_and_few_are_logged(caplog):
    registry = CollectorRegistry()
    invalid = InvalidMessages(ReplayMetrics(registry))
    with caplog.at_level(logging.WARNING):
        for i in range(10_000):
            invalid.note(Event(EventKind.CORRUPT, "a", None, "x" * 100_000, MessageFault.BYTES), i / 1000)
        assert len(caplog.records) == LINES_PER_MINUTE
        invalid.note(Event(EventKind.CORRUPT, "a", None, "y", MessageFault.LIMIT), 61.0)
    unlogged = 10_000 - LINES_PER_MINUTE
    assert caplog.records[-1].getMessage() == f"a sent an invalid message: y ({unlogged} more were not logged)"
    assert sum(len(record.getMessage()) for record in caplog.records) < 10_000
    counted = {f: registry.get_sample_value("afterplay_replay_invalid_messages_total", {"fault": f}) for f in FAULTS}
    assert counted["bytes"] == 10_000 and counted["limit"] == 1 and sum(counted.values()) == 10_001


def test_the_label_has_a_value_for_every_fault():
    assert set(FAULTS) == {fault.value for fault in MessageFault}
