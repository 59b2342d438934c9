"""Messages between the replay stage, actors and learner, and what both ends are made of: the interface of a wire, a
bounded mailbox of events, and the detection of silent peers.

The hub (replay stage) outlives its peers and its peers outlive it: either side may die and come back, and the other
sees ``PEER_UP`` / ``PEER_DOWN`` (hub) or ``CONNECTED`` / ``DISCONNECTED`` (link) as ordinary events in its stream.
Delivery inside one connection is in order and without loss; across a reconnection anything unacknowledged may be lost,
and who cares about it sends it again (``pipeline.transport.outbox``). The receiver's credits bound what may be in
flight.

A *wire* moves multipart messages: over ZeroMQ sockets, or in memory in tests. A wire never waits. It says ``None`` or
``False`` instead, and fires its :class:`Broadcast` when a retry may succeed.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, ClassVar, Protocol

import anyio
import anyio.lowlevel
import orjson
from anyio.abc import TaskGroup

from pipeline.errors import TransportClosed, WireError
from pipeline.schema.codec import DEFAULT_LIMITS, Limits, check_limits
from pipeline.schema.record_file import Buffer, Frames, json_object

CREDIT_BYTES = 256 * 1024 * 1024
"""Bytes of unacknowledged trajectories that the replay stage grants each actor."""

HEARTBEAT_SECONDS = 1.0
"""Between two heartbeats on an idle connection."""

CLOSE_SECONDS_MAX = 0.7
"""Longest wait of a closing end for the BYE of the other, which proves that all that was queued has arrived."""

LINGER_SECONDS_MAX = 0.2
"""Time in which a closed socket may still write what was queued, where no BYE came."""


class Kind(StrEnum):
    """Every message that exists. ``a → r`` reads: actor to replay stage; ``l`` is the learner."""

    HELLO = "hello"
    """a,l → r. First message of a connection; header: role, peer name, schema version, ``link`` (drawn by the
    process), ``greeting`` (its number), and the role's state (below)."""
    WELCOME = "welcome"
    """r → a,l. Answer to HELLO; header: the ``greeting`` it answers, credits and the newest policy version."""
    HEARTBEAT = "heartbeat"
    """Both ways, sent by the transport itself; never seen by users of it."""
    ORDER = "order"
    """r → a. One :class:`Order`."""
    CANCEL = "cancel"
    """r → a: order ids to abandon. r → l: group ids that will not be completed, with a reason."""
    TRAJECTORY = "trajectory"
    """a → r. One trajectory as payload frames; header: trajectory_id."""
    SLOTS = "slots"
    """a → r. The actor plays so many episodes at once from now on; header: slots."""
    WATCH = "watch"
    """r → a. Probe the engines for all actors from now on, and all of them at once; no header."""
    ENGINES = "engines"
    """a → r → a. States of the engines as the actor saw them that probes for all; header: engines {url: state}."""
    ACK = "ack"
    """r → a: trajectory ids that are durable (or refused for good, with a reason). r → l: the number of the last
    control message that was applied; CONSUMED, VERSION and CHECKPOINTED are numbered
    (``pipeline.transport.outbox.ControlLog``)."""
    PLAN = "plan"
    """r → l. One :class:`GroupPlan` and the update it is meant for."""
    DELIVERY = "delivery"
    """r → l. One scored trajectory of a plan: header has group_id, trajectory_id, reward, rewards; frames are the
    payload."""
    CONSUMED = "consumed"
    """l → r. Update number ``update`` was made from these groups."""
    VERSION = "version"
    """l → r. The weights after ``updates`` updates are live in the engines as ``policy_version``."""
    CHECKPOINTED = "checkpointed"
    """l → r. Everything up to ``updates`` updates is durable at the learner: its trajectories may be forgotten."""
    EVALUATION = "evaluation"
    """r → l. State of the evaluations; header: evaluating, begun, last, best."""
    LESSONS_QUERY = "lessons_query"
    """a → r. Asks for lessons for a task; header: order_id, query, top_k. Answered by LESSONS, but not always."""
    LESSONS = "lessons"
    """r → a. Lessons found for an order, perhaps none; header: order_id, lessons [{id, text}]."""
    BYE = "bye"
    """Both ways. The sender leaves on purpose and wants nothing more."""
    REFUSED = "refused"
    """r → a,l. HELLO or a message was wrong; header: reason. The peer must not retry unchanged."""


@dataclass(frozen=True, slots=True)
class WireMessage:
    """``[kind, orjson header, frame …]``. Frames are raw bytes, decoded without copying."""

    kind: Kind
    header: Mapping[str, Any] = field(default_factory=dict)
    frames: Frames = ()

    @property
    def n_bytes(self) -> int:
        """Bytes of the frames (headers are bounded separately)."""
        return sum(len(f) if isinstance(f, bytes) else f.nbytes for f in self.frames)


class MessageFault(StrEnum):
    """Kinds of invalid messages: the values of a metric's label."""

    HANDSHAKE = "handshake"
    """The key of a connection is unknown, or it has none."""
    BYTES = "bytes"
    """Not a message."""
    LIMIT = "limit"
    """Larger than a limit."""
    HELLO = "hello"
    """No HELLO where one is due, or one that cannot be understood."""
    IDENTITY = "identity"
    """HELLO under a name that the connection's key does not belong to."""


