"""Keys on disk, who is let in, and what an owner of one key cannot do."""

from __future__ import annotations

import stat
import threading

import anyio
import pytest
import zmq

from pipeline.config import RunConfig
from pipeline.errors import ConfigurationError, TransportClosed
from pipeline.schema import SCHEMA_VERSION
from pipeline.transport.curve import make_keys, peer_keys, server_keys
from pipeline.transport.messages import EventKind, Kind, MessageFault, WireMessage
from pipeline.transport.zeromq import open_hub, open_link
from tests.support.memory_transport import connected_peers
from tests.unit.transport.conftest import zmq_hub, zmq_link

pytestmark = pytest.mark.timeout(20)


@pytest.fixture
def keys(tmp_path):
    make_keys(tmp_path / "keys", actors=2)
    return tmp_path / "keys"


def config(address="tcp://127.0.0.1:0", **stage) -> RunConfig:
    return RunConfig.model_validate({"stage": {"address": address, **stage}})


def raw(hub, keys, name, routing_id=b""):
    dealer = zmq.Context.instance().socket(zmq.DEALER)
    peer_keys(keys, name).apply(dealer)
    dealer.setsockopt(zmq.LINGER, 0)
    if routing_id:
        dealer.setsockopt(zmq.ROUTING_ID, routing_id)
    dealer.connect(hub.address)
    return dealer


async def test_a_known_client_talks_to_a_hub_with_keys_without_a_new_thread(keys):
    threads = threading.active_count()
    async with (
        open_hub(config(curve=keys)) as hub,
        open_link(config(hub.address, curve=keys), "actor-0") as link,
    ):
        link.describe({"role": "actor"})
        up = await hub.receive()
        assert up.kind is EventKind.PEER_UP and threading.active_count() == threads
        await hub.send("actor-0", WireMessage(Kind.WELCOME))
        assert (await link.receive()).kind is EventKind.CONNECTED
        await link.send(WireMessage(Kind.TRAJECTORY, {}, (b"x" * 1_000_000,)))
        assert (await hub.receive()).message.n_bytes == 1_000_000


@pytest.mark.parametrize(
    ("key", "name", "role"),
    [
        ("actor-0", "learner", "learner"),
        ("actor-0", "actor-1", "actor"),
        ("actor-0", "actor-0", "learner"),
        ("learner", "actor-0", "actor"),
    ],
)
async def test_a_key_is_good_for_its_own_role_and_name_only(keys, key, name, role):
    async with (
        zmq_hub("tcp://127.0.0.1:0", server_keys(keys)) as hub,
        zmq_link(hub.address, name, peer_keys(keys, key)) as link,
    ):
        link.describe({"role": role})
        event = await hub.receive()
        assert (event.kind, event.fault) == (EventKind.CORRUPT, MessageFault.IDENTITY) and key in event.reason
        assert (await link.receive()).message.kind is Kind.REFUSED
        with pytest.raises(TransportClosed, match=f"the connection's key, {key}"):
            await link.receive()
        assert connected_peers(hub) == ()


async def test_an_owner_of_a_key_cannot_take_the_routing_id_of_another_peer(keys):
    async with zmq_hub("tcp://127.0.0.1:0", server_keys(keys)) as hub:
        learner = raw(hub, keys, "learner", b"\0chosen")
        learner.send_multipart([b"hello", b'{"name":"learner","role":"learner","schema_version":%d}' % SCHEMA_VERSION])
        assert (await hub.receive()).kind is EventKind.PEER_UP
        learner.close(0)
        event, attempts = None, 0
        while event is None or event.kind is EventKind.PEER_DOWN:
            attempts += 1
            assert attempts <= 50, "ZeroMQ does not give the id up"
            actor = raw(hub, keys, "actor-0", b"\0chosen")  # one that came too early is ignored for good
            try:
                actor.send_multipart([b"version", b'{"policy_version":1000000}'])
                with anyio.move_on_after(0.2):
                    event = await hub.receive()
            finally:
                actor.close(0)
        assert (event.kind, event.fault) == (EventKind.CORRUPT, MessageFault.HELLO)


async def test_an_unknown_client_is_told_that_its_key_is_not_accepted_until_it_is_added(keys, tmp_path):
    theirs = tmp_path / "theirs"
    make_keys(theirs, actors=3)
    (theirs / "server.key").write_bytes((keys / "server.key").read_bytes())
    async with zmq_hub("tcp://127.0.0.1:0", server_keys(keys)) as hub:
        async with zmq_link(hub.address, "actor-2", peer_keys(theirs, "actor-2")) as link:
            link.describe({"role": "actor"})
            with pytest.raises(TransportClosed, match="does not accept our CURVE key"):
                await link.receive()
        event = await hub.receive()
        assert (event.kind, event.fault) == (EventKind.CORRUPT, MessageFault.HANDSHAKE) and connected_peers(hub) == ()
        (keys / "actor-2.key").write_bytes((theirs / "actor-2.key").read_bytes())
        async with zmq_link(hub.address, "actor-2", peer_keys(theirs, "actor-2")) as link:
            link.describe({"role": "actor"})
            assert (await hub.receive()).peer == "actor-2", "a hub that runs accepts new keys"


