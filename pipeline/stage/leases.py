"""Leases of orders to actors: issue, expiry, and recovery when an actor leaves or returns.

*consumes* actors coming and going, answers, the clock; *produces* ORDER and CANCEL messages and lost orders. Free
slots of actors go first to rollouts of held-out tasks, in their share, then to those that training needs.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from pipeline.schema import Order
from pipeline.schema.counters import Count
from pipeline.schema.orders import encode_request
from pipeline.stage.evaluation_schedule import Evaluations
from pipeline.stage.group_records import SharedState, StagePart
from pipeline.stage.groups import Groups
from pipeline.stage.replay_groups import ReplayGroups
from pipeline.store.effects import Send
from pipeline.store.records import GroupRecord, OrderKey, OrderRecord, OrderState
from pipeline.transport.messages import Kind

LEASE_MARGIN_SECONDS = 30.0
"""An order's deadline is 1.5 times its ``seconds_max`` plus this: for queueing, sending and scoring."""


@dataclass(slots=True)
class Actor:
    """An actor that is connected, or was until ``down_since``. One that has answered an order keeps its orders for a
    while when its connection is lost; another may be nobody who plays."""

    name: str
    slots: int
    """Orders that it takes; fewer than it has, when it has lowered the number."""
    down_since: float | None = None
    leases: dict[OrderKey, OrderRecord] = field(default_factory=dict)
    answered: bool = False

    @property
    def free(self) -> int:
        return 0 if self.down_since is not None else self.slots - len(self.leases)


class Leases(StagePart):
    """An actor never has more orders than slots; every order ends, at the latest by the clock."""

    def __init__(self, shared: SharedState, groups: Groups) -> None:
        super().__init__(shared)
        self._groups = groups
        self.actors: dict[str, Actor] = {}
        self._deadlines: list[tuple[float, OrderKey]] = []

    @property
    def in_flight(self) -> int:
        return sum(len(actor.leases) for actor in self.actors.values())

    @property
    def connected(self) -> int:
        """Actors that are up."""
        return sum(actor.down_since is None for actor in self.actors.values())

    def restore(self) -> None:
        """After a restart of the stage every actor is down until it says HELLO."""
        for group in self._records.values():
            for order in group.orders.values():
                if order.state is OrderState.LEASED:
                    actor = self.actors.setdefault(
                        order.actor, Actor(order.actor, 0, down_since=self._clock.now, answered=True)
                    )
                    self._lease(actor, order)

    def up(self, name: str, slots: int, holding: Sequence[str]) -> None:
        """HELLO: compare what the actor holds with what it should hold."""
        actor = self.actors.setdefault(name, Actor(name, slots))
        actor.slots, actor.down_since = slots, None
        held = {key for text in holding if (key := OrderKey.parse(text)) is not None}
        for key, order in list(actor.leases.items()):
            if key not in held:
                del actor.leases[key]
                self._groups.lost(order, "not held by its actor any more", failure=False)
        unknown = [text for text in holding if not self._wanted(OrderKey.parse(text), actor)]
        if unknown:
            self._journal.effect(Send(name, Kind.CANCEL, {"order_ids": unknown, "reason": "the order has ended"}))

    def down(self, name: str, *, left: bool) -> None:
        """The connection of the actor is lost, or it ``left`` on purpose: then its orders go back at once, as do those
        of an actor that has never answered one."""
        actor = self.actors.get(name)
        if actor is None:
            return
        actor.down_since = self._clock.now
        if left or not actor.answered:
            self._forget(actor, "its actor left" if left else "its actor left before its first answer")

    def issue(self, group: GroupRecord, index: int, actor: Actor, version: int) -> None:
        """Send one order for a slot. ``version``: the oldest that may sample it."""
        slot = group.slot(index)
        key = OrderKey(group.group_number, index, slot.serial)
        section = self._config.evaluation
        order = OrderRecord(key, actor.name, slot.failures, version, self._clock.wall)
        slot.serial += 1
        slot.leased = True
        group.orders[key] = order
        self._lease(actor, order)
        self._journal.order(order)
        self._journal.count(Count.ORDERS_ISSUED)
        self._journal.count(Count.ORDERS_IN_FLIGHT)
        header = encode_request(
            Order(
                key.text,
                group.group_id,
                group.task,
                index,
                slot.failures,
                version,
                self._seconds_max(group),
                greedy=section.greedy if group.evaluation else group.is_greedy(key),
                evaluation=group.evaluation,
                temperature=section.temperature or None if group.evaluation else None,
            )
        )
        self._journal.effect(Send(actor.name, Kind.ORDER, header))

    def answered(self, name: str) -> None:
        """The actor has answered an order with a trajectory."""
        self.actors[name].answered = True

    def ended(self, orders: Iterable[OrderRecord], cancel: str = "") -> None:
        """Forget leases that ended elsewhere; with ``cancel``, tell their actors to stop."""
        by_actor: dict[str, list[str]] = {}
        for order in orders:
            actor = self.actors.get(order.actor)
            known = actor is not None and actor.leases.pop(order.key, None) is not None and actor.down_since is None
            if known and cancel:
                by_actor.setdefault(order.actor, []).append(order.key.text)
        for name, ids in by_actor.items():
            self._journal.effect(Send(name, Kind.CANCEL, {"order_ids": ids, "reason": cancel}))

    def tick(self) -> None:
        """Expire what is over its time."""
        for actor in list(self.actors.values()):
            if (
                actor.down_since is not None
                and self._clock.now - actor.down_since >= self._config.stage.silence_seconds_max
            ):
                self._forget(actor, "its actor is silent")
        late: list[OrderRecord] = []
        while self._deadlines and self._deadlines[0][0] <= self._clock.now:
            _, key = heapq.heappop(self._deadlines)
            order = self._records.find_order(key)
            if order is not None and order.state is OrderState.LEASED:
                late.append(order)
        self.ended(late, cancel="the order was not answered in time")
        for order in late:
            self._groups.lost(order, "not answered in time", failure=True)

    def postpone(self, seconds: float) -> None:
        """No event could be applied for so long, because the disk was full or slow: every order has so much longer."""
        self._deadlines = [(deadline + seconds, key) for deadline, key in self._deadlines]

    def next_deadline(self) -> float | None:
        """Time at which :meth:`tick` has something to do, on the clock of ``now``."""
        times = [self._deadlines[0][0]] if self._deadlines else []
        silence = self._config.stage.silence_seconds_max
        times += [actor.down_since + silence for actor in self.actors.values() if actor.down_since is not None]
        return min(times, default=None)

    def _lease(self, actor: Actor, order: OrderRecord) -> None:
        seconds = self._seconds_max(self._records[order.key.group])
        order.deadline = self._clock.now + 1.5 * seconds + LEASE_MARGIN_SECONDS
        actor.leases[order.key] = order
        heapq.heappush(self._deadlines, (order.deadline, order.key))

    def _wanted(self, key: OrderKey | None, actor: Actor) -> bool:
        """True if the actor should continue it: its lease, or answered and waiting to be acknowledged."""
        if key is None:
            return False
        order = self._records.find_order(key)
        if order is None:
            return False
        return key in actor.leases or order.state in (OrderState.DELIVERED, OrderState.FAILED, OrderState.ABORTED)

    def _forget(self, actor: Actor, reason: str) -> None:
        del self.actors[actor.name]
        for order in actor.leases.values():
            self._groups.lost(order, reason, failure=False)

    def _seconds_max(self, group: GroupRecord) -> float:
        section = self._config.environments.get(group.task.environment)
        return section.max_seconds if section is not None else 600.0


