"""The unix socket: who may enter its folder, how it is found, and what a peer can make the other end hold."""

from __future__ import annotations

import asyncio
import socket
import stat
import struct

import anyio
import pytest

from pipeline.config import RunConfig
from pipeline.errors import ConfigurationError, TransportClosed
from pipeline.schema import SCHEMA_VERSION
from pipeline.transport.codec import encode_message
from pipeline.transport.local import LocalHub, LocalHubWire, LocalLink, LocalLinkWire, remove_place
from pipeline.transport.open import open_hub, open_link
from pipeline.transport.protocol import EventKind, Kind, Limits, MessageFault, WireMessage

pytestmark = pytest.mark.timeout(20)
LIMITS = Limits(header_bytes_max=10_000, message_bytes_max=1_000_000)
HELLO = encode_message(WireMessage(Kind.HELLO, {"name": "a", "role": "actor", "schema_version": SCHEMA_VERSION}))


def stranger(hub) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    sock.connect(hub.address.removeprefix("ipc://"))
    return sock


async def is_cut(sock: socket.socket) -> bool:
    sock.settimeout(5)

    def drained() -> bool:
        try:
            while sock.recv(65536):
                pass
        except ConnectionResetError:
            pass
        return True

    return await anyio.to_thread.run_sync(drained)


async def test_a_hub_and_its_links_meet_through_the_run_directory_and_leave_nothing(tmp_path):
    config = RunConfig.model_validate({"run": {"directory": tmp_path, "name": "r"}})
    async with open_hub(config) as hub, open_link(config, "actor-0") as link:
        folder = (tmp_path / "r" / "hub").readlink()
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700 and hub.address == f"ipc://{folder}/hub"
        link.describe({"role": "actor"})
        assert (await hub.receive()).kind is EventKind.PEER_UP
    assert not folder.exists() and list((tmp_path / "r").iterdir()) == []


async def test_a_socket_in_a_folder_that_others_may_enter_is_neither_bound_nor_connected_to(tmp_path):
    open_folder = tmp_path / "open"
    open_folder.mkdir(mode=0o755)
    with pytest.raises(ConfigurationError, match="only this user"):
        async with LocalHub(f"ipc://{open_folder}/s", tmp_path):
            pass
    async with LocalHub(f"ipc://{tmp_path}/closed/s", tmp_path) as hub:
        (tmp_path / "closed").chmod(0o711)
        async with LocalLink(hub.address, tmp_path, "a") as link:
            link.describe({})
            with pytest.raises(TransportClosed, match="only this user"):
                await link.receive()


def kill(run) -> None:
    """As a hub that is killed: its socket stays, and nobody listens on it."""
    wire = LocalHubWire("ipc://", run, LIMITS, 1.0)
    wire.open()
    asyncio.get_running_loop().remove_reader(wire._listener.fileno())
    wire._listener.close()


async def test_a_second_hub_does_not_take_the_socket_of_a_live_one_but_that_of_a_killed_one(tmp_path):
    address = f"ipc://{tmp_path}/s/hub"
    for where in (address, "ipc://"):
        async with LocalHub(where, tmp_path):
            with pytest.raises(ConfigurationError, match="already in use"):
                async with LocalHub(where, tmp_path):
                    pass
            async with LocalLink(where, tmp_path, "a") as link:
                link.describe({})
                await anyio.sleep(0)
    kill(tmp_path)
    left = (tmp_path / "hub").readlink()
    async with LocalHub("ipc://", tmp_path) as hub:
        assert hub.address.removeprefix("ipc://") != f"{left}/hub" and not left.exists()
    kill(tmp_path)
    remove_place(tmp_path)
    assert not (tmp_path / "hub").is_symlink()


async def test_a_path_that_is_too_long_for_a_socket_names_the_remedy(tmp_path, monkeypatch):
    long = tmp_path / ("x" * 100)
    long.mkdir()
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(long))
    with pytest.raises(ConfigurationError, match="at most 103 bytes"):
        async with LocalHub("ipc://", tmp_path):
            pass
    assert list(long.iterdir()) == []


