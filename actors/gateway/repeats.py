"""Finds out which requests of a session are one request that was sent again. A pure state machine: no task, no socket,
no clock.

Requests are equal if they have the same route, the same body and the same ``Idempotency-Key``. An equal request is a
repeat until the first answer was delivered; after that only if it has a count of retries (which the clients of OpenAI
and Anthropic send) or an ``Idempotency-Key``. An answer is delivered when its last byte was written to a
connection that was still up, or when a later call continues it. The newest of equal requests is the one that is
repeated.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import sha256
from typing import Any, Generic, TypeVar


@dataclass(frozen=True, slots=True)
class Sent:
    """Identity of a request as it was sent."""

    identity: bytes
    retried: bool
    """The client says that it may have sent the request before."""


def sent(route: str, headers: Mapping[str, str], body: bytes) -> Sent:
    """``headers`` with names in any case, as a case-insensitive mapping."""
    name, count = headers.get("Idempotency-Key", ""), headers.get("X-Stainless-Retry-Count", "")
    identity = sha256(b"\0".join((route.encode(), name.encode("utf-8", "surrogateescape"), body))).digest()
    return Sent(identity, bool(name) or (count.isdecimal() and int(count[:9]) > 0))


@dataclass(slots=True, eq=False, kw_only=True)
class Delivery:
    """The state of one answer on its way to the program."""

    told: tuple[tuple[Any, ...], ...] = ()
    """Beginnings of calls that continue a reply of the answer (:attr:`ProgramCall.whole`), until it is delivered."""
    delivered: bool = False

    def deliver(self) -> None:
        """The program has the answer."""
        self.delivered, self.told = True, ()


D = TypeVar("D", bound=Delivery)


class Repeats(Generic[D]):
    """The requests of one session."""

    def __init__(self) -> None:
        self._newest: dict[bytes, D] = {}
        self.undelivered: list[D] = []
        """Requests whose program does not have the answer, with some that have been delivered since."""

    def find(self, sent: Sent) -> D | None:
        """The request that ``sent`` repeats; None where it is a new one."""
        found = self._newest.get(sent.identity)
        return None if found is None or (found.delivered and not sent.retried) else found

    def begin(self, sent: Sent, delivery: D) -> None:
        """A new request."""
        self.undelivered = [other for other in self.undelivered if not other.delivered]
        self.undelivered.append(delivery)
        self._newest[sent.identity] = delivery

    def refused(self, sent: Sent) -> None:
        """A new request was not taken: where it is sent again, it is no repeat of an older one."""
        self._newest.pop(sent.identity, None)

    def forget(self, delivery: D) -> None:
        """Remove a request without an answer: an equal one is new."""
        self._newest = {identity: other for identity, other in self._newest.items() if other is not delivery}
        self.undelivered = [other for other in self.undelivered if other is not delivery]

    def continued(self, whole: tuple[Any, ...]) -> None:
        """A call came whose prompt is ``whole``: the program has the answers that it continues."""
        for delivery in self.undelivered:
            if any(whole[: len(told)] == told for told in delivery.told):
                delivery.deliver()