class EventKind(StrEnum):
    PEER_UP = "peer_up"
    """Hub: a HELLO arrived (the message is attached). Answer with WELCOME or REFUSED."""
    PEER_DOWN = "peer_down"
    """Hub: a peer said BYE, was silent too long, or another connection took its name; ``reason`` says which. Each
    PEER_UP is followed by one PEER_DOWN before the next PEER_UP of that name."""
    MESSAGE = "message"
    CORRUPT = "corrupt"
    """Hub: ``peer`` sent an invalid message; ``reason`` describes the error. The connection stays open."""
    CONNECTED = "connected"
    """Link: the hub answered WELCOME (attached). Send again whatever was not acknowledged."""
    DISCONNECTED = "disconnected"
    """Link: the hub was silent too long. The link reconnects by itself and sends HELLO again."""


@dataclass(frozen=True, slots=True)
class Event:
    """An event that ``receive`` yields. ``peer`` is the name the peer gave in HELLO (always ``"hub"`` on a link)."""

    kind: EventKind
    peer: str
    message: WireMessage | None = None
    reason: str = ""
    fault: MessageFault | None = None
    """Set for CORRUPT."""


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
    address: str

    def open(self) -> None:
        """Bind. Raises :class:`ConfigurationError`."""

    def receive(self) -> tuple[bytes, list[Buffer] | WireError] | None:
        """The next ``(connection, [kind, header, frame …])``, with the error instead where what came is no message;
        or None."""

    def identity(self, connection: bytes) -> str | None:
        """Name of the peer that the connection's key belongs to; None where only this user can connect."""

    def send(self, connection: bytes, frames: Sequence[Buffer]) -> bool:
        """False when the queue of the connection is full. Raises :class:`PeerGone` when there is no such connection."""

    async def wait(self, event: anyio.Event) -> None:
        """Until ``event`` (of ``signal``) or until something may have become due."""

    async def close(self) -> None: ...


class LinkWire(Protocol):
    """The connecting side: one connection at a time, a fresh one after each loss."""

    signal: Broadcast
    address: str
    lost: str | None
    """Reason of a dead connection, as soon as the wire knows; None while it holds."""
    hopeless: str | None
    """Reason for which no other attempt can succeed (the hub refuses our keys); None where one may."""

    def connect(self) -> None: ...

    def disconnect(self) -> None:
        """Forget the connection and all that is queued on it."""

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
    """Base of hub and link: an async context manager whose tasks live exactly as long as the ``async with``
    block, and a mailbox of what they received.

    An exception of the block leaves unchanged (not wrapped in a group); a crash of one of our tasks cancels the block
    and leaves as an exception group.
    """

    _what: ClassVar[str]

    def __init__(
        self, wire: HubWire | LinkWire, limits: Limits, silence_seconds_max: float, heartbeat_seconds: float
    ) -> None:
        self._close = wire.close
        self._limits = limits
        self._silence_seconds_max = silence_seconds_max
        self._heartbeat_seconds = heartbeat_seconds
        self._silence = Silence(heartbeat_seconds, silence_seconds_max)
        self._mailbox = Mailbox(limits.queue_messages_max, limits.message_bytes_max)
        self._deaf = False
        self._sends = 0
        self._group: TaskGroup | None = None

    async def receive(self) -> Event:
        """The next event. Raises :class:`TransportClosed` after this end was closed."""
        return await self._mailbox.get()

    async def _enter(self, *tasks: Callable[[], Coroutine[Any, Any, None]]) -> None:
        self._group = anyio.create_task_group()
        await self._group.__aenter__()
        for task in tasks:
            self._group.start_soon(task)

    async def __aexit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        """Part within a bounded time, end the tasks, close the wire."""
        self._mailbox.close(f"the {self._what} was closed", discard=True)
        group, self._group = self._group, None
        assert group is not None
        crashed = isinstance(error, anyio.get_cancelled_exc_class()) and group.cancel_scope.cancel_called
        try:
            if not crashed:
                with anyio.CancelScope(shield=True):
                    await self._say_bye()
            group.cancel_scope.cancel()
            if isinstance(error, anyio.get_cancelled_exc_class()):
                await group.__aexit__(type(error), error, error.__traceback__)
            else:
                await group.__aexit__(None, None, None)
        finally:
            with anyio.CancelScope(shield=True):
                await self._close()

    async def _say_bye(self) -> None:
        raise NotImplementedError


_KINDS = {kind.value.encode(): kind for kind in Kind}


def encode_message(message: WireMessage, limits: Limits = DEFAULT_LIMITS) -> list[Buffer]:
    """``[kind, header, frame …]`` for one multipart send. Raises :class:`LimitExceeded`."""
    header = orjson.dumps(message.header, option=orjson.OPT_SERIALIZE_NUMPY)
    frames: list[Buffer] = [message.kind.value.encode(), header, *message.frames]
    check_limits(frames, limits)
    for frame in message.frames:
        if type(frame) is memoryview and not frame.c_contiguous:
            raise WireError("expected frames of contiguous memory, got a strided view: make it contiguous first")
    return frames


def decode_message(frames: Sequence[Buffer], limits: Limits = DEFAULT_LIMITS) -> WireMessage:
    """The inverse. Raises :class:`WireError` that says which part is not understood, :class:`LimitExceeded` for
    size."""
    if len(frames) < 2:
        raise WireError(f"expected a message of at least 2 frames (kind, header), got {len(frames)}")
    check_limits(frames, limits)
    kind = _KINDS.get(bytes(frames[0][:32]))
    if kind is None:
        raise WireError(f"expected one of the message kinds {[k.value for k in Kind]}, got {bytes(frames[0][:32])!r}")
    return WireMessage(kind, json_object(frames[1], "message header"), tuple(frames[2:]))
