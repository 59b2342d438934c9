"""The account of what connections hold: who is cut, who never is, and that bytes are counted exactly."""

from __future__ import annotations

import random
import sys
from itertools import pairwise

import anyio
import pytest

from pipeline.transport import zeromq
from pipeline.transport.curve import make_keys, peer_keys, server_keys
from pipeline.transport.held_bytes import HeldBytes, budget_bytes
from pipeline.transport.protocol import EventKind, Kind, Limits, WireMessage
from pipeline.transport.zeromq import ZmqHub, ZmqLink

BUDGET = 1000
KEYS = ("actor-0", "actor-1", "learner")


class Wire:
    """Connections over few descriptors, so that each is used again and again; messages are read late."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.held = HeldBytes(BUDGET)
        self.numbers = 0
        self.live: dict[int, tuple[bytes, str, int]] = {}
        self.received: dict[int, int] = {}
        self.complete: list[tuple[bytes, str, int, int, int]] = []
        """Whole messages that wait: those of closed connections too."""
        self.told: list[tuple[str, int]] = []
        """Openings and closings that the hub has not read yet."""

    def open(self, descriptor: int) -> None:
        self.numbers += 1
        self.live[descriptor] = (b"%d" % self.numbers, self.rng.choice(KEYS), self.numbers)
        self.received[descriptor] = 0
        self.told.append(("opened", descriptor))

    def close(self, descriptor: int) -> None:
        del self.live[descriptor], self.received[descriptor]
        self.told.append(("closed", descriptor))

    def message(self, descriptor: int, size: int) -> None:
        self.received[descriptor] += size
        self.complete.append((*self.live[descriptor], descriptor, size))

    def tell(self) -> None:
        for what, descriptor in self.told:
            getattr(self.held, what)(descriptor)
        self.told.clear()

    def read(self) -> None:
        """Any message that is the oldest of its connection."""
        oldest = list({message[0]: message for message in reversed(self.complete)}.values())
        message = self.rng.choice(oldest)
        self.complete.remove(message)
        connection, owner, number, descriptor, size = message
        account = self.held.account(connection)
        if account is None:
            self.tell()
            account = self.held.first(connection, owner, number, descriptor)
        if account is not None:
            account.read += size

    def waiting(self, owner: str) -> int:
        return sum(size for _, name, _, _, size in self.complete if name == owner)

    def excess(self) -> dict[int, int]:
        self.tell()
        return {account.descriptor: n for account, n in self.held.excess(self.received.get)}


@pytest.mark.parametrize("seed", range(40))
def test_peers_within_their_credit_are_never_cut_however_late_they_are_read(seed):
    wire, rng = Wire(random.Random(seed)), random.Random(seed)
    for _ in range(1500):
        descriptor = rng.randrange(4)
        match rng.randrange(6):
            case 0 if descriptor in wire.live and rng.random() < 0.3:
                wire.close(descriptor)
            case 1 | 2 if descriptor not in wire.live:
                wire.open(descriptor)
            case 3 if descriptor in wire.live:
                size = rng.randrange(1, 60)
                if sum(size for *_, size in wire.complete) + size <= BUDGET:  # before the first, keys are not known
                    wire.message(descriptor, size)
            case 4 | 5 if wire.complete:
                wire.read()
        if rng.random() < 0.1:
            assert wire.excess() == {}


@pytest.mark.parametrize("seed", range(20))
def test_what_is_never_finished_is_cut_on_whatever_descriptor_it_comes(seed):
    wire, rng = Wire(random.Random(seed)), random.Random(seed)
    for _ in range(200):
        descriptor = rng.randrange(3)
        if descriptor in wire.live:
            wire.close(descriptor)
        wire.open(descriptor)
        for _ in range(rng.randrange(4)):
            wire.message(descriptor, rng.randrange(1, 5000))
            if rng.random() < 0.7:
                wire.read()
    while wire.complete:
        wire.read()
    for descriptor in list(wire.live):  # what a closed connection had sent may count for the next one, for once
        wire.close(descriptor)
    wire.open(0)
    if rng.random() < 0.5:
        wire.message(0, 30_000)
        wire.read()
    wire.received[0] += BUDGET
    assert wire.excess() == {}, "as much as is allowed"
    wire.received[0] += 1
    assert wire.excess() == {0: BUDGET + 1}
    wire.received[0] += 10 * BUDGET
    assert wire.excess() == {}, "a connection is cut once"


def test_the_largest_connections_of_a_key_are_cut_until_the_rest_fits_and_no_others():
    held = HeldBytes(BUDGET)
    received = {1: 100, 2: 700, 3: 900, 4: 1000, 5: 600, 6: 600}
    for descriptor, owner in enumerate(["a", "a", "a", "b", "", ""], start=1):
        held.opened(descriptor)
        if owner:
            held.first(b"%d" % descriptor, owner, descriptor, descriptor)
    assert [(a.descriptor, n) for a, n in held.excess(received.get)] == [(3, 900), (5, 600)]


def test_a_connection_whose_bytes_cannot_be_told_is_not_cut():
    held = HeldBytes(BUDGET)
    held.opened(1)
    assert held.excess(lambda descriptor: None) == []


@pytest.mark.skipif(sys.platform != "linux", reason="Linux tells the bytes of a connection")
async def test_bytes_of_messages_are_counted_exactly_as_they_come(tmp_path, monkeypatch):
    make_keys(tmp_path, actors=1)
    weighed: list[int] = []

    def look(descriptor: int) -> int | None:
        received = zeromq_bytes(descriptor)
        if received is not None:
            (account,) = [a for a in wire._held._open.values() if a.descriptor == descriptor]
            weighed.append(received - account.read)
        return received

    zeromq_bytes = zeromq._bytes_received
    monkeypatch.setattr(zeromq, "_bytes_received", look)
    monkeypatch.setattr(zeromq, "_WEIGH_SECONDS", 3600.0)
    async with (
        ZmqHub("tcp://127.0.0.1:0", server_keys(tmp_path), heartbeat_seconds=100) as hub,
        ZmqLink(hub.address, "actor-0", peer_keys(tmp_path, "actor-0"), heartbeat_seconds=100) as link,
    ):
        wire = hub._wire
        link.describe({"role": "actor"})
        await hub.receive()
        await hub.send("actor-0", WireMessage(Kind.WELCOME))
        assert (await link.receive()).kind is EventKind.CONNECTED
        for size in (0, 1, 221, 222, 223, 255, 256, 257, 8191, 8192, 8193, 70_000, 3_000_000):
            await link.send(WireMessage(Kind.TRAJECTORY, {}, (b"x" * size, b"")))
            with anyio.fail_after(10):
                assert (await hub.receive()).message.n_bytes == size
            wire._timer.cancel()
            wire._weigh(wire._held)
    assert 0 < weighed[0] < 2000, "the handshake"
    assert all(a == b for a, b in pairwise(weighed)), weighed


def test_the_budget_covers_the_credit_and_messages_on_their_way():
    limits = Limits(queue_messages_max=16, message_bytes_max=10_000, header_bytes_max=2_000, credit_bytes=50_000)
    assert budget_bytes(limits) > 50_000 + 2 * 12_000


def test_late_messages_of_a_closed_connection_never_change_the_account_of_a_known_later_one():
    held = HeldBytes(BUDGET)
    held.opened(5)
    held.first(b"a", "actor-0", 1, 5)
    held.closed(5)
    assert held.account(b"a") is None
    held.opened(5)
    late = held.first(b"a", "actor-0", 1, 5)
    assert late is not None
    late.read += 5000
    later = held.first(b"b", "actor-1", 2, 5)
    assert later is not None and later.read == 0, "what the closed one brought is none of its bytes"
    assert held.account(b"a") is None and held.first(b"a", "actor-0", 1, 5) is None
    assert held.account(b"b") is later and later.owner == "actor-1"
