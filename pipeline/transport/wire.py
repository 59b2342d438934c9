"""What moves multipart messages: sockets (``zeromq``) or lists (``memory``). Everything else is shared by both.

A wire never waits. It says ``None`` or ``False`` instead, and fires its :class:`Signal` whenever trying again may help.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

import anyio

from pipeline.transport.base import Buffer

CLOSE_SECONDS_MAX = 0.7
"""How long a closing end waits for the BYE of the other, which proves that all that was queued has arrived."""
LINGER_SECONDS_MAX = 0.2
"""How long a closed socket may still write what was queued, where no BYE came."""


class Signal:
    """A broadcast: whoever took ``current()`` before ``fire()`` wakes up. Take it *before* looking at the state."""

    def __init__(self) -> None:
        self._event: anyio.Event | None = None
        self.writers = 0
        """Senders that wait for room: a call on the socket may have used up what would have woken them."""

    @property
    def awaited(self) -> bool:
        """Whether anyone took ``current()`` since the last ``fire()``."""
        return self._event is not None

    def current(self) -> anyio.Event:
        if self._event is None:
            self._event = anyio.Event()
        return self._event

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Around a sender's wait for room."""
        self.writers += 1
        try:
            yield
        finally:
            self.writers -= 1

    def fire(self) -> None:
        if self._event is not None:
            self._event.set()
            self._event = None


class HubWire(Protocol):
    """The binding side. A connection is known by an id that the wire gives it."""

    signal: Signal

    @property
    def address(self) -> str: ...

    def open(self) -> None:
        """Bind. Raises :class:`ConfigurationError`."""
        ...

    def receive(self) -> tuple[bytes, list[Buffer]] | None:
        """The next ``(connection, [kind, header, frame …])``, or None."""
        ...

    def send(self, connection: bytes, frames: Sequence[Buffer]) -> bool:
        """False when the queue of the connection is full. Raises :class:`PeerGone` when there is no such connection."""
        ...

    async def wait(self, event: anyio.Event) -> None:
        """Until ``event`` (of ``signal``) or until something may have become due."""
        ...

    async def close(self) -> None: ...


class LinkWire(Protocol):
    """The connecting side: one connection at a time, a fresh one after each loss."""

    signal: Signal
    address: str

    def connect(self) -> None: ...

    def disconnect(self) -> None:
        """Forget the connection and all that is queued on it."""
        ...

    @property
    def lost(self) -> str | None:
        """Why the connection is dead, as soon as the wire knows."""
        ...

    @property
    def hopeless(self) -> str | None:
        """Why no other attempt can succeed (the hub refuses our keys)."""
        ...

    def receive(self) -> list[Buffer] | None: ...

    def send(self, frames: Sequence[Buffer]) -> bool: ...

    async def wait(self, event: anyio.Event) -> None: ...

    async def close(self) -> None: ...
