"""Bytes that the connections of a hub hold: received by ZeroMQ, and not in a message that the hub has read.

ZeroMQ shows a message when its last frame has come, and keeps the frames before that without a bound. So the owner of a
key could fill the memory with one message that never ends. Linux tells how many bytes came on a connection; those of
the messages that were read are counted here, and the difference is held. Pure: it owns no socket.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from pipeline.transport.protocol import Buffer, Limits

_FRAME_BYTES = 42
"""CURVE adds 33 bytes to a frame, ZMTP 9 to what has more than 255 bytes."""
_SHORT_BYTES_MAX = 255 - 33
_SHORT_SAVES_BYTES = 7
_HEADER_BYTES = 1024
"""More than the header of a message that waits; headers are not part of the credit."""


def wire_bytes(frames: Sequence[Buffer]) -> int:
    """Bytes that a message takes on a connection with CURVE."""
    sizes = [len(frame) for frame in frames]
    short = sum([size <= _SHORT_BYTES_MAX for size in sizes])
    return sum(sizes) + _FRAME_BYTES * len(sizes) - _SHORT_SAVES_BYTES * short


def budget_bytes(limits: Limits) -> int:
    """Bytes that the connections of one key may hold together.

    A peer that keeps to its credit never holds more, however long the stage reads nothing: what is not acknowledged,
    its frames and headers as far as ZeroMQ queues them, one message on its way, and one of control messages.
    """
    message = limits.message_bytes_max + limits.header_bytes_max
    queued = limits.queue_messages_max * (_HEADER_BYTES + _FRAME_BYTES * limits.frames_max)
    return limits.credit_bytes + queued + 2 * message


@dataclass(slots=True, eq=False)
class Account:
    """A connection from when it is accepted until it is closed."""

    descriptor: int
    connection: bytes = b""
    """As the hub knows it; empty before its first message."""
    owner: str = ""
    """Name of its key; empty before its first message."""
    number: int = 0
    """Connections are numbered in the order of their handshakes."""
    read: int = 0
    """Bytes of the messages that the hub has read."""
    cut: bool = False


class HeldBytes:
    """Accounts of the open connections.

    The file descriptor of a closed connection may at once be another's, while messages of the closed one still wait to
    be read. They are never taken from the account of the later one; at worst they are added to what it has delivered,
    until its own first message is read.
    """

    def __init__(self, budget: int) -> None:
        self.budget = budget
        self._open: dict[int, Account] = {}
        self._known: dict[bytes, Account] = {}
        self.account = self._known.get
        """The account of a connection that has brought a message; None for others."""

    def opened(self, descriptor: int) -> None:
        """A connection was accepted."""
        self.closed(descriptor)
        self._open[descriptor] = Account(descriptor)

    def closed(self, descriptor: int) -> None:
        account = self._open.pop(descriptor, None)
        if account is not None:
            self._known.pop(account.connection, None)

    def first(self, connection: bytes, owner: str, number: int, descriptor: int) -> Account | None:
        """A connection brings its first message. Report all that opened and closed earlier before it.

        None where the connection is closed already.
        """
        account = self._open.get(descriptor)
        if account is None or number < account.number:
            return None
        self._known.pop(account.connection, None)
        account.connection, account.owner, account.number, account.read = connection, owner, number, 0
        self._known[connection] = account
        return account

    def excess(self, received: Callable[[int], int | None]) -> list[tuple[Account, int]]:
        """Connections to cut, with what each holds, so that those of no key hold more than the budget together; the
        largest first. Connections whose key is not known yet share one budget.

        ``received``: bytes that ZeroMQ has received on a descriptor; None where that is unknown.
        """
        held: dict[str, list[tuple[int, Account]]] = defaultdict(list)
        for account in self._open.values():
            if not account.cut and (n_bytes := received(account.descriptor)) is not None:
                held[account.owner].append((n_bytes - account.read, account))
        found = []
        for owned in held.values():
            total = sum(n_bytes for n_bytes, _ in owned if n_bytes > 0)
            if total <= self.budget:
                continue
            for n_bytes, account in sorted(owned, key=lambda pair: -pair[0]):
                if total <= self.budget:
                    break
                account.cut = True
                found.append((account, n_bytes))
                total -= n_bytes
        return found
