"""A bounded queue between a socket and the one who reads events from it."""

from __future__ import annotations

from collections import deque

import anyio
import anyio.lowlevel

from pipeline.errors import TransportClosed
from pipeline.transport.base import Event

_GETS_PER_YIELD = 64


class Mailbox:
    """Events in order of arrival, bounded in number and bytes.

    *Consumes*: ``put``, never waits: the producer asks ``full`` before it takes the next message from its socket, so
    the bound may be passed only by control events (one for each peer). *Produces*: ``get``. *Waits for*: ``space``
    waits until it is no longer full. *Unblocked by*: ``put``, ``get`` and ``close``.
    """

    def __init__(self, messages_max: int, bytes_max: int) -> None:
        self._events: deque[tuple[Event, int]] = deque()
        self._messages_max = messages_max
        self._bytes_max = bytes_max
        self._bytes = 0
        self._gets = 0
        self._closed: str | None = None
        self._arrived: anyio.Event | None = None
        self._taken: anyio.Event | None = None

    def __len__(self) -> int:
        return len(self._events)

    @property
    def full(self) -> bool:
        """Whether the producer should stop reading its socket. Never after ``close``."""
        return self._closed is None and (len(self._events) >= self._messages_max or self._bytes >= self._bytes_max)

    def put(self, event: Event) -> None:
        """Append, also beyond the bound. After ``close`` the event is forgotten."""
        if self._closed is not None:
            return
        n_bytes = event.message.n_bytes if event.message is not None else 0
        self._events.append((event, n_bytes))
        self._bytes += n_bytes
        if self._arrived is not None:
            self._arrived.set()
            self._arrived = None

    async def get(self) -> Event:
        """The oldest event. Raises :class:`TransportClosed` when it is empty and closed."""
        self._gets += 1
        if self._gets % _GETS_PER_YIELD == 0:
            await anyio.lowlevel.checkpoint()
        while not self._events:
            if self._closed is not None:
                raise TransportClosed(self._closed)
            if self._arrived is None:
                self._arrived = anyio.Event()
            await self._arrived.wait()
        event, n_bytes = self._events.popleft()
        self._bytes -= n_bytes
        if self._taken is not None and not self.full:
            self._taken.set()
            self._taken = None
        return event

    async def space(self) -> None:
        """Return as soon as it is not full (or closed)."""
        while self.full:
            if self._taken is None:
                self._taken = anyio.Event()
            await self._taken.wait()

    def close(self, reason: str, discard: bool = False) -> None:
        """Let readers finish what is queued (unless ``discard``); then they get :class:`TransportClosed` with
        ``reason``."""
        if self._closed is None:
            self._closed = reason
        if discard:
            self._events.clear()
            self._bytes = 0
        for event in (self._arrived, self._taken):
            if event is not None:
                event.set()
        self._arrived = self._taken = None
