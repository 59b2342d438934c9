"""Keys on disk, and who is let in."""

from __future__ import annotations

import stat
import threading

import pytest

from pipeline.config import RunConfig
from pipeline.errors import ConfigurationError, TransportClosed
from pipeline.transport.curve import load_keys, make_keys
from pipeline.transport.protocol import EventKind, Kind, WireMessage
from pipeline.transport.zeromq import ZmqHub, ZmqLink, is_local, open_hub, open_link

pytestmark = pytest.mark.timeout(20)


def config(address="tcp://127.0.0.1:0", **transport) -> RunConfig:
    return RunConfig.model_validate({"replay": {"address": address}, "transport": transport})


async def test_a_known_client_talks_to_a_hub_with_keys_without_a_new_thread(tmp_path):
    make_keys(tmp_path / "keys")
    threads = threading.active_count()
    async with (
        open_hub(config(curve=tmp_path / "keys")) as hub,
        open_link(config(hub.address, curve=tmp_path / "keys"), "a") as link,
    ):
        link.describe({"role": "actor"})
        up = await hub.receive()
        assert up.kind is EventKind.PEER_UP and threading.active_count() == threads
        await hub.send("a", WireMessage(Kind.WELCOME))
        assert (await link.receive()).kind is EventKind.CONNECTED
        await link.send(WireMessage(Kind.TRAJECTORY, {}, (b"x" * 1_000_000,)))
        assert (await hub.receive()).message.n_bytes == 1_000_000


async def test_an_unknown_client_is_told_that_its_key_is_not_accepted(tmp_path):
    make_keys(tmp_path / "ours")
    make_keys(tmp_path / "theirs")
    for name in ("server.key", "server.key_secret"):
        (tmp_path / "theirs" / name).write_bytes((tmp_path / "ours" / name).read_bytes())
    async with ZmqHub("tcp://127.0.0.1:0", curve=load_keys(tmp_path / "ours")) as hub:
        async with ZmqLink(hub.address, "stranger", curve=load_keys(tmp_path / "theirs")) as link:
            link.describe({})
            with pytest.raises(TransportClosed, match="does not accept our CURVE key"):
                await link.receive()
        assert hub.peers == ()
    (tmp_path / "ours" / "friend.key").write_bytes((tmp_path / "theirs" / "client.key").read_bytes())
    async with (
        ZmqHub("tcp://127.0.0.1:0", curve=load_keys(tmp_path / "ours")) as hub,
        ZmqLink(hub.address, "friend", curve=load_keys(tmp_path / "theirs")) as link,
    ):
        link.describe({})
        assert (await hub.receive()).peer == "friend"


@pytest.mark.parametrize("hub_has_keys", [True, False])
async def test_keys_on_one_side_only_are_an_error_that_names_transport_curve(tmp_path, hub_has_keys):
    keys = make_keys(tmp_path / "keys")
    async with (
        ZmqHub("tcp://127.0.0.1:0", curve=keys if hub_has_keys else None) as hub,
        ZmqLink(hub.address, "a", curve=None if hub_has_keys else keys) as link,
    ):
        link.describe({})
        with pytest.raises(TransportClosed, match=r"transport\.curve"):
            await link.receive()
        assert "curve" in link.trouble
        assert hub.peers == ()


def test_secrets_are_private_and_never_overwritten(tmp_path):
    folder = tmp_path / "keys"
    keys = make_keys(folder)
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    for path in folder.iterdir():
        assert stat.S_IMODE(path.stat().st_mode) == (0o600 if path.name.endswith("_secret") else 0o644), path
    before = {path: path.read_bytes() for path in folder.iterdir()}
    with pytest.raises(ConfigurationError, match="already has keys"):
        make_keys(folder)
    assert before == {path: path.read_bytes() for path in folder.iterdir()}
    assert load_keys(folder) == keys and keys.clients == {keys.client_public}


def test_unsafe_missing_or_foreign_keys_are_named(tmp_path):
    make_keys(tmp_path / "keys")
    secret = tmp_path / "keys" / "server.key_secret"
    secret.chmod(0o644)
    with pytest.raises(ConfigurationError, match="chmod 600"):
        load_keys(tmp_path / "keys")
    secret.unlink()
    with pytest.raises(ConfigurationError, match=r"server\.key_secret"):
        ZmqHub("tcp://127.0.0.1:0", curve=load_keys(tmp_path / "keys"))
    (tmp_path / "keys" / "client.key").write_text("nonsense")
    (tmp_path / "keys" / "client.key_secret").unlink()
    with pytest.raises(ConfigurationError, match=r"client\.key"):
        load_keys(tmp_path / "keys")
    with pytest.raises(ConfigurationError, match="afterplay keys"):
        load_keys(tmp_path / "nowhere")


@pytest.mark.parametrize(
    ("address", "local"),
    [
        ("tcp://127.0.0.1:0", True),
        ("tcp://127.8.9.1:5", True),
        ("tcp://localhost:5", True),
        ("tcp://[::1]:5", True),
        ("ipc:///tmp/x", True),
        ("tcp://0.0.0.0:5", False),
        ("tcp://*:5", False),
        ("tcp://10.0.0.1:5", False),
        ("tcp://replay:5", False),
        ("tcp://[::]:5", False),
        ("tcp://[2001:db8::1]:5", False),
        ("", False),
    ],
)
def test_binding_beyond_loopback_needs_keys(address, local):
    assert is_local(address) is local
    if not local:
        with pytest.raises(ConfigurationError, match=r"afterplay keys.*transport\.curve"):
            open_hub(config(address))


async def test_a_port_in_use_and_an_impossible_address_name_the_remedy():
    async with ZmqHub("tcp://127.0.0.1:0") as hub:
        with pytest.raises(ConfigurationError, match=r"Address already in use.*port 0"):
            async with open_hub(config(hub.address)):
                pass
    with pytest.raises(ConfigurationError, match="cannot be bound"):
        async with open_hub(config("tcp://127.0.0.1:port")):
            pass


def test_a_link_needs_a_real_port():
    with pytest.raises(ConfigurationError, match="no port"):
        open_link(config(), "a")
