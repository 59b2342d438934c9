"""What the stage starts from: the rows of the store as records."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import orjson

from pipeline.errors import StoreError
from pipeline.replay.records import (
    Facts,
    GroupRecord,
    GroupState,
    OrderKey,
    OrderRecord,
    OrderState,
    Slot,
    TrajectoryRecord,
    TrajectoryState,
)
from pipeline.schema import Task


@dataclass(slots=True)
class Snapshot:
    """Groups that are open or not covered by a checkpoint, with their orders and held trajectories."""

    groups: dict[int, GroupRecord] = field(default_factory=dict)
    meta: Mapping[str, Any] = field(default_factory=dict)
    counters: dict[str, int] = field(default_factory=dict)
    next_seq: int = 0


def build(
    groups: Iterable[Sequence[Any]],
    orders: Iterable[Sequence[Any]],
    trajectories: Iterable[Sequence[Any]],
    meta: Mapping[str, Any],
    counters: dict[str, int],
    next_seq: int,
) -> Snapshot:
    """Join the rows (columns as in ``journal``). Raises :class:`StoreError` when they do not fit together."""
    try:
        found = {row[0]: _group(row) for row in groups}
        for row in orders:
            order = _order(row)
            group = found[order.key.group]
            group.orders[order.key] = order
            slot = group.slots[order.key.slot]
            slot.serial = max(slot.serial, order.key.serial + 1)
            slot.failures += order.failure
            slot.leased |= order.state is OrderState.LEASED
        for row in trajectories:
            record = _trajectory(row)
            if record.state is not TrajectoryState.DROPPED:
                found[record.key.group].slots[record.key.slot].trajectory = record
    except (KeyError, IndexError, ValueError, TypeError) as error:
        raise StoreError(
            f"the replay store holds rows that do not fit together ({type(error).__name__}: {error}): it was changed "
            "by something else. Move it away to start with an empty one"
        ) from error
    return Snapshot(found, meta, counters, next_seq)


def _group(row: Sequence[Any]) -> GroupRecord:
    number, task, n_rollout, admitted, state, update, late, reason, planned_at, ended_at = row
    header = orjson.loads(task)
    return GroupRecord(
        number=number,
        task=Task(header["task_id"], header["environment"], header["seed"], header["payload"]),
        admitted_update=admitted,
        planned_at=planned_at,
        slots=[Slot() for _ in range(n_rollout)],
        state=GroupState(state),
        update=update,
        late=bool(late),
        reason=reason,
        ended_at=ended_at,
    )


def _order(row: Sequence[Any]) -> OrderRecord:
    number, slot, serial, actor, attempt, policy_version, state, reason, failure, issued_at, ended_at = row
    return OrderRecord(
        OrderKey(number, slot, serial),
        actor,
        attempt,
        policy_version,
        issued_at,
        OrderState(state),
        reason,
        bool(failure),
        ended_at,
    )


def _trajectory(row: Sequence[Any]) -> TrajectoryRecord:
    seq, _, number, slot, serial, state, reason, reward, rewards, samples, received_at, *facts, failure = row
    return TrajectoryRecord(
        seq=seq,
        key=OrderKey(number, slot, serial),
        facts=Facts(*facts, failure=orjson.loads(failure) if failure else None),  # type: ignore[misc]
        received_at=received_at,
        state=TrajectoryState(state),
        reason=reason,
        reward=reward,
        rewards=orjson.loads(rewards),
        samples=samples,
    )
