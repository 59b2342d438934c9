"""All transports behind one face, so that one suite states the contract for all."""

from __future__ import annotations

import anyio
import pytest
import uvloop
import zmq

from pipeline.transport.curve import make_keys, peer_keys, server_keys
from pipeline.transport.hub import WireHub
from pipeline.transport.link import WireLink
from pipeline.transport.local import LocalHub, LocalLink, LocalLinkWire
from pipeline.transport.protocol import EventKind, Kind, Limits, WireMessage
from pipeline.transport.zeromq import HubSocketWire, ZmqLink
from tests.support.memory_transport import MemoryHub, MemoryLink, MemoryLinkWire, MemoryNetwork

HEARTBEAT_SECONDS = 0.05
SILENCE_SECONDS_MAX = 1.0  # of a loaded machine: with less, a stall of the test looks like a lost peer
LIMITS = Limits(header_bytes_max=2000, message_bytes_max=200_000, frames_max=8, queue_messages_max=16)


def pytest_asyncio_loop_factories(config, item):
    return {"uvloop": uvloop.new_event_loop}


class RawPeer:
    """Sends whatever bytes it likes."""

    def __init__(self, send, receive, close):
        self.send, self.receive, self.close = send, receive, close


class Face:
    limits = LIMITS
    silence_seconds_max = SILENCE_SECONDS_MAX

    async def fix_address(self) -> None:
        """Let all hubs from now on have one address."""

    @staticmethod
    async def greet(hub: WireHub, link: WireLink, **hello) -> None:
        """HELLO, WELCOME and their events."""
        link.describe({"role": "actor", **hello})
        event = await hub.receive()
        assert event.kind is EventKind.PEER_UP, event
        await hub.send(event.peer, WireMessage(Kind.WELCOME, {"credit_bytes": 1}))
        event = await link.receive()
        assert event.kind is EventKind.CONNECTED, event


class AnyNameWire(HubSocketWire):
    """Lets every name in, whatever the key."""

    def identity(self, connection: bytes) -> str | None:
        return None


class ZmqFace(Face):
    name = "zmq"

    def __init__(self, folder):
        self.address = "tcp://127.0.0.1:0"
        self.folder = folder / "keys"
        make_keys(self.folder, actors=1)
        self.keys = peer_keys(self.folder, "actor-0")

    async def fix_address(self) -> None:
        async with self.hub() as hub:
            self.address = hub.address

    def hub(self, limits: Limits = LIMITS) -> WireHub:
        wire = AnyNameWire(self.address, limits, SILENCE_SECONDS_MAX, server_keys(self.folder))
        return WireHub(wire, limits, HEARTBEAT_SECONDS, SILENCE_SECONDS_MAX)

    def link(self, name: str, hub: WireHub | None = None, limits: Limits = LIMITS) -> WireLink:
        address = self.address if hub is None else hub.address
        return ZmqLink(address, name, self.keys, limits, HEARTBEAT_SECONDS, SILENCE_SECONDS_MAX)

    def raw(self, hub: WireHub) -> RawPeer:
        context = zmq.Context()
        socket = context.socket(zmq.DEALER)
        self.keys.apply(socket)
        socket.setsockopt(zmq.LINGER, 0)
        socket.connect(hub.address)

        async def receive():
            def wait():
                assert socket.poll(3000), "nothing came"
                return socket.recv_multipart()

            return await anyio.to_thread.run_sync(wait)

        return RawPeer(socket.send_multipart, receive, lambda: (socket.close(0), context.term()))


class LocalFace(Face):
    name = "local"

    def __init__(self, folder):
        self.run = folder

    def hub(self, limits: Limits = LIMITS) -> WireHub:
        return LocalHub("ipc://", self.run, limits, HEARTBEAT_SECONDS, SILENCE_SECONDS_MAX)

    def link(self, name: str, hub: WireHub | None = None, limits: Limits = LIMITS) -> WireLink:
        return LocalLink("ipc://", self.run, name, limits, HEARTBEAT_SECONDS, SILENCE_SECONDS_MAX)

    def raw(self, hub: WireHub) -> RawPeer:
        wire = LocalLinkWire("ipc://", self.run, Limits())
        wire.connect()

        async def receive():
            while True:
                event = wire.signal.current()
                frames = wire.receive()
                if frames is not None:
                    return [bytes(f) for f in frames]
                with anyio.fail_after(3):
                    await wire.wait(event)

        return RawPeer(wire.send, receive, wire.disconnect)


class MemoryFace(Face):
    name = "memory"

    def __init__(self, folder):
        self.network = MemoryNetwork(messages_max=LIMITS.queue_messages_max)

    def hub(self, limits: Limits = LIMITS) -> WireHub:
        return MemoryHub(self.network, limits, HEARTBEAT_SECONDS, SILENCE_SECONDS_MAX)

    def link(self, name: str, hub: WireHub | None = None, limits: Limits = LIMITS) -> WireLink:
        return MemoryLink(self.network, name, limits, HEARTBEAT_SECONDS, SILENCE_SECONDS_MAX)

    def raw(self, hub: WireHub) -> RawPeer:
        wire = MemoryLinkWire(self.network, "raw")
        wire.connect()

        async def receive():
            while True:
                event = wire.signal.current()
                frames = wire.receive()
                if frames is not None:
                    return [bytes(f) for f in frames]
                await wire.wait(event)

        return RawPeer(wire.send, receive, wire.disconnect)


@pytest.fixture(params=[ZmqFace, LocalFace, MemoryFace], ids=lambda face: face.name)
def face(request, tmp_path):
    return request.param(tmp_path)
