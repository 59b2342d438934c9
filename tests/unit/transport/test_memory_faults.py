"""Faults of the in-memory network: deterministic, and what they do to hub and link."""

from __future__ import annotations

import anyio
import anyio.lowlevel
import pytest

from pipeline.errors import ConfigurationError, PeerGone, TransportClosed
from pipeline.transport.messages import EventKind, Kind, WireMessage
from tests.support.memory_transport import Faults, MemoryHub, MemoryLink, MemoryNetwork

pytestmark = pytest.mark.timeout(20)
TIMES = {"heartbeat_seconds": 0.02, "silence_seconds_max": 0.15}


async def greet(hub, link):
    link.describe({"role": "actor"})
    while (event := await hub.receive()).kind is not EventKind.PEER_UP:
        pass
    await hub.send(event.peer, WireMessage(Kind.WELCOME))
    while (await link.receive()).kind is not EventKind.CONNECTED:
        pass


async def test_a_broken_connection_is_told_to_both_and_the_link_comes_back():
    network = MemoryNetwork()
    async with MemoryHub(network, **TIMES) as hub, MemoryLink(network, "a", **TIMES) as link:
        await greet(hub, link)
        await link.send(WireMessage(Kind.TRAJECTORY, {"n": 1}))
        network.disconnect("a")
        assert (await link.receive()).kind is EventKind.DISCONNECTED
        with pytest.raises(PeerGone):
            await hub.send("a", WireMessage(Kind.ORDER))
        down = await hub.receive()
        assert down.kind is EventKind.PEER_DOWN, "what was under way is lost with the connection"
        await greet(hub, link)


async def test_a_muted_link_is_found_by_silence_on_both_sides():
    network = MemoryNetwork()
    async with MemoryHub(network, **TIMES) as hub, MemoryLink(network, "a", **TIMES) as link:
        await greet(hub, link)
        network.mute("a", 0.3)
        assert "silent" in (await link.receive()).reason
        down = await hub.receive()
        assert down.kind is EventKind.PEER_DOWN
        await greet(hub, link)


async def test_a_killed_hub_is_replaced_and_links_greet_the_next_one():
    network = MemoryNetwork()
    async with MemoryLink(network, "a", **TIMES) as link:
        async with MemoryHub(network, **TIMES) as hub:
            await greet(hub, link)
            network.kill_hub()
            with pytest.raises(PeerGone):
                await hub.send("a", WireMessage(Kind.ORDER))
        async with MemoryHub(network, **TIMES) as hub:
            await greet(hub, link)
            with pytest.raises(ConfigurationError, match="hub already"):
                async with MemoryHub(network):
                    pass


async def test_a_killed_link_is_peer_down_and_says_no_bye():
    network = MemoryNetwork()
    async with MemoryHub(network, **TIMES) as hub:
        async with MemoryLink(network, "a", **TIMES) as link:
            await greet(hub, link)
            network.kill_link("a")
            with pytest.raises(TransportClosed, match="killed"):
                await link.receive()
        down = await hub.receive()
        assert down.kind is EventKind.PEER_DOWN and "without BYE" in down.reason
        async with MemoryLink(network, "a", **TIMES) as link:
            await greet(hub, link)


async def run(faults: Faults, n: int = 300) -> list[tuple[str, int | None]]:
    """What the hub saw of ``n`` messages under a plan."""
    network = MemoryNetwork(faults)
    seen: list[tuple[str, int | None]] = []
    async with MemoryHub(network, **TIMES) as hub, MemoryLink(network, "a", **TIMES) as link:
        await greet(hub, link)

        async def serve():
            while True:
                event = await hub.receive()
                seen.append((event.kind.value, event.message.header.get("n") if event.message else None))
                if event.kind is EventKind.PEER_UP:
                    await hub.send("a", WireMessage(Kind.WELCOME))
                if event.kind is EventKind.MESSAGE and event.message.kind is Kind.CHECKPOINTED:
                    group.cancel_scope.cancel()

        async with anyio.create_task_group() as group:
            group.start_soon(serve)
            for i in range(n):
                while not link.connected:
                    await link.receive()
                await link.send(WireMessage(Kind.TRAJECTORY, {"n": i}))
                if i % 10 == 0:
                    await anyio.lowlevel.checkpoint()
            network.faults = Faults()
            await link.send(WireMessage(Kind.CHECKPOINTED))
            while True:
                if (await link.receive()).kind is EventKind.CONNECTED:
                    await link.send(WireMessage(Kind.CHECKPOINTED))
    return seen


async def test_the_same_seed_makes_the_same_faults():
    faults = Faults(seed=3, drop=0.1, duplicate=0.1, corrupt=0.05)
    first, again, other = await run(faults), await run(faults), await run(Faults(seed=4, drop=0.1))
    assert first == again != other


async def test_every_fault_happens_and_order_is_kept():
    numbers = [
        n for kind, n in await run(Faults(seed=1, drop=0.2, duplicate=0.2)) if kind == "message" and n is not None
    ]
    assert numbers == sorted(numbers)
    assert len(set(numbers)) < 300 < len(numbers) + 120 and len(numbers) > len(set(numbers))
    kinds = {kind for kind, _ in await run(Faults(seed=1, corrupt=0.2, disconnect=0.02), 1000)}
    assert {"corrupt", "peer_down", "peer_up", "message"} <= kinds


async def test_delays_keep_order_inside_a_connection_and_lose_nothing():
    numbers = [n for kind, n in await run(Faults(seed=1, delay_seconds=(0.0, 0.002)), 100) if n is not None]
    assert numbers == list(range(100))
