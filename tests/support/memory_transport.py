"""Hub and links in one process: the contract and the code above the wire of :mod:`pipeline.transport.zeromq`.

Messages are encoded and decoded as on a socket, so limits, JSON headers and corrupt bytes behave the same. Faults are
made on demand. Time is ``anyio.current_time()`` alone, so it runs under virtual time.

>>> network = MemoryNetwork(Faults(seed=7, disconnect=0.01, delay_seconds=(0.0, 0.2)))
>>> async with MemoryHub(network) as hub, MemoryLink(network, "actor-0") as link: ...
>>> network.disconnect("actor-0")
"""

from __future__ import annotations

import heapq
import itertools
import random
from collections.abc import Sequence
from dataclasses import dataclass, field

import anyio

from pipeline.errors import ConfigurationError, PeerGone
from pipeline.schema.codec import Limits
from pipeline.schema.record_file import Buffer
from pipeline.transport.hub import Hub
from pipeline.transport.link import Link
from pipeline.transport.messages import Broadcast, Kind

_GREETINGS = frozenset(kind.value.encode() for kind in (Kind.HELLO, Kind.WELCOME, Kind.BYE, Kind.REFUSED))
_HEARTBEAT = Kind.HEARTBEAT.value.encode()
_TOLERANCE_SECONDS = 1e-6


@dataclass(frozen=True, slots=True)
class Faults:
    """Probabilities per message, drawn from ``seed`` in the order of sending (heartbeats and greetings draw nothing).

    ``disconnect`` is what real networks do: the connection breaks, and with it all that was under way. ``drop``,
    ``duplicate`` and ``corrupt`` are worse than ZeroMQ can be inside one connection; they show what leases and
    deduplication bear.
    """

    seed: int = 0
    disconnect: float = 0.0
    drop: float = 0.0
    duplicate: float = 0.0
    corrupt: float = 0.0
    delay_seconds: tuple[float, float] = (0.0, 0.0)
    """Uniform between the two; order inside one connection is kept."""
    greetings: bool = False
    """True if HELLO, WELCOME, BYE and REFUSED meet faults too."""


@dataclass(slots=True)
class _Connection:
    number: int
    link: MemoryLinkWire
    broken: bool = False
    """Messages under way are lost."""
    link_closed: bool = False
    last_due: dict[bool, float] = field(default_factory=lambda: {True: 0.0, False: 0.0})
    pending: dict[bool, int] = field(default_factory=lambda: {True: 0, False: 0})
    """Messages under way, by direction: True is towards the hub."""

    @property
    def key(self) -> bytes:
        return self.number.to_bytes(5, "big")