async def test_a_key_file_that_cannot_be_read_keeps_nobody_else_out(keys):
    hub_keys, learner = server_keys(keys), peer_keys(keys, "learner").public
    assert hub_keys.name_of(learner) == "learner"
    whole = (keys / "learner.key").read_bytes()
    for file in ("learner.key", "tls.key"):
        (keys / file).write_bytes(b"-----BEGIN \xff")
    actor = peer_keys(keys, "actor-0").public
    assert hub_keys.name_of(b"a stranger's") is None
    assert (hub_keys.name_of(actor), hub_keys.name_of(learner)) == ("actor-0", "learner"), "a known key stays"
    (keys / "actor-1.key").write_bytes(b"half writ")
    late = peer_keys(keys, "actor-1").public
    assert hub_keys.name_of(late) == "actor-1", "read before it was damaged"
    (keys / "learner.key").write_bytes(whole)
    async with (
        open_hub(config(curve=keys)) as hub,
        open_link(config(hub.address, curve=keys), "actor-0") as link,
    ):
        link.describe({"role": "actor"})
        assert (await hub.receive()).peer == "actor-0"


async def test_a_peer_without_keys_is_refused_and_counted(keys):
    async with zmq_hub("tcp://127.0.0.1:0", server_keys(keys), silence_seconds_max=0.3) as hub:
        dealer = zmq.Context.instance().socket(zmq.DEALER)
        dealer.setsockopt(zmq.LINGER, 0)
        dealer.connect(hub.address)
        try:
            dealer.send_multipart([b"hello", b"{}"])
            with anyio.fail_after(60):
                event = await hub.receive()
            assert (event.kind, event.fault) == (EventKind.CORRUPT, MessageFault.HANDSHAKE)
        finally:
            dealer.close(0)


def test_secrets_are_private_and_never_overwritten(tmp_path):
    folder = tmp_path / "keys"
    assert make_keys(folder, actors=1) == ["server", "learner", "actor-0"]
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    for path in folder.iterdir():
        assert stat.S_IMODE(path.stat().st_mode) == (0o600 if path.name.endswith("_secret") else 0o644), path
    before = {path: path.read_bytes() for path in folder.iterdir()}
    assert make_keys(folder, actors=3) == ["actor-1", "actor-2"], "keys can be added"
    assert before == {path: path.read_bytes() for path in before}
    assert len({peer_keys(folder, name).public for name in ("learner", "actor-0", "actor-1", "actor-2")}) == 4


def test_unsafe_missing_or_foreign_keys_are_named(keys, tmp_path):
    secret = keys / "actor-0.key_secret"
    secret.chmod(0o644)
    with pytest.raises(ConfigurationError, match="chmod 600"):
        peer_keys(keys, "actor-0")
    with pytest.raises(ConfigurationError, match=r"actor-7\.key_secret.*--actors"):
        open_link(config("tcp://127.0.0.1:5", curve=keys), "actor-7")
    secret.write_text("nonsense")
    secret.chmod(0o600)
    with pytest.raises(ConfigurationError, match=r"actor-0\.key_secret"):
        peer_keys(keys, "actor-0")
    (keys / "server.key_secret").unlink()
    with pytest.raises(ConfigurationError, match=r"server\.key_secret"):
        server_keys(keys)
    with pytest.raises(ConfigurationError, match="a peer's copy"):
        make_keys(keys, actors=9)
    with pytest.raises(ConfigurationError, match="afterplay keys"):
        server_keys(tmp_path / "nowhere")


@pytest.mark.parametrize("address", ["tcp://127.0.0.1:0", "tcp://[::1]:5", "tcp://0.0.0.0:5", "tcp://replay:5"])
def test_tcp_needs_keys_on_loopback_too(address):
    for end in (lambda: open_hub(config(address)), lambda: open_link(config(address), "actor-0")):
        with pytest.raises(ConfigurationError, match=r"afterplay keys.*stage\.curve"):
            end()


async def test_a_port_in_use_and_an_impossible_address_name_the_remedy(keys):
    async with zmq_hub("tcp://127.0.0.1:0", server_keys(keys)) as hub:
        with pytest.raises(ConfigurationError, match=r"Address already in use.*port 0"):
            async with open_hub(config(hub.address, curve=keys)):
                pass
    with pytest.raises(ConfigurationError, match="cannot be bound"):
        async with open_hub(config("tcp://127.0.0.1:port", curve=keys)):
            pass
    with pytest.raises(ConfigurationError, match="ipc://PATH"):
        open_hub(config("udp://127.0.0.1:5", curve=keys))


def test_a_link_needs_a_real_port(keys):
    with pytest.raises(ConfigurationError, match="no port"):
        open_link(config(curve=keys), "actor-0")
