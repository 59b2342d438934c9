"""The link's view of its connection to the hub. Pure; owns no socket."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from pipeline.codec import decode_message
from pipeline.errors import WireError
from pipeline.transport.base import Buffer, Event, EventKind, Kind, Limits

HUB = "hub"


class State(StrEnum):
    DOWN = "down"
    """No connection; the next attempt is to come."""
    GREETING = "greeting"
    """HELLO is on its way; WELCOME has not come."""
    CONNECTED = "connected"
    LEAVING = "leaving"
    """We said BYE; nothing more is sent, and no reconnection."""
    ENDED = "ended"
    """Refused by the hub, or BYE was answered."""


@dataclass(slots=True)
class LinkCounters:
    messages_sent: int = 0
    messages_received: int = 0
    bytes_sent: int = 0
    bytes_received: int = 0
    corrupt: int = 0
    dropped: int = 0
    """Messages given to ``send`` while there was no connection."""
    reconnections: int = 0


@dataclass(slots=True)
class Session:
    """DOWN → GREETING → CONNECTED → DOWN …; LEAVING and ENDED are final."""

    limits: Limits
    state: State = State.DOWN
    end_reason: str = ""
    down_reason: str = ""
    counters: LinkCounters = field(default_factory=LinkCounters)

    @property
    def ended(self) -> bool:
        return self.state is State.ENDED

    @property
    def leaving(self) -> bool:
        return self.state is State.LEAVING

    def greet(self) -> None:
        """HELLO goes out on a fresh connection."""
        self.state = State.GREETING

    def leave(self) -> None:
        """BYE goes out."""
        if self.state is not State.ENDED:
            self.state = State.LEAVING

    def lose(self, reason: str) -> Event | None:
        """The connection is dead. Returns DISCONNECTED where CONNECTED had been told."""
        was = self.state
        self.down_reason = reason
        if was is State.LEAVING:
            self.end(reason)
            return None
        if was is not State.ENDED:
            self.state = State.DOWN
        return Event(EventKind.DISCONNECTED, HUB, None, reason) if was is State.CONNECTED else None

    def end(self, reason: str) -> None:
        """No more attempts."""
        self.state = State.ENDED
        self.end_reason = reason

    def accept(self, frames: list[Buffer]) -> Event | None:
        """Classify one incoming multipart message; changes the state."""
        try:
            message = decode_message(frames, self.limits)
        except WireError as error:
            return self._corrupt(str(error))
        if message.kind is Kind.HEARTBEAT:
            return None
        if message.kind is Kind.BYE:
            return self.lose(f"the hub said bye: {message.header.get('reason', 'no reason given')}")
        if message.kind is Kind.REFUSED and (self.state is State.GREETING or message.header.get("final")):
            self.end(f"refused by the hub: {message.header.get('reason', 'no reason given')}")
            return Event(EventKind.MESSAGE, HUB, message, self.end_reason)
        if message.kind is Kind.WELCOME and self.state is State.GREETING:
            self.state = State.CONNECTED
            return Event(EventKind.CONNECTED, HUB, message)
        if self.state is not State.CONNECTED:
            return None if self.state is State.LEAVING else self._corrupt(f"expected WELCOME, got {message.kind.value}")
        self.counters.messages_received += 1
        self.counters.bytes_received += message.n_bytes
        return Event(EventKind.MESSAGE, HUB, message)

    def _corrupt(self, reason: str) -> Event:
        self.counters.corrupt += 1
        return Event(EventKind.CORRUPT, HUB, None, reason)
