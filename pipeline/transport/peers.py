"""The hub's view of its connections: who said HELLO on which, who left, what is no message. Pure; owns no socket."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from pipeline.codec import decode_message
from pipeline.errors import AfterplayError, SchemaError, WireError
from pipeline.schema import SCHEMA_VERSION
from pipeline.schema.checks import require_id
from pipeline.transport.base import Buffer, Event, EventKind, Kind, Limits, Message

_DROPPED_MAX = 4096


@dataclass(slots=True)
class Peer:
    """One live connection."""

    name: str
    connection: bytes
    gone: bool = False


@dataclass(slots=True)
class HubCounters:
    messages_sent: int = 0
    messages_received: int = 0
    bytes_sent: int = 0
    bytes_received: int = 0
    corrupt: int = 0
    peers_dropped: int = 0
    late: int = 0
    """Messages of a connection that was already given up."""


@dataclass(slots=True)
class Answer:
    """What one incoming message leads to: at most one event for the user, at most one reply."""

    event: Event | None = None
    reply: Message | None = None
    replaced: Peer | None = None
    """An older connection under the same name; tell it and forget it."""


_NOTHING = Answer()


@dataclass(slots=True)
class Peers:
    """Maps connections to the names given in HELLO. Each name has at most one connection, each connection one name."""

    limits: Limits
    counters: HubCounters = field(default_factory=HubCounters)
    _by_connection: dict[bytes, Peer] = field(default_factory=dict)
    _by_name: dict[str, Peer] = field(default_factory=dict)
    _dropped: OrderedDict[bytes, None] = field(default_factory=OrderedDict)

    def __len__(self) -> int:
        return len(self._by_name)

    def find(self, name: str) -> Peer | None:
        """The live connection of ``name``."""
        peer = self._by_name.get(name)
        return None if peer is None or peer.gone else peer

    def all(self) -> list[Peer]:
        return list(self._by_name.values())

    def of(self, connection: bytes) -> Peer | None:
        return self._by_connection.get(connection)

    def accept(self, connection: bytes, frames: list[Buffer]) -> Answer:
        """Classify one incoming multipart message."""
        peer = self._by_connection.get(connection)
        try:
            message = decode_message(frames, self.limits)
        except WireError as error:
            return self._corrupt(peer, connection, str(error))
        if message.kind is Kind.HELLO:
            return self._hello(peer, connection, message)
        if peer is None:
            return self._stranger(connection, message)
        if message.kind is Kind.HEARTBEAT:
            return _NOTHING
        if message.kind is Kind.BYE:
            self._forget(peer)
            reason = str(message.header.get("reason", "no reason given"))
            return Answer(Event(EventKind.PEER_DOWN, peer.name, message, f"said bye: {reason}"), Message(Kind.BYE))
        self.counters.messages_received += 1
        self.counters.bytes_received += message.n_bytes
        return Answer(Event(EventKind.MESSAGE, peer.name, message))

    def drop(self, connection: bytes, reason: str) -> Event | None:
        """Give a connection up (silent too long)."""
        peer = self._by_connection.get(connection)
        if peer is None:
            return None
        self._forget(peer)
        self.counters.peers_dropped += 1
        return Event(EventKind.PEER_DOWN, peer.name, None, reason)

    def mark_gone(self, peer: Peer) -> None:
        """The wire says that the connection is closed; what it brought before may still wait to be read."""
        peer.gone = True

    def reap(self) -> list[Event]:
        """Call when everything that had arrived was read: peers that are gone are now down."""
        events = []
        for peer in [p for p in self._by_name.values() if p.gone]:
            self._forget(peer)
            self.counters.peers_dropped += 1
            events.append(Event(EventKind.PEER_DOWN, peer.name, None, "its connection was closed without BYE"))
        return events

    def _hello(self, peer: Peer | None, connection: bytes, message: Message) -> Answer:
        name = message.header.get("name")
        try:
            require_id("the name in HELLO", name)
            _require_our_schema(message.header)
        except AfterplayError as error:
            answer = self._corrupt(peer, connection, str(error))
            answer.reply = Message(Kind.REFUSED, {"reason": str(error), "final": True})
            return answer
        assert isinstance(name, str)
        if peer is not None:
            self._forget(peer)
        older = self._by_name.get(name)
        if older is not None:
            self._forget(older)
        self._dropped.pop(connection, None)
        self._by_name[name] = self._by_connection[connection] = Peer(name, connection)
        return Answer(Event(EventKind.PEER_UP, name, message), None, None if older is None or older.gone else older)

    def _stranger(self, connection: bytes, message: Message) -> Answer:
        if connection in self._dropped or message.kind in (Kind.HEARTBEAT, Kind.BYE):
            self.counters.late += 1
            if message.kind is Kind.BYE:
                return _NOTHING
            return Answer(None, Message(Kind.BYE, {"reason": "this connection was given up; say HELLO on a new one"}))
        reason = f"expected HELLO as the first message of a connection, got {message.kind.value}"
        answer = self._corrupt(None, connection, reason)
        answer.reply = Message(Kind.REFUSED, {"reason": reason, "final": True})
        return answer

    def _corrupt(self, peer: Peer | None, connection: bytes, reason: str) -> Answer:
        self.counters.corrupt += 1
        name = peer.name if peer is not None else f"unknown connection {connection.hex()}"
        return Answer(Event(EventKind.CORRUPT, name, None, reason))

    def _forget(self, peer: Peer) -> None:
        self._by_connection.pop(peer.connection, None)
        if self._by_name.get(peer.name) is peer:
            del self._by_name[peer.name]
        self._dropped[peer.connection] = None
        while len(self._dropped) > _DROPPED_MAX:
            self._dropped.popitem(last=False)


def _require_our_schema(header: Mapping[str, Any]) -> None:
    version = header.get("schema_version")
    if version != SCHEMA_VERSION:
        raise SchemaError(
            f"expected a peer with schema version {SCHEMA_VERSION}, got {version!r}: run the same Afterplay everywhere"
        )