class _Inbox:
    """Messages under way to one end, by due time."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, _Connection, list[Buffer]]] = []
        self._serial = itertools.count()

    def push(self, due: float, connection: _Connection, frames: list[Buffer]) -> None:
        heapq.heappush(self._heap, (due, next(self._serial), connection, frames))

    def pop(self, towards_hub: bool) -> tuple[_Connection, list[Buffer]] | None:
        now = anyio.current_time() + _TOLERANCE_SECONDS
        while self._heap and (self._heap[0][2].broken or self._heap[0][0] <= now):
            _, _, connection, frames = heapq.heappop(self._heap)
            connection.pending[towards_hub] -= 1
            if not connection.broken:
                return connection, frames
        return None

    async def wait(self, event: anyio.Event) -> None:
        with anyio.CancelScope(deadline=self._heap[0][0] if self._heap else float("inf")):
            await event.wait()


class MemoryNetwork:
    """Network of one :class:`MemoryHub` at a time and any number of links. The methods break things.

    ``messages_max`` bounds what is under way on one connection in one direction.
    """

    def __init__(self, faults: Faults | None = None, messages_max: int = 4096) -> None:
        self.faults = faults if faults is not None else Faults()
        self.hub: MemoryHubWire | None = None
        self._messages_max = messages_max
        self._random = random.Random(self.faults.seed)
        self._numbers = itertools.count()
        self._connections: dict[bytes, _Connection] = {}
        self._mute_until: dict[str, float] = {}
        self.keys = False
        """True if every connection proves the name of its link by a key."""

    @property
    def names(self) -> tuple[str, ...]:
        """Links with a connection."""
        return tuple(c.link.name for c in self._connections.values() if not c.broken and not c.link_closed)

    def disconnect(self, name: str) -> None:
        """Break the connection of ``name``: both sides notice, what was under way is lost."""
        for connection in list(self._connections.values()):
            if connection.link.name == name:
                self._break(connection, "connection lost")

    def mute(self, name: str, seconds: float) -> None:
        """Swallow everything to and from ``name`` for a while: neither side notices but by silence."""
        self._mute_until[name] = anyio.current_time() + seconds

    def hold(self, name: str, seconds: float) -> None:
        """Messages to and from the present link of ``name`` arrive only after a while, as where its process
        is stopped and continued."""
        for connection in self._connections.values():
            if connection.link.name == name:
                connection.link.held_until = anyio.current_time() + seconds

    def kill_link(self, name: str) -> None:
        """As ``kill -9`` of the process of ``name``: no BYE. Its link object must be thrown away."""
        for connection in list(self._connections.values()):
            if connection.link.name == name:
                connection.link.lost = connection.link.hopeless = "killed"
                connection.link_closed = True
                connection.link.signal.fire()
                self._wake_hub()

    def kill_hub(self) -> None:
        """As ``kill -9`` of the hub: no BYE. The hub object must be thrown away; a new one may take its place."""
        if self.hub is not None:
            self.hub.dead = True
            self.hub.signal.fire()
        self.hub_closed()

    def connect(self, link: MemoryLinkWire) -> _Connection | None:
        if self.hub is None:
            return None
        connection = _Connection(next(self._numbers), link)
        self._connections[connection.key] = connection
        return connection

    def find(self, key: bytes) -> _Connection:
        connection = self._connections.get(key)
        if connection is None or connection.broken or connection.link_closed:
            raise PeerGone(f"connection {key.hex()} is closed")
        return connection

    def hub_closed(self) -> None:
        self.hub = None
        for connection in list(self._connections.values()):
            if not connection.link_closed:
                connection.link.lost = connection.link.lost or "connection lost"
                connection.link.signal.fire()
        self._connections.clear()

    def link_closed(self, connection: _Connection) -> None:
        """Close the connection; messages sent before still arrive."""
        connection.link_closed = True
        self._wake_hub()

    def transmit(self, connection: _Connection, towards_hub: bool, frames: Sequence[Buffer]) -> bool:
        """False when too much is under way."""
        if connection.pending[towards_hub] >= self._messages_max:
            return False
        if self._mute_until.get(connection.link.name, 0.0) > anyio.current_time():
            return True
        for delivered in self._fate(connection, list(frames)):
            self._put(connection, towards_hub, delivered)
        return True

    def _fate(self, connection: _Connection, frames: list[Buffer]) -> list[list[Buffer]]:
        f, draw, kind = self.faults, self._random.random, bytes(frames[0])
        if kind == _HEARTBEAT or (kind in _GREETINGS and not f.greetings):
            return [frames]
        if f.disconnect and draw() < f.disconnect:
            self._break(connection, "connection lost")
            return []
        if f.drop and draw() < f.drop:
            return []
        if f.corrupt and draw() < f.corrupt:
            frames = [frames[0], b"{" + bytes(frames[1]), *frames[2:]]
        if f.duplicate and draw() < f.duplicate:
            return [frames, list(frames)]
        return [frames]

    def _put(self, connection: _Connection, towards_hub: bool, frames: list[Buffer]) -> None:
        end = self.hub if towards_hub else connection.link
        if end is None or connection.broken:
            return
        low, high = self.faults.delay_seconds
        due = anyio.current_time() + (self._random.uniform(low, high) if high > 0 else 0.0)
        due = max(due, connection.link.held_until)
        due = connection.last_due[towards_hub] = max(due, connection.last_due[towards_hub])
        connection.pending[towards_hub] += 1
        end.inbox.push(due, connection, frames)
        end.signal.fire()

    def _break(self, connection: _Connection, reason: str) -> None:
        connection.broken = True
        connection.link.lost = connection.link.lost or reason
        connection.link.signal.fire()
        self._connections.pop(connection.key, None)
        self._wake_hub()

    def _wake_hub(self) -> None:
        if self.hub is not None:
            self.hub.signal.fire()


class MemoryHubWire:
    """The binding end."""

    address = "memory"

    def __init__(self, network: MemoryNetwork) -> None:
        self.signal = Broadcast()
        self.inbox = _Inbox()
        self.dead = False
        self._network = network

    def open(self) -> None:
        if self._network.hub is not None:
            raise ConfigurationError("this MemoryNetwork has a hub already: close it first")
        self._network.hub = self

    def receive(self) -> tuple[bytes, list[Buffer]] | None:
        arrived = None if self.dead else self.inbox.pop(towards_hub=True)
        if arrived is None:
            return None
        connection, frames = arrived
        connection.link.signal.fire()
        return connection.key, frames

    def identity(self, connection: bytes) -> str | None:
        if not self._network.keys:
            return None
        found = self._network._connections.get(connection)
        return "" if found is None else found.link.name

    def send(self, connection: bytes, frames: Sequence[Buffer]) -> bool:
        if self.dead:
            raise PeerGone("this hub was killed")
        return self._network.transmit(self._network.find(connection), False, frames)

    async def wait(self, event: anyio.Event) -> None:
        await self.inbox.wait(event)

    async def close(self) -> None:
        if self._network.hub is self:
            self._network.hub_closed()


class MemoryLinkWire:
    """The connecting end."""

    address = "memory"

    def __init__(self, network: MemoryNetwork, name: str) -> None:
        self.signal = Broadcast()
        self.inbox = _Inbox()
        self.name = name
        self.lost: str | None = None
        self.hopeless: str | None = None
        self.held_until = 0.0
        self._network = network
        self._connection: _Connection | None = None

    def connect(self) -> None:
        self.inbox = _Inbox()
        self._connection = self._network.connect(self)
        self.lost = None if self._connection is not None else "the hub does not answer"

    def disconnect(self) -> None:
        if self._connection is not None:
            self._network.link_closed(self._connection)
            self._connection = None

    def receive(self) -> list[Buffer] | None:
        arrived = self.inbox.pop(towards_hub=False)
        if arrived is None:
            return None
        self._network._wake_hub()
        return arrived[1]

    def send(self, frames: Sequence[Buffer]) -> bool:
        if self._connection is None or self.lost is not None:
            return True
        return self._network.transmit(self._connection, True, frames)

    async def wait(self, event: anyio.Event) -> None:
        await self.inbox.wait(event)

    async def close(self) -> None:
        self.disconnect()


_LIMITS = Limits()


class MemoryHub(Hub):
    """The hub of ``network``; one at a time."""

    def __init__(
        self,
        network: MemoryNetwork,
        limits: Limits = _LIMITS,
        heartbeat_seconds: float = 1.0,
        silence_seconds_max: float = 10.0,
    ) -> None:
        super().__init__(MemoryHubWire(network), limits, silence_seconds_max, heartbeat_seconds)


class MemoryLink(Link):
    """A link to the hub of ``network``."""

    def __init__(
        self,
        network: MemoryNetwork,
        name: str,
        limits: Limits = _LIMITS,
        heartbeat_seconds: float = 1.0,
        silence_seconds_max: float = 10.0,
    ) -> None:
        super().__init__(MemoryLinkWire(network, name), name, limits, silence_seconds_max, heartbeat_seconds)


def connected_peers(hub: Hub) -> tuple[str, ...]:
    """Names of the peers that a hub has a connection to."""
    return tuple(peer.name for peer in hub._peers.all() if not peer.gone)
