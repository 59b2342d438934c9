"""A hub under garbage, wrong keys, wrong roles and slow handshakes goes on serving its peers."""

from __future__ import annotations

import random
import socket
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import anyio
import anyio.to_thread
import pytest
import zmq

from pipeline.config import RunConfig
from pipeline.schema import SCHEMA_VERSION
from pipeline.transport.curve import make_keys, peer_keys
from pipeline.transport.hub import Hub
from pipeline.transport.link import Link
from pipeline.transport.messages import Event, EventKind, Kind, MessageFault, WireMessage, encode_message
from pipeline.transport.zeromq import open_hub, open_link

pytestmark = pytest.mark.timeout(60)
TRAJECTORIES = 1_000
CONNECTIONS = 400
RSS_BYTES_MAX = 128 * 1024 * 1024
HELLO = {"name": "learner", "role": "learner", "schema_version": SCHEMA_VERSION}


def rss() -> int:
    statm = Path("/proc/self/statm")
    return int(statm.read_text().split()[1]) * 4096 if statm.exists() else 0


def garbage(rng: random.Random) -> Iterator[bytes]:
    """Bytes that a connection sends; it stays open afterwards."""
    while True:
        yield rng.randbytes(rng.randint(1, 4_000))
        yield b"GET /metrics HTTP/1.1\r\n\r\n"
        yield b"\xff\x00\x00\x00\x00\x00\x00\x00\x01\x7f\x03\x00NULL" + bytes(48)
        yield b"\xff\x00\x00\x00\x00\x00\x00\x00\x01\x7f\x03\x00CURVE" + bytes(47) + rng.randbytes(300)
        yield b"\xff"


def throw(host: str, port: int) -> None:
    """Many connections of garbage, some of which stay open."""
    rng = random.Random(7)
    kept: list[socket.socket] = []
    for data, _ in zip(garbage(rng), range(CONNECTIONS), strict=False):
        sock = socket.create_connection((host, port), timeout=5)
        kept.append(sock)
        try:
            sock.settimeout(0.2)
            sock.sendall(data)
        except OSError:
            pass
        if len(kept) > 50:
            kept.pop(0).close()
    for sock in kept:
        sock.close()


def attack(hub: Hub, keys: Path, others: Path) -> None:
    host, _, port = hub.address.removeprefix("tcp://").rpartition(":")
    throw(host, int(port))
    context = zmq.Context()
    try:
        for folder, name in [(others, "actor-1"), (others, "learner"), (keys, "actor-1")] * 5:
            dealer = context.socket(zmq.DEALER)
            dealer.setsockopt(zmq.LINGER, 0)
            dealer.setsockopt(zmq.SNDTIMEO, 0)  # one whose key is refused has nowhere to send to
            peer_keys(folder, name).apply(dealer)
            dealer.connect(hub.address)
            with suppress(zmq.Again):
                for _ in range(20):
                    dealer.send_multipart(encode_message(WireMessage(Kind.HELLO, HELLO)))
                for _ in range(20):
                    dealer.send_multipart([b"version", b'{"policy_version":1e300}'])
            dealer.poll(100)
            dealer.close()
    finally:
        context.destroy(linger=0)


async def work(link: Link) -> None:
    """A real peer sends all its trajectories."""
    link.describe({"role": "actor", "slots": 1})
    while (await link.receive()).kind is not EventKind.CONNECTED:
        pass
    for n in range(TRAJECTORIES):
        await link.send(WireMessage(Kind.TRAJECTORY, {"n": n}, (b"x" * 20_000,)))
        if n % 50 == 49:  # as orders would make it wait
            await link.receive()


async def test_a_hub_serves_its_peer_while_strangers_throw_garbage_at_it(tmp_path: Path) -> None:
    keys, others = tmp_path / "keys", tmp_path / "others"
    make_keys(keys, actors=2)
    make_keys(others, actors=2)
    (others / "server.key").write_bytes((keys / "server.key").read_bytes())
    raw = {
        "run": {"directory": tmp_path, "name": "r"},
        "stage": {
            "address": "tcp://127.0.0.1:0",
            "curve": keys,
            "silence_seconds_max": 2.0,
            "message_bytes_max": 8_000_000,
        },
    }
    faults: Counter[MessageFault | None] = Counter()
    numbers: list[int] = []
    before = rss()
    async with open_hub(RunConfig.model_validate(raw)) as hub, anyio.create_task_group() as tasks:
        raw["stage"]["address"] = hub.address

        async def be_attacked() -> None:
            await anyio.to_thread.run_sync(attack, hub, keys, others)
            attacked.set()

        async def serve() -> None:
            while len(numbers) < TRAJECTORIES or not attacked.is_set():
                with anyio.move_on_after(0.1):
                    await take(await hub.receive())
            tasks.cancel_scope.cancel()

        async def take(event: Event) -> None:
            if event.kind is EventKind.PEER_UP:
                assert event.peer == "actor-0", "nobody else is let in"
                await hub.send(event.peer, WireMessage(Kind.WELCOME))
            elif event.kind is EventKind.MESSAGE:
                assert event.message is not None
                numbers.append(event.message.header["n"])
                if len(numbers) % 50 == 0:
                    await hub.send(event.peer, WireMessage(Kind.ACK))
            elif event.kind is EventKind.CORRUPT:
                faults[event.fault] += 1
            else:
                raise AssertionError(f"the peer was lost: {event}")

        async def play() -> None:
            async with open_link(RunConfig.model_validate(raw), "actor-0") as link:
                await work(link)
                await anyio.sleep_forever()

        attacked = anyio.Event()
        for task in (be_attacked, serve, play):
            tasks.start_soon(task)
    assert numbers == list(range(TRAJECTORIES)), "in order, and all"
    assert faults[MessageFault.HANDSHAKE] > CONNECTIONS // 3 and faults[MessageFault.IDENTITY] >= 5
    assert rss() - before < RSS_BYTES_MAX
