"""Invalid messages are counted by their fault."""

from __future__ import annotations

from pipeline.metrics.replay import FAULTS
from pipeline.transport.protocol import MessageFault


def test_the_label_has_a_value_for_every_fault():
    assert set(FAULTS) == {fault.value for fault in MessageFault}
