"""A wire ends in bounded time, whatever ZeroMQ's own threads are stuck in."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import pytest

from pipeline.schema.codec import Limits
from pipeline.transport.curve import make_keys, peer_keys, server_keys
from pipeline.transport.zeromq import HubSocketWire, LinkSocketWire


class StuckContext:
    """Terminates when it is let go, like one whose thread waits for a name server."""

    def __init__(self) -> None:
        self.released = threading.Event()

    def term(self) -> None:
        self.released.wait(30)


@pytest.mark.parametrize("kind", [HubSocketWire, LinkSocketWire])
async def test_a_wire_closes_although_a_host_name_is_still_being_resolved(kind: Any, tmp_path: Path) -> None:
    make_keys(tmp_path, actors=1)
    keys = server_keys(tmp_path) if kind is HubSocketWire else peer_keys(tmp_path, "actor-0")
    wire = kind("tcp://127.0.0.1:*", Limits(), 10.0, keys, tmp_path)
    if kind is HubSocketWire:
        wire.open()
        real = wire._context
    else:
        real = None
    stuck = wire._context = StuckContext()
    started = time.monotonic()
    try:
        await wire.close()
        assert time.monotonic() - started < 5
    finally:
        stuck.released.set()
        if real is not None:
            real.term()
