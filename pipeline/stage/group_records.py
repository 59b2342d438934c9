"""Groups in memory with their orders, and the clock of the stage."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from pipeline.schema.counters import Count
from pipeline.store.journal import Journal
from pipeline.store.records import CoveredGroup, GroupRecord, OrderKey, OrderRecord, OrderState, TrajectoryRecord


@dataclass(slots=True)
class Clock:
    """Time of the events that are being applied; set by :meth:`StageCore.set_time`."""

    now: float = 0.0
    """Monotonic clock of this process, seconds."""
    wall: float = 0.0
    """Unix seconds, at the same moment."""


class GroupRecords(dict[int, GroupRecord]):
    """Open groups, and ended ones until a checkpoint covers them, by number."""

    def __init__(
        self,
        groups: Mapping[int, GroupRecord],
        next_group: int,
        journal: Journal,
        clock: Clock,
        covered: Mapping[int, CoveredGroup],
    ) -> None:
        super().__init__(groups)
        self.covered = dict(covered)
        """Consumed groups that a checkpoint covers, until their rows are rolled up."""
        self.next_group = next_group
        """Number of the next group; all smaller ones have been used."""
        self._journal = journal
        self._clock = clock

    @property
    def oldest_version(self) -> int | None:
        """Oldest policy version that sampled a trajectory of an open group."""
        slots = (slot for group in self.values() if group.open for slot in group.slots)
        return min((slot.trajectory.facts.version_min for slot in slots if slot.trajectory is not None), default=None)

    def take_number(self) -> int:
        """An unused group number."""
        number = self.next_group
        self.next_group += 1
        self._journal.meta("next_group", self.next_group)
        return number

    def end_order(self, order: OrderRecord, state: OrderState, reason: str = "", *, failure: bool = False) -> None:
        """Move a leased order into a terminal state and free its slot."""
        assert order.state is OrderState.LEASED, order
        order.state, order.reason, order.failure, order.ended_at = state, reason, failure, self._clock.wall
        slot = self[order.key.group].slot(order.key.slot)
        slot.leased = False
        slot.failures += failure
        self._journal.order(order)
        self._journal.count(Count(f"orders.{state}"))
        self._journal.count(Count.ORDERS_IN_FLIGHT, -1)

    def find_order(self, key: OrderKey) -> OrderRecord | None:
        group = self.get(key.group)
        return group.orders.get(key) if group else None

    def find_trajectory(self, trajectory_id: str) -> TrajectoryRecord | None:
        """The trajectory that a group in memory holds under this id."""
        key = OrderKey.parse(trajectory_id)
        group = self.get(key.group) if key else None
        if key is None or group is None or key.slot >= len(group.slots):
            return None
        record = group.slots[key.slot].trajectory
        return record if record is not None and record.key == key else None
