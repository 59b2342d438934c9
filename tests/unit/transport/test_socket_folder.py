"""The ``ipc://`` socket: who may enter its folder, how it is found, and what becomes of the one of a killed hub."""

from __future__ import annotations

import socket
import stat
import tempfile
from pathlib import Path

import anyio
import pytest

from pipeline.config import RunConfig
from pipeline.errors import ConfigurationError, TransportClosed
from pipeline.transport import zeromq
from pipeline.transport.messages import EventKind, Kind, MessageFault, WireMessage
from pipeline.transport.socket_folder import address_to_bind, remove_socket_folder
from pipeline.transport.zeromq import open_hub, open_link
from tests.support.memory_transport import connected_peers
from tests.unit.transport.conftest import zmq_hub, zmq_link

pytestmark = pytest.mark.timeout(20)


async def test_a_hub_and_its_links_meet_through_the_run_directory_and_leave_nothing(tmp_path):
    config = RunConfig.model_validate({"run": {"directory": tmp_path, "name": "r"}})
    async with open_hub(config) as hub, open_link(config, "actor-0") as link:
        folder = (tmp_path / "r" / "hub").readlink()
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700 and hub.address == f"ipc://{folder}/hub"
        link.describe({"role": "actor"})
        assert (await hub.receive()).kind is EventKind.PEER_UP
    assert not folder.exists() and list((tmp_path / "r").iterdir()) == []


@pytest.mark.parametrize("removed", ["link", "socket", "folder", "link and folder"])
async def test_what_is_removed_of_the_way_to_the_socket_is_made_again(tmp_path, removed, monkeypatch):
    monkeypatch.setattr(zeromq, "_RESTORE_SECONDS", 0.01)
    async with zmq_hub("ipc://", run=tmp_path) as hub, zmq_link("ipc://", "before", run=tmp_path) as before:
        before.describe({"role": "actor"})
        assert (await hub.receive()).kind is EventKind.PEER_UP
        folder = (tmp_path / "hub").readlink()
        if "link" in removed:
            (tmp_path / "hub").unlink()
        if "folder" in removed or removed == "socket":
            (folder / "hub").unlink()
        if "folder" in removed:
            folder.rmdir()
        async with zmq_link("ipc://", "after", run=tmp_path) as after:
            after.describe({"role": "actor"})
            event = await hub.receive()
            assert (event.kind, event.peer) == (EventKind.PEER_UP, "after")
            for name, link in (("before", before), ("after", after)):
                await hub.send(name, WireMessage(Kind.WELCOME))
                assert (await link.receive()).kind is EventKind.CONNECTED
    assert not folder.exists() and list(tmp_path.iterdir()) == []


@pytest.fixture
def short_path():
    """A folder whose path leaves room for a socket's name, as macOS's temporary folder does and pytest's in it not."""
    with tempfile.TemporaryDirectory() as folder:
        yield Path(folder)


async def test_a_socket_in_a_folder_that_others_may_enter_is_neither_bound_nor_connected_to(short_path):
    open_folder = short_path / "open"
    open_folder.mkdir(mode=0o755)
    with pytest.raises(ConfigurationError, match="only this user"):
        async with zmq_hub(f"ipc://{open_folder}/s"):
            pass
    async with zmq_hub(f"ipc://{short_path}/closed/s") as hub:
        (short_path / "closed").chmod(0o711)
        async with zmq_link(hub.address, "a") as link:
            link.describe({})
            with pytest.raises(TransportClosed, match="only this user"):
                await link.receive()


def left_by_a_killed_hub(address, run) -> None:
    """A socket that nobody listens on."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as dead:
        dead.bind(address_to_bind(address, run).removeprefix("ipc://"))


@pytest.mark.parametrize("kind", ["of the run", "of a run with a long path", "by path"])
async def test_a_hub_takes_the_place_of_a_killed_one_and_not_that_of_a_live_one(tmp_path, short_path, kind):
    address = f"ipc://{short_path}/s/hub" if kind == "by path" else "ipc://"
    if kind == "of a run with a long path":
        tmp_path = tmp_path / ("d" * 120)
    left_by_a_killed_hub(address, tmp_path)
    async with zmq_link(address, "a", silence_seconds_max=1.0, run=tmp_path) as link:
        link.describe({"role": "actor"})
        while not link.reason.endswith("does not answer"):
            await anyio.sleep(0.01)
        async with zmq_hub(address, run=tmp_path) as hub:
            with pytest.raises(ConfigurationError, match="already in use"):
                async with zmq_hub(address, run=tmp_path):
                    pass
            event = await hub.receive()
            while event.kind is not EventKind.PEER_UP:  # the second hub's probe is a connection without a message
                assert event.fault is MessageFault.HANDSHAKE
                event = await hub.receive()
            await hub.send("a", WireMessage(Kind.WELCOME))
            assert (await link.receive()).kind is EventKind.CONNECTED


@pytest.mark.parametrize(
    "garbage", [b"GET / HTTP/1.1\r\n\r\n", b"\x01\x00" + 8 * b"\x02\x01x\x02\x00y"], ids=["http", "an old ZeroMQ"]
)
async def test_bytes_that_are_no_message_disturb_no_peer(tmp_path, garbage):
    async with zmq_hub("ipc://", run=tmp_path) as hub, zmq_link("ipc://", "a", run=tmp_path) as link:
        link.describe({"role": "actor"})
        assert (await hub.receive()).kind is EventKind.PEER_UP
        await hub.send("a", WireMessage(Kind.WELCOME))
        assert (await link.receive()).kind is EventKind.CONNECTED
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
            sock.connect(hub.address.removeprefix("ipc://"))
            sock.sendall(garbage)
            await link.send(WireMessage(Kind.TRAJECTORY))
            event = await hub.receive()
            while event.kind is EventKind.CORRUPT:
                event = await hub.receive()
            assert (event.kind, event.peer) == (EventKind.MESSAGE, "a") and connected_peers(hub) == ("a",)


async def test_the_folder_of_a_killed_hub_is_removed(tmp_path):
    left_by_a_killed_hub("ipc://", tmp_path)
    first = (tmp_path / "hub").readlink()
    left_by_a_killed_hub("ipc://", tmp_path)
    second = (tmp_path / "hub").readlink()
    assert not first.exists() and second.exists()
    remove_socket_folder(tmp_path)
    assert not second.exists() and not (tmp_path / "hub").is_symlink()


async def test_a_long_folder_for_temporary_files_is_done_without(tmp_path, monkeypatch):
    long = tmp_path / ("x" * 100)
    long.mkdir()
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(long))
    monkeypatch.setattr(tempfile, "tempdir", str(long))
    async with zmq_hub("ipc://", run=tmp_path) as hub, zmq_link("ipc://", "a", run=tmp_path) as link:
        link.describe({"role": "actor"})
        assert (await hub.receive()).kind is EventKind.PEER_UP
    assert list(long.iterdir()) == []


async def test_a_path_that_is_too_long_for_a_socket_names_the_remedy(tmp_path):
    with pytest.raises(ConfigurationError, match=r"stage.address: expected .* at most 103 bytes"):
        async with zmq_hub(f"ipc://{tmp_path / ('x' * 100)}", run=tmp_path):
            pass
    assert list(tmp_path.iterdir()) == []
