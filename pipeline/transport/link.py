"""The link over any wire: says HELLO, sends heartbeats, and reconnects.

Its state of the connection is pure and owns no socket.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Self

import anyio
import anyio.lowlevel

from pipeline.errors import LimitExceeded, TransportClosed, WireError
from pipeline.schema import SCHEMA_VERSION
from pipeline.schema.codec import Limits
from pipeline.schema.record_file import Buffer
from pipeline.schema.trajectory import require_id
from pipeline.transport.messages import (
    CLOSE_SECONDS_MAX,
    HEARTBEAT_SECONDS,
    Endpoint,
    Event,
    EventKind,
    Kind,
    LinkWire,
    WireMessage,
    decode_message,
    encode_message,
)

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
class Session:
    """DOWN → GREETING → CONNECTED → DOWN …; LEAVING and ENDED are final.

    While GREETING only the answer to the last HELLO counts: whatever else comes was meant for an earlier connection.
    A session whose name another one took greets once more: it may have been a late HELLO of a process that is gone. Of
    two living processes one is refused again and ends.
    """

    limits: Limits
    greeting: int = field(default_factory=lambda: secrets.randbits(32))
    """Number of the last HELLO. The first is drawn: an answer to the process before may still come under our name."""
    state: State = State.DOWN
    end_reason: str = ""
    down_reason: str = ""
    _was_replaced: bool = False

    def greet(self) -> None:
        """HELLO goes out on a fresh connection."""
        self.state = State.GREETING
        self.greeting += 1

    def leave(self) -> None:
        """BYE goes out."""
        if self.state is not State.ENDED:
            self.state = State.LEAVING

    def lose(self, reason: str) -> Event | None:
        """The connection is dead. Returns DISCONNECTED where CONNECTED had been reported."""
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
            return Event(EventKind.CORRUPT, HUB, None, str(error))
        if message.kind is Kind.HEARTBEAT:
            return None
        if message.kind is Kind.BYE:
            return self.lose(f"the hub said bye: {message.header.get('reason', 'no reason given')}")
        # the last HELLO, or none in particular
        answers = self.state is State.GREETING and message.header.get("greeting", self.greeting) == self.greeting
        if message.kind is Kind.REFUSED and (answers or message.header.get("final")):
            reason = f"refused by the hub: {message.header.get('reason', 'no reason given')}"
            if message.header.get("replaced") and not self._was_replaced:
                self._was_replaced = True
                return self.lose(reason)
            self.end(reason)
            return Event(EventKind.MESSAGE, HUB, message, self.end_reason)
        if message.kind is Kind.WELCOME and answers:
            self.state = State.CONNECTED
            return Event(EventKind.CONNECTED, HUB, message)
        if self.state is not State.CONNECTED:
            return None
        return Event(EventKind.MESSAGE, HUB, message)


_READS_PER_YIELD = 128
_SENDS_PER_YIELD = 64
_BACKOFF_SECONDS = 0.05
_BACKOFF_SECONDS_MAX = 1.0
_HEARTBEAT = encode_message(WireMessage(Kind.HEARTBEAT))
_KEY = HUB.encode()


class Link(Endpoint):
    """The side that connects, under a name that is stable over restarts of the connection. Use as an async context
    manager.

    The first HELLO goes out after the first ``describe``.

    *Consumes* messages while its mailbox has room. *Produces* events; after a final REFUSED (also: "another process
    took your name") ``receive`` and ``send`` raise :class:`TransportClosed` with the hub's reason. *Waits*: ``send``
    while the queue to a connected hub is full. *Unblocked by*: the hub reading, or the loss of the connection. What is
    sent while there is no connection is dropped: CONNECTED comes later and is the time to send it again.
    """

    _what = "link"

    def __init__(
        self,
        wire: LinkWire,
        name: str,
        limits: Limits,
        silence_seconds_max: float,
        heartbeat_seconds: float = HEARTBEAT_SECONDS,
    ) -> None:
        super().__init__(wire, limits, silence_seconds_max, heartbeat_seconds)
        require_id("the name of a link", name)
        self.name = name
        self._id = secrets.token_hex(8)
        self._wire = wire
        self._session = Session(limits)
        self._hello: Callable[[], Mapping[str, Any]] = dict
        self._described = anyio.Event()

    async def __aenter__(self) -> Self:
        await self._enter(self._run, self._tick)
        return self

    @property
    def connected(self) -> bool:
        """True if WELCOME came and the connection holds, as far as we know."""
        return self._session.state is State.CONNECTED

    @property
    def reason(self) -> str:
        """Explanation of a missing connection, for people; empty when there is one."""
        if self.connected:
            return ""
        if not self._described.is_set():
            return "describe() was not called yet, so no HELLO was sent"
        return (
            self._session.end_reason or self._session.down_reason or f"waiting for the answer of {self._wire.address}"
        )

    def describe(self, hello: Mapping[str, Any] | Callable[[], Mapping[str, Any]]) -> None:
        """Set the header of the HELLO that is sent on every (re)connection. A function is asked at each."""
        self._hello = hello if callable(hello) else lambda: hello
        self._described.set()

    def reconnect(self, reason: str) -> None:
        """Give up the connection and say HELLO on a new one: the two sides disagree on what was said."""
        if self._session.state is State.CONNECTED:
            self._lose(reason)
            self._wire.signal.fire()

    async def send(self, message: WireMessage) -> None:
        """Queue for the hub; waits while the queue is full. Raises :class:`LimitExceeded`."""
        frames = encode_message(message, self._limits)
        session = self._session
        greeting = session.greeting
        self._sends += 1
        if self._sends % _SENDS_PER_YIELD == 0:
            await anyio.lowlevel.checkpoint()
        while True:
            if self._group is None or session.state in (State.ENDED, State.LEAVING):
                raise TransportClosed(session.end_reason or "the link was closed: nothing can be sent any more")
            if session.state is not State.CONNECTED or session.greeting != greeting:
                return
            if self._wire.send(frames):
                break
            event = self._wire.signal.current()
            if self._wire.send(frames):
                break
            with self._wire.signal.writing():
                await self._wire.wait(event)
        if message.kind is Kind.BYE:
            session.leave()

    async def _run(self) -> None:
        await self._described.wait()
        backoff = _BACKOFF_SECONDS
        while self._greet():
            greeted_only = await self._converse()
            self._wire.disconnect()
            self._silence.forget(_KEY)
            if self._session.state is State.ENDED:
                break
            backoff = min(2 * backoff, _BACKOFF_SECONDS_MAX) if greeted_only else _BACKOFF_SECONDS
            await anyio.sleep(backoff)
        self._mailbox.close(self._session.end_reason)
        self._wire.signal.fire()

    def _greet(self) -> bool:
        greeting = self._session.greeting + 1
        own = {"name": self.name, "link": self._id, "greeting": greeting}
        header = {"schema_version": SCHEMA_VERSION, **self._hello(), **own}
        try:
            frames = encode_message(WireMessage(Kind.HELLO, header), self._limits)
        except LimitExceeded as error:
            self._session.end(f"HELLO cannot be sent: {error}")
            return False
        self._wire.connect()
        self._session.greet()
        self._silence.heard(_KEY, anyio.current_time())
        self._wire.send(frames)
        return True

    async def _converse(self) -> bool:
        """Read until the connection is lost. Returns True when it never came to WELCOME."""
        welcomed = False
        while True:
            event = self._wire.signal.current()
            empty = self._drain()
            welcomed = welcomed or self._session.state is State.CONNECTED
            if self._session.state in (State.DOWN, State.ENDED):
                return not welcomed
            if self._mailbox.full:
                self._deaf = True
                await self._mailbox.space()
            elif not empty:
                await anyio.lowlevel.checkpoint()
            elif self._wire.hopeless is not None:
                self._session.end(self._wire.hopeless)
                return True
            elif self._wire.lost is not None:
                self._lose(self._wire.lost)
                return not welcomed
            else:
                await self._wire.wait(event)

    def _drain(self) -> bool:
        now = anyio.current_time()
        for _ in range(_READS_PER_YIELD):
            if self._mailbox.full:
                return False
            frames = self._wire.receive()
            if frames is None:
                return True
            self._silence.heard(_KEY, now)
            event = self._session.accept(frames)
            if event is not None:
                self._mailbox.put(event)
            if self._session.state in (State.DOWN, State.ENDED):
                if self._session.state is State.DOWN:
                    self._wire.send(encode_message(WireMessage(Kind.BYE)))
                return True
        return False

    def _lose(self, reason: str) -> None:
        event = self._session.lose(reason)
        if event is not None:
            self._mailbox.put(event)

    async def _tick(self) -> None:
        while True:
            await anyio.sleep(self._heartbeat_seconds)
            if self._session.state in (State.GREETING, State.CONNECTED, State.LEAVING):
                self._wire.send(_HEARTBEAT)
                deaf, self._deaf = self._deaf or self._mailbox.full, False
                if self._silence.tick(anyio.current_time(), deaf):
                    self._lose(f"the hub was silent for more than {self._silence_seconds_max} s")
            self._wire.signal.fire()

    async def _say_bye(self) -> None:
        """BYE; the hub's BYE proves that it read everything that was queued."""
        with anyio.move_on_after(CLOSE_SECONDS_MAX):
            bye = encode_message(WireMessage(Kind.BYE, {"reason": "the link was closed"}))
            if self._session.state is State.GREETING:
                self._wire.send(bye)
                self._session.end("the link was closed")
            while self._session.state is State.CONNECTED:
                event = self._wire.signal.current()
                if self._wire.send(bye):
                    self._session.leave()
                else:
                    await self._wire.wait(event)
            while self._session.state is State.LEAVING:
                await self._wire.wait(self._wire.signal.current())
