"""What the stage's state machines share: the groups in memory, the rule, the journal, the clock."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field

from pipeline.config import RunConfig
from pipeline.schema import Task
from pipeline.stage.staleness import StalenessLedger
from pipeline.store.journal import Journal
from pipeline.store.payloads import PayloadRefCounts
from pipeline.store.records import GroupRecord, OrderKey, OrderRecord, OrderState, TrajectoryRecord

log = logging.getLogger("afterplay.replay")


@dataclass(slots=True)
class StageState:
    """Mutable and owned by the core; every duty class works on the same one."""

    config: RunConfig
    batches: StalenessLedger
    journal: Journal
    payloads: PayloadRefCounts
    groups: dict[int, GroupRecord] = field(default_factory=dict)
    """Open groups, and ended ones until a checkpoint covers them."""
    next_group: int = 0
    next_seq: int = 0
    policy_version: int = -1
    """Newest published version; -1 before the first."""
    now: float = 0.0
    """Monotonic clock of this process, seconds."""
    wall: float = 0.0
    """Unix seconds, at the same moment."""
    stopped: list[OrderRecord] = field(default_factory=list)
    """Orders that ended here and that actors must still be told of; the core empties it."""

    @property
    def oldest_version(self) -> int | None:
        """Oldest policy version that sampled a trajectory of an open group."""
        slots = (slot for group in self.groups.values() if group.open for slot in group.slots)
        return min((slot.trajectory.facts.version_min for slot in slots if slot.trajectory is not None), default=None)

    def end_order(self, order: OrderRecord, state: OrderState, reason: str = "", *, failure: bool = False) -> None:
        """Move a leased order into a terminal state and free its slot."""
        assert order.state is OrderState.LEASED, order
        order.state, order.reason, order.failure, order.ended_at = state, reason, failure, self.wall
        slot = self.groups[order.key.group].place(order.key.slot)
        slot.leased = False
        slot.failures += failure
        self.journal.order(order)
        self.journal.count(f"orders.{state.value}")
        self.journal.count("orders.in_flight", -1)

    def find_order(self, key: OrderKey) -> OrderRecord | None:
        group = self.groups.get(key.group)
        return group.orders.get(key) if group else None

    def find_trajectory(self, trajectory_id: str) -> TrajectoryRecord | None:
        """The trajectory that a group in memory holds under this id."""
        key = OrderKey.parse(trajectory_id)
        group = self.groups.get(key.group) if key else None
        if key is None or group is None or key.slot >= len(group.slots):
            return None
        record = group.slots[key.slot].trajectory
        return record if record is not None and record.key == key else None


def task_header(task: Task) -> dict[str, object]:
    return {"task_id": task.task_id, "environment": task.environment, "seed": task.seed, "payload": dict(task.payload)}
