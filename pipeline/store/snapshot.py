"""Initial state of the stage: rows of the store joined to records."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import orjson

from pipeline.errors import DamagedFiles
from pipeline.schema import Task
from pipeline.schema.orders import decode_task
from pipeline.store.records import (
    CoveredGroup,
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
from pipeline.store.replay_records import Candidate, PoolEntry, StoredGroup, TaskRecord


@dataclass(slots=True)
class Snapshot:
    """Groups that are open or not covered by a checkpoint, with their orders, held trajectories and replays; the
    pool."""

    groups: dict[int, GroupRecord] = field(default_factory=dict)
    meta: Mapping[str, Any] = field(default_factory=dict)
    counters: dict[str, int] = field(default_factory=dict)
    next_row_id: int = 0
    entries: list[PoolEntry] = field(default_factory=list)
    """The pool, in the order of ``saved``."""
    stored_groups: list[StoredGroup] = field(default_factory=list)
    tasks: list[TaskRecord] = field(default_factory=list)
    covered: dict[int, CoveredGroup] = field(default_factory=dict)
    """Groups that were made to updates, and are covered by a checkpoint."""

    @property
    def transactions_lost(self) -> int:
        """Transactions that the store lacks, because it went back: updates may have been made that it does not know.
        0 once the stage has written what follows from that."""
        return int(self.meta.get("transactions_lost", 0))

    @property
    def rolled_below(self) -> int:
        """Rows of groups with smaller numbers are rolled up into totals."""
        return int(self.meta.get("rolled_below", 0))


_FACTS = "t.reward, t.n_turns, t.n_tokens, t.n_sampled, t.n_bytes, t.version_min, t.version_max, t.duration_seconds"


def _entry_columns(t: str) -> str:
    """Columns of a pool entry in table ``t``, in the order of the fields of :class:`PoolEntry`."""
    marks = f"{t}.entropy, {t}.entropy_version, {t}.success_rate, {t}.recorded"
    return f"{t}.row_id, t.trajectory_id, {t}.saved, {_FACTS}, {marks}"


POOL_COLUMNS = f"p.task_id, {_entry_columns('p')}, p.uses"
REPLAY_COLUMNS = f"r.group_number, r.weight, r.chosen, r.age, {_entry_columns('r')}"
STORED_GROUP_COLUMNS = (
    f"s.group_number, s.task, s.saved, s.uses, t.row_id, t.trajectory_id, -1, {_FACTS}, t.entropy, NULL, "
    "s.success_rate, 1"
)
"""Columns of one member. The members of a group follow one another."""


Rows = Iterable[Sequence[Any]]


def build(
    groups: Rows,
    orders: Rows,
    trajectories: Rows,
    replays: Rows,
    tasks: Rows,
    pool: Rows,
    stored_groups: Rows,
    covered: Rows,
) -> Snapshot:
    """Join the rows of the tables. Raises :class:`DamagedFiles` when they do not fit together."""
    try:
        records = {row[0]: _task_record(*row) for row in tasks}
        task_of = functools.cache(lambda task_id: records[task_id].task)
        pooled = {row[1]: _entry(task_of(row[0]), *row[1:]) for row in pool}
        stored = _stored_groups(stored_groups)
        found = {row[0]: _group(row) for row in groups}
        for row in orders:
            order = _order(row)
            group = found[order.key.group]
            group.orders[order.key] = order
            if order.key.slot == group.greedy_index and group.greedy is None:
                group.greedy = Slot()
            slot = group.slot(order.key.slot)
            slot.serial = max(slot.serial, order.key.serial + 1)
            slot.failures += order.failure
            slot.leased |= order.state is OrderState.LEASED
        for row in trajectories:
            record = _trajectory(row)
            if record.state is not TrajectoryState.DROPPED:
                found[record.key.group].slot(record.key.slot).trajectory = record
        for number, weight, chosen, age, *entry in replays:
            group = found[number]
            candidate = pooled.get(entry[0]) or _entry(group.task, *entry)  # the pool may have let go of it since
            group.replays.append(Candidate(candidate, weight, bool(chosen), age))
    except (KeyError, IndexError, ValueError, TypeError) as error:
        raise DamagedFiles(
            f"the replay store has inconsistent rows ({type(error).__name__}: {error}): it was changed "
            "by something else. Move it away to start with an empty one"
        ) from error
    return Snapshot(
        groups=found,
        entries=list(pooled.values()),
        stored_groups=stored,
        tasks=list(records.values()),
        covered={row[0]: CoveredGroup(*row[1:]) for row in covered},
    )


def _group(row: Sequence[Any]) -> GroupRecord:
    number, task, _, n_fresh, k, admitted, task_index, state, update, late, dropped, reason, planned_at, ended_at = row
    return GroupRecord(
        group_number=number,
        task=decode_task(task),
        admitted_update=admitted,
        task_index=task_index,
        planned_at=planned_at,
        slots=[Slot() for _ in range(n_fresh)],
        state=GroupState(state),
        update=update,
        late=bool(late),
        dropped=bool(dropped),
        reason=reason,
        ended_at=ended_at,
        k=k,
    )


def _task_record(
    task_id: str,
    task: bytes,
    bucket: int | None,
    successes: float,
    failures: float,
    solved: int,
    retired: int,
    visits: int,
    _: int,
) -> TaskRecord:
    return TaskRecord(task_id, task, bucket, successes, failures, solved, retired == 1, visits)


def _entry(task: Task, row_id: int, trajectory_id: str, *columns: Any) -> PoolEntry:
    entry = PoolEntry(row_id, trajectory_id, task, *columns)
    entry.recorded = bool(entry.recorded)
    return entry


def _stored_groups(rows: Rows) -> list[StoredGroup]:
    found: dict[int, StoredGroup] = {}
    for group_number, task, saved, uses, *entry in rows:
        group = found.setdefault(group_number, StoredGroup(group_number, decode_task(task), (), saved, uses))
        group.members += (_entry(group.task, *entry),)
    return list(found.values())


def _order(row: Sequence[Any]) -> OrderRecord:
    group_number, slot, serial, actor, attempt, policy_version, state, reason, failure, issued_at, ended_at, _ = row
    return OrderRecord(
        OrderKey(group_number, slot, serial),
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
    row_id, _, group_number, slot, serial, state, reason, reward, rewards, samples, received_at, *facts = row[:20]
    failure, entropy, replayable, age_insert, saved, _ = row[20:]
    extra = {"entropy": entropy, "replayable": bool(replayable)}
    return TrajectoryRecord(
        row_id=row_id,
        key=OrderKey(group_number, slot, serial),
        facts=Facts(*facts, failure=orjson.loads(failure) if failure else None, **extra),  # type: ignore[misc]
        received_at=received_at,
        state=TrajectoryState(state),
        reason=reason,
        reward=reward,
        rewards=orjson.loads(rewards),
        samples=samples,
        age_insert=age_insert,
        saved=saved,
    )
