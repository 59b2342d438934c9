"""The base of hub and link: the interface of a wire, a bounded mailbox of events, and the detection of silent peers.

A *wire* moves multipart messages: over ZeroMQ sockets, or in memory in tests. A wire never waits. It says ``None`` or
``False`` instead, and fires its :class:`Broadcast` when a retry may succeed.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import anyio
import anyio.lowlevel
from anyio.abc import TaskGroup

from pipeline.errors import TransportClosed, WireError
from pipeline.transport.protocol import Buffer, Event

CLOSE_SECONDS_MAX = 0.7
"""Longest wait of a closing end for the BYE of the other, which proves that all that was queued has arrived."""
LINGER_SECONDS_MAX = 0.2
"""Time in which a closed socket may still write what was queued, where no BYE came."""


class Broadcast:
    """A broadcast: whoever took ``current()`` before ``fire()`` wakes up. Take it *before* looking at the state."""

    def __init__(self) -> None:
        self._event: anyio.Event | None = None
        self.writers = 0
        """Senders that wait for room: a call on the socket may have used up what would have woken them."""

    @property
    def awaited(self) -> bool:
        """True if anyone took ``current()`` since the last ``fire()``."""
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

    signal: Broadcast

    @property
    def address(self) -> str: ...

    def open(self) -> None:
        """Bind. Raises :class:`ConfigurationError`."""
        ...

    def receive(self) -> tuple[bytes, list[Buffer] | WireError] | None:
        """The next ``(connection, [kind, header, frame …])``, with the error instead where what came is no message;
        or None."""
        ...

    def identity(self, connection: bytes) -> str | None:
        """Name of the peer that the connection's key belongs to; None where only this user can connect."""
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

    signal: Broadcast
    address: str

    def connect(self) -> None: ...

    def disconnect(self) -> None:
        """Forget the connection and all that is queued on it."""
        ...

    @property
    def lost(self) -> str | None:
        """Reason of a dead connection, as soon as the wire knows; None while it holds."""
        ...

    @property
    def hopeless(self) -> str | None:
        """Reason for which no other attempt can succeed (the hub refuses our keys); None where one may."""
        ...

    def receive(self) -> list[Buffer] | None: ...

    def send(self, frames: Sequence[Buffer]) -> bool: ...

    async def wait(self, event: anyio.Event) -> None: ...

    async def close(self) -> None: ...


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
        """True if the producer should stop reading its socket. Never after ``close``."""
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


class Silence:
    """Detects silent peers. Time in which this process could not receive does not count.

    When this process did not listen (a blocked event loop, a full mailbox), that time does not count: a process
    that was stopped for a minute must read what waits in its socket before it declares everyone else dead.
    """

    def __init__(self, heartbeat_seconds: float, silence_seconds_max: float) -> None:
        self._heartbeat_seconds = heartbeat_seconds
        self._silence_seconds_max = silence_seconds_max
        self._heard: dict[bytes, float] = {}
        self._last_tick: float | None = None

    def heard(self, key: bytes, now: float) -> None:
        self._heard[key] = now

    def forget(self, key: bytes) -> None:
        self._heard.pop(key, None)

    def tick(self, now: float, deaf: bool = False) -> list[bytes]:
        """Call once per heartbeat. ``deaf``: we did not listen since the last tick. Returns who was silent too long."""
        if self._last_tick is not None:
            elapsed = now - self._last_tick
            late = elapsed - self._heartbeat_seconds if elapsed > 2 * self._heartbeat_seconds else 0.0
            excused = elapsed if deaf else late
            if excused > 0:
                for key, at in self._heard.items():
                    self._heard[key] = min(now, at + excused)
        self._last_tick = now
        return [key for key, at in self._heard.items() if now - at > self._silence_seconds_max]


class Endpoint:
    """An async context manager whose tasks live exactly as long as the ``async with`` block.

    An exception of the block leaves unchanged (not wrapped in a group); a crash of one of our tasks cancels the block
    and leaves as an exception group.
    """

    def __init__(self) -> None:
        self._group: TaskGroup | None = None

    async def _enter(self, *tasks: Callable[[], Coroutine[Any, Any, None]]) -> None:
        self._group = anyio.create_task_group()
        await self._group.__aenter__()
        for task in tasks:
            self._group.start_soon(task)

    async def _leave(
        self, say_bye: Callable[[], Awaitable[None]], close: Callable[[], Awaitable[None]], *args: object
    ) -> None:
        """Part within a bounded time, end the tasks, close the wire."""
        group, self._group = self._group, None
        if group is None:
            return
        error = args[1] if len(args) > 1 else None
        crashed = isinstance(error, anyio.get_cancelled_exc_class()) and group.cancel_scope.cancel_called
        try:
            if not crashed:
                with anyio.CancelScope(shield=True):
                    await say_bye()
            group.cancel_scope.cancel()
            if isinstance(error, anyio.get_cancelled_exc_class()):
                await group.__aexit__(type(error), error, error.__traceback__)
            else:
                await group.__aexit__(None, None, None)
        finally:
            with anyio.CancelScope(shield=True):
                await close()
