"""The contract of every transport: a hub that binds, links that connect, messages that are bounded.

The hub (replay stage) outlives its peers and its peers outlive it: either side may die and come back, and the other
sees ``PEER_UP`` / ``PEER_DOWN`` (hub) or ``CONNECTED`` / ``DISCONNECTED`` (link) as ordinary events in its stream.
Delivery inside one connection is in order and without loss; across a reconnection anything unacknowledged may be lost,
and who cares about it sends it again (``pipeline.transport.outbox``). The receiver's credits bound what may be in
flight.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from pipeline.config import RunConfig

CREDIT_BYTES = 256 * 1024 * 1024
"""Bytes of unacknowledged trajectories that the replay stage grants each actor."""
HEARTBEAT_SECONDS = 1.0
"""Between two heartbeats on an idle connection."""

Buffer = bytes | memoryview
Frames = tuple[Buffer, ...]


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
    ACK = "ack"
    """r → a: trajectory ids that are durable (or refused for ever, with a reason). r → l: the number of the last
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
    RECALL = "recall"
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


@dataclass(frozen=True, slots=True)
class Limits:
    """Explicit bounds of the wire; anything larger is refused with :class:`LimitExceeded` that names the limit."""

    header_bytes_max: int = 4 * 1024 * 1024
    message_bytes_max: int = 256 * 1024 * 1024
    """Bytes of the frames behind the header: a payload that may arrive may also be sent on under another header."""
    frames_max: int = 64
    tokens_max: int = 1_048_576
    """Tokens of one trajectory."""
    queue_messages_max: int = 4096
    """Messages held per direction before senders wait."""

    @classmethod
    def of(cls, config: RunConfig) -> Limits:
        """The limits of a run."""
        return cls(message_bytes_max=config.stage.message_bytes_max, tokens_max=config.stage.tokens_max)


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


@dataclass(slots=True)
class TransportStatistics:
    """Counts of one end, for ``/metrics`` and tests."""

    messages_sent: int = 0
    messages_received: int = 0
    bytes_sent: int = 0
    bytes_received: int = 0
    corrupt: int = 0
    peers: int = 0
    peers_dropped: int = 0
    queued_messages: int = 0


class Hub(Protocol):
    """The side that binds. Use as an async context manager: entering binds, leaving closes within a second."""

    async def __aenter__(self) -> Hub: ...
    async def __aexit__(self, *args: object) -> None: ...

    @property
    def address(self) -> str:
        """Address that links connect to; with port 0 in the configuration, the port that was taken."""
        ...

    def refuse(self, refuses: Callable[[Mapping[str, Any]], str | None]) -> None:
        """Ask ``refuses`` about each HELLO before it may take the place of an older connection: the reason for which it
        is refused for good, or None."""
        ...

    async def receive(self) -> Event:
        """The next event. Raises :class:`TransportClosed` after the hub was closed."""
        ...

    async def send(self, peer: str, message: WireMessage) -> None:
        """Queue for ``peer``; waits while its queue is full. Raises :class:`PeerGone` when it is not connected,
        :class:`LimitExceeded` when the message is too large."""
        ...

    def statistics(self) -> TransportStatistics: ...


class Link(Protocol):
    """The side that connects, under a name that is stable over restarts of the connection."""

    async def __aenter__(self) -> Link: ...
    async def __aexit__(self, *args: object) -> None: ...

    def describe(self, hello: Mapping[str, Any]) -> None:
        """Set the header of the HELLO that is sent on every (re)connection; call it whenever the state changes."""
        ...

    def reconnect(self, reason: str) -> None:
        """Give up the connection and say HELLO on a new one: the two sides disagree on what was said."""
        ...

    async def receive(self) -> Event:
        """The next event. Raises :class:`TransportClosed` after the link was closed."""
        ...

    async def send(self, message: WireMessage) -> None:
        """Queue for the hub; waits while the queue is full. Messages queued while disconnected are dropped at the next
        HELLO: whoever needs them sends them again on CONNECTED. Raises :class:`LimitExceeded`."""
        ...

    def statistics(self) -> TransportStatistics: ...