class OrderDispatch(StagePart):
    """*consumes* pending slots, new groups and free actors; *produces* leases."""

    def __init__(
        self, shared: SharedState, leases: Leases, groups: Groups, replays: ReplayGroups, evaluations: Evaluations
    ) -> None:
        super().__init__(shared)
        self._leases, self._groups, self._replays, self._evaluations = leases, groups, replays, evaluations

    def order(self) -> None:
        """Issue orders to free actors: pending slots first, then new groups as far as admission allows."""
        if self._staleness.policy_version < 0:
            return
        free = [(-actor.free, actor.name) for actor in self._leases.actors.values() if actor.free > 0]
        heapq.heapify(free)
        self._order_evaluation(free)
        if self._staleness.finished or self._evaluations.only:
            return
        while free:
            pending = self._groups.next_slot()
            if pending is None:
                if self._staleness.capacity() < 1 or self._groups.backoff.holds(self._clock.now) or self._groups.paused:
                    break
                self._groups.plan(self._replays.next())
                continue
            self._give(free, *pending, self._staleness.policy_version)
        if self._evaluations.holds_back(self._staleness.consumed):
            self._order_evaluation(free, share=False)

    def _order_evaluation(self, free: list[tuple[int, str]], *, share: bool = True) -> None:
        """Evaluation comes first, in its ``share`` of the slots; without ``share`` it takes all that are free."""
        evaluations = self._evaluations
        if evaluations.active is None:
            return
        slots = sum(actor.slots for actor in self._leases.actors.values() if actor.down_since is None)
        room = (evaluations.capacity(slots) if share else slots) - evaluations.rollouts.in_flight
        while free and room > 0 and (wanted := evaluations.take()) is not None:
            self._give(free, *wanted, evaluations.policy_version())
            room -= 1

    def _give(self, free: list[tuple[int, str]], group: GroupRecord, index: int, version: int) -> None:
        """Issue an order to the actor with the most free slots."""
        name = free[0][1]
        actor = self._leases.actors[name]
        self._leases.issue(group, index, actor, version)
        heapq.heapreplace(free, (-actor.free, name)) if actor.free else heapq.heappop(free)
