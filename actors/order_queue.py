"""The orders of an actor, from arrival to answer. Pure; plays nothing.

An order is *waiting* until there is a place, then *playing* until it is answered or cancelled; each leaves exactly
once.
"""

from __future__ import annotations

from collections import OrderedDict

from pipeline.schema import Order


class OrderQueue:
    """At most ``places`` orders are played at once; others wait in the order of their arrival."""

    def __init__(self, places: int) -> None:
        self._places = places
        self._waiting: OrderedDict[str, Order] = OrderedDict()
        self._playing: dict[str, Order] = {}

    def __contains__(self, order_id: object) -> bool:
        return order_id in self._waiting or order_id in self._playing

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    @property
    def playing(self) -> int:
        return len(self._playing)

    @property
    def ids(self) -> list[str]:
        return [*self._playing, *self._waiting]

    def accept(self, order: Order) -> bool:
        """Queue it; False for an order that is here already (sent twice around a reconnection)."""
        if order.order_id in self:
            return False
        self._waiting[order.order_id] = order
        return True

    def begin(self) -> Order | None:
        """The next order to play, which is playing from here on; None when none waits or no place is free."""
        if not self._waiting or len(self._playing) >= self._places:
            return None
        order_id, order = self._waiting.popitem(last=False)
        self._playing[order_id] = order
        return order

    def withdraw(self, order_id: str) -> Order | None:
        """Take back an order that is still waiting."""
        return self._waiting.pop(order_id, None)

    def finish(self, order_id: str) -> None:
        """It is no longer played. Raises KeyError for an order that was not."""
        del self._playing[order_id]

    def withdraw_all(self) -> list[Order]:
        """Take back everything that is still waiting."""
        orders = list(self._waiting.values())
        self._waiting.clear()
        return orders