@pytest.mark.parametrize(
    ("data", "fault"),
    [
        (b"GET / HTTP/1.1\r\n\r\n", MessageFault.BYTES),
        (b"\xff\x00\x00\x00\x00\x00\x00\x00\x01\x7f" + bytes(54), MessageFault.BYTES),
        (struct.pack("<4sIQ", b"AP01", 3, 20_001), MessageFault.LIMIT),
        (struct.pack("<4sIQ", b"AP01", 1000, 24), MessageFault.BYTES),
        (struct.pack("<4sIQQ", b"AP01", 1, 16, 2**60) + bytes(8), MessageFault.BYTES),
    ],
    ids=["http", "zeromq", "large", "more frames than bytes", "a frame beyond the end"],
)
async def test_bytes_that_are_no_message_end_the_connection_and_no_other(tmp_path, data, fault):
    async with LocalHub("ipc://", tmp_path, LIMITS) as hub, LocalLink("ipc://", tmp_path, "a", LIMITS) as link:
        link.describe({"role": "actor"})
        assert (await hub.receive()).kind is EventKind.PEER_UP
        with stranger(hub) as sock:
            sock.sendall(data)
            event = await hub.receive()
            assert (event.kind, event.fault) == (EventKind.CORRUPT, fault)
            assert await is_cut(sock)
        assert hub.peers == ("a",)


async def test_a_stranger_may_not_begin_what_a_peer_may(tmp_path):
    large = encode_message(WireMessage(Kind.TRAJECTORY, {}, (b"x" * 900_000,)))
    async with LocalHub("ipc://", tmp_path, LIMITS) as hub:
        wire = LocalLinkWire("ipc://", tmp_path, LIMITS)
        wire.connect()
        wire.send(large)
        assert (await hub.receive()).fault is MessageFault.LIMIT
        wire.disconnect()
        wire.connect()
        wire.send(HELLO)
        assert (await hub.receive()).kind is EventKind.PEER_UP
        wire.send(large)
        event = await hub.receive()
        assert event.kind is EventKind.MESSAGE and event.message.n_bytes == 900_000
        wire.disconnect()


async def test_a_connection_that_does_not_greet_in_time_is_closed(tmp_path):
    async with LocalHub("ipc://", tmp_path, LIMITS, heartbeat_seconds=0.05, silence_seconds_max=0.2) as hub:
        with stranger(hub) as silent, stranger(hub) as slow:
            slow.sendall(struct.pack("<4sIQ", b"AP01", 2, 9_000) + bytes(100))
            assert await is_cut(silent) and await is_cut(slow)
        wire = LocalLinkWire("ipc://", tmp_path, LIMITS)
        wire.connect()
        wire.send(HELLO)
        assert (await hub.receive()).kind is EventKind.PEER_UP
        assert (await hub.receive()).kind is EventKind.PEER_DOWN
        with anyio.fail_after(5):
            while wire.lost is None:  # given up for its silence, and it does not greet again
                event = wire.signal.current()
                while wire.receive() is not None:
                    pass
                if wire.lost is None:
                    await wire.wait(event)
        wire.disconnect()


async def test_a_connection_that_repeats_invalid_messages_is_cut(tmp_path):
    async with LocalHub("ipc://", tmp_path, LIMITS) as hub:
        wire = LocalLinkWire("ipc://", tmp_path, LIMITS)
        wire.connect()
        wire.send(HELLO)
        assert (await hub.receive()).kind is EventKind.PEER_UP
        for _ in range(100):
            wire.send([b"version", b"{nonsense"])
        events = [await hub.receive() for _ in range(8)]
        assert {event.kind for event in events} == {EventKind.CORRUPT}
        assert (await hub.receive()).kind is EventKind.PEER_DOWN
        assert hub.statistics().corrupt == 8 and hub.peers == ()
        wire.disconnect()


async def test_a_reader_that_stops_holds_one_unfinished_message_and_little_more(tmp_path):
    wire = LocalHubWire("ipc://", tmp_path, LIMITS, 10.0)
    wire.open()
    link = LocalLinkWire("ipc://", tmp_path, LIMITS)
    link.connect()
    link.send(HELLO)
    await anyio.sleep(0.05)
    assert wire.receive() is not None
    sent = 0
    while link.send([b"trajectory", b"{}", b"x" * 5_000]):
        sent += 1
        await anyio.lowlevel.checkpoint()
    (stream,) = wire._streams.values()
    assert not stream.arrived and sent < 2_000, "nothing is read that nobody asks for"
    for _ in range(sent):
        while (arrived := wire.receive()) is None:
            await anyio.sleep(0.001)
        assert len(arrived[1][2]) == 5_000
        assert len(stream.arrived) < 60
    link.disconnect()
    await wire.close()
