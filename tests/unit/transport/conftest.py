"""All transports behind one face, so that one suite states the contract for all."""

from __future__ import annotations

from pathlib import Path

import anyio
import pytest
import uvloop
import zmq

from pipeline.schema.codec import Limits
from pipeline.transport.curve import PeerKeys, ServerKeys, make_keys, peer_keys, server_keys
from pipeline.transport.hub import Hub
from pipeline.transport.link import Link
from pipeline.transport.messages import EventKind, Kind, WireMessage
from pipeline.transport.zeromq import HubSocketWire, LinkSocketWire
from tests.support.memory_transport import MemoryHub, MemoryLink, MemoryLinkWire, MemoryNetwork

HERE = Path()
HEARTBEAT_SECONDS = 0.05
SILENCE_SECONDS_MAX = 1.0  # of a loaded machine: with less, a stall of the test looks like a lost peer
LIMITS = Limits(header_bytes_max=2000, message_bytes_max=200_000, frames_max=8, queue_messages_max=16)


def pytest_asyncio_loop_factories(config, item):
    return {"uvloop": uvloop.new_event_loop}


def zmq_hub(address: str, keys: ServerKeys | None = None, silence_seconds_max: float = 10.0, run: Path = HERE) -> Hub:
    wire = HubSocketWire(address, Limits(), silence_seconds_max, keys, run)
    return Hub(wire, Limits(), silence_seconds_max)


def zmq_link(
    address: str, name: str, keys: PeerKeys | None = None, silence_seconds_max: float = 10.0, run: Path = HERE
) -> Link:
    wire = LinkSocketWire(address, Limits(), silence_seconds_max, keys, run)
    return Link(wire, name, Limits(), silence_seconds_max)


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
    async def greet(hub: Hub, link: Link, **hello) -> None:
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


class TcpFace(Face):
    name = "tcp"
    run = Path()

    def __init__(self, folder):
        self.address = "tcp://127.0.0.1:0"
        make_keys(folder, actors=1)
        self.server_keys, self.keys = server_keys(folder), peer_keys(folder, "actor-0")

    async def fix_address(self) -> None:
        async with self.hub() as hub:
            self.address = hub.address

    def hub(self, limits: Limits = LIMITS) -> Hub:
        wire = AnyNameWire(self.address, limits, SILENCE_SECONDS_MAX, self.server_keys, self.run)
        return Hub(wire, limits, SILENCE_SECONDS_MAX, HEARTBEAT_SECONDS)

    def link(self, name: str, hub: Hub | None = None, limits: Limits = LIMITS) -> Link:
        address = self.address if hub is None else hub.address
        wire = LinkSocketWire(address, limits, SILENCE_SECONDS_MAX, self.keys, self.run)
        return Link(wire, name, limits, SILENCE_SECONDS_MAX, HEARTBEAT_SECONDS)

    def raw(self, hub: Hub) -> RawPeer:
        context = zmq.Context()
        socket = context.socket(zmq.DEALER)
        if self.keys is not None:
            self.keys.apply(socket)
        socket.setsockopt(zmq.LINGER, 0)
        socket.connect(hub.address)

        async def receive():
            with anyio.fail_after(60):
                while not socket.poll(0):
                    await anyio.sleep(0.005)
            frames = socket.recv_multipart()
            return frames[0] if frames == [b""] else frames

        return RawPeer(socket.send_multipart, receive, lambda: (socket.close(0), context.term()))


class IpcFace(TcpFace):
    name = "ipc"

    def __init__(self, folder):
        self.address, self.run = "ipc://", folder
        self.server_keys = self.keys = None

    async def fix_address(self) -> None:
        """It is fixed."""


class MemoryFace(Face):
    name = "memory"

    def __init__(self, folder):
        self.network = MemoryNetwork(messages_max=LIMITS.queue_messages_max)

    def hub(self, limits: Limits = LIMITS) -> Hub:
        return MemoryHub(self.network, limits, HEARTBEAT_SECONDS, SILENCE_SECONDS_MAX)

    def link(self, name: str, hub: Hub | None = None, limits: Limits = LIMITS) -> Link:
        return MemoryLink(self.network, name, limits, HEARTBEAT_SECONDS, SILENCE_SECONDS_MAX)

    def raw(self, hub: Hub) -> RawPeer:
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


@pytest.fixture(params=[TcpFace, IpcFace, MemoryFace], ids=lambda face: face.name)
def face(request, tmp_path):
    return request.param(tmp_path)
