"""The orders of an actor, from arrival to answer. Pure.

An order is *waiting* until a slot is free, then *in flight* until it is answered or cancelled; each leaves exactly
once.
"""

from __future__ import annotations

from collections import OrderedDict

from pipeline.schema import Order


class OrderQueue:
    """At most ``slots`` orders are in flight at once; others wait in the order of their arrival."""

    def __init__(self, slots: int) -> None:
        self._slots = slots
        self._waiting: OrderedDict[str, Order] = OrderedDict()
        self._in_flight: dict[str, Order] = {}

    def __contains__(self, order_id: object) -> bool:
        return order_id in self._waiting or order_id in self._in_flight

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    @property
    def in_flight(self) -> int:
        return len(self._in_flight)

    @property
    def ids(self) -> list[str]:
        return [*self._in_flight, *self._waiting]

    def accept(self, order: Order) -> bool:
        """Queue it; False for an order that is here already (sent twice around a reconnection)."""
        if order.order_id in self:
            return False
        self._waiting[order.order_id] = order
        return True

    def begin(self) -> Order | None:
        """The next order, in flight from here on; None when none waits or no slot is free."""
        if not self._waiting or len(self._in_flight) >= self._slots:
            return None
        order_id, order = self._waiting.popitem(last=False)
        self._in_flight[order_id] = order
        return order

    def withdraw(self, order_id: str) -> Order | None:
        """Take back an order that is still waiting."""
        return self._waiting.pop(order_id, None)

    def finish(self, order_id: str) -> None:
        """The order is answered. Raises KeyError for one that was not in flight."""
        del self._in_flight[order_id]

    def withdraw_all(self) -> list[Order]:
        """Take back everything that is still waiting."""
        orders = list(self._waiting.values())
        self._waiting.clear()
        return orders
