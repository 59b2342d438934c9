"""The in-memory transport reads no clock but the event loop's: half an hour passes in a moment."""

from __future__ import annotations

import time

import anyio
import pytest

from pipeline.transport.messages import EventKind, Kind, WireMessage
from tests.support.memory_transport import Faults, MemoryHub, MemoryLink, MemoryNetwork
from tests.support.virtual_time import run_virtually

pytestmark = pytest.mark.timeout(30)


@pytest.mark.slow
def test_half_an_hour_with_delays_silence_and_reconnections_takes_seconds_and_is_the_same_each_time():
    async def main() -> list[tuple[float, str]]:
        log = []
        network = MemoryNetwork(Faults(seed=5, disconnect=0.002, delay_seconds=(0.0, 3.0)))
        async with MemoryHub(network) as hub, MemoryLink(network, "a") as link, anyio.create_task_group() as group:
            link.describe({"role": "actor"})

            async def play():
                n = 0
                while True:
                    await anyio.sleep(2)
                    if link.connected:
                        n += 1
                        await link.send(WireMessage(Kind.TRAJECTORY, {"n": n}))

            async def read():
                while True:
                    event = await link.receive()
                    log.append((round(anyio.current_time(), 3), event.kind.value))

            async def serve():
                while True:
                    event = await hub.receive()
                    log.append((round(anyio.current_time(), 3), event.kind.value))
                    if event.kind is EventKind.PEER_UP:
                        await hub.send("a", WireMessage(Kind.WELCOME))

            for task in (play, read, serve):
                group.start_soon(task)
            await anyio.sleep(1000)
            network.mute("a", 60)
            await anyio.sleep(800)
            group.cancel_scope.cancel()
        return log

    started = time.monotonic()
    first = run_virtually(main)
    assert time.monotonic() - started < 20
    assert first == run_virtually(main)
    kinds = [kind for _, kind in first]
    assert kinds.count("message") > 700 and kinds.count("peer_down") >= 2
    silent = [at for at, kind in first if kind == "disconnected" and 1000 < at < 1020]
    assert silent and 1010 <= silent[0] <= 1014, "found after silence_seconds_max"
