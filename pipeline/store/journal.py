"""Collects the rows that a round of events changed, its counters, and the messages to send once the rows are durable.

Rows have the columns of ``pipeline.store.tables.TABLES``, in that order, without the digest.

Payloads of stored trajectories: reference counts, which free unused ones, and a cache of the newest.
"""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import orjson

from pipeline.schema.counters import FAILED, FALLEN, INSERTED, SUCCEEDED, Count
from pipeline.schema.orders import task_header
from pipeline.schema.record_file import Frames, n_bytes
from pipeline.store.effects import Effect, Send
from pipeline.store.ledger import FAILURES
from pipeline.store.records import GroupRecord, GroupState, OrderRecord, TrajectoryRecord, TrajectoryState
from pipeline.store.replay_records import PoolEntry, ReplayChanges, StoredGroup, TaskRecord
from pipeline.transport.messages import Kind

CAUSES_MAX = 20
"""Most causes that are counted for one environment; the others are counted together."""

OTHER_CAUSE = "other"

Row = tuple[Any, ...]


def group_row(g: GroupRecord) -> Row:
    return (
        g.group_number, orjson.dumps(task_header(g.task)), g.n_rollout, g.n_fresh, g.k, g.admitted_update,
        g.task_index, g.state.value, g.update, g.late, g.dropped, g.reason, g.planned_at, g.ended_at, True,
    )  # fmt: skip


def replay_rows(g: GroupRecord) -> Iterator[Row]:
    for position, replay in enumerate(g.replays):
        entry = replay.entry
        yield (
            g.group_number, position, entry.row_id, replay.weight, replay.chosen, replay.age,
            entry.saved, entry.entropy, entry.entropy_version, entry.success_rate, entry.recorded,
        )  # fmt: skip


def order_row(o: OrderRecord) -> Row:
    return (*o.key, o.actor, o.attempt, o.policy_version, o.state.value, o.reason, o.failure, o.issued_at, o.ended_at)


def trajectory_row(t: TrajectoryRecord, trajectory_id: str | None = None) -> Row:
    """``trajectory_id`` of one that answers no order; None: the id of the order."""
    f = t.facts
    return (
        t.row_id, trajectory_id or t.key.text, *t.key, t.state.value, t.reason, t.reward, orjson.dumps(dict(t.rewards)),
        t.samples, t.received_at, f.status, f.n_turns, f.n_tokens, f.n_sampled, f.version_min, f.version_max,
        f.duration_seconds, f.actor, f.n_bytes, orjson.dumps(dict(f.failure)) if f.failure else None, f.entropy,
        f.replayable, t.age_insert, t.saved,
    )  # fmt: skip


def pool_row(e: PoolEntry) -> Row:
    return (
        e.row_id, e.trajectory_id, e.task.task_id, e.saved, e.entropy, e.entropy_version, e.success_rate, e.recorded,
        e.uses,
    )  # fmt: skip


def stored_group_row(g: StoredGroup) -> Row:
    members = orjson.dumps([entry.row_id for entry in g.members]).decode()
    return (g.group_number, orjson.dumps(task_header(g.task)), members, g.members[0].success_rate, g.saved, g.uses)


def task_row(t: TaskRecord) -> Row:
    return (
        t.task_id, t.encoded_task, t.bucket, t.successes, t.failures, t.solved, t.retired, t.visits,
    )  # fmt: skip


@dataclass(slots=True)
class Changes:
    """Rows of one transaction, copied so that the core may continue while they are written."""

    groups: list[Row] = field(default_factory=list)
    replays: list[Row] = field(default_factory=list)
    orders: list[Row] = field(default_factory=list)
    trajectories: list[Row] = field(default_factory=list)
    sampled: list[int] = field(default_factory=list)
    """``row_id`` of stored trajectories that were sent to the learner, other than by their own group."""
    payloads: dict[int, Frames] = field(default_factory=dict)
    forgotten_payloads: list[int] = field(default_factory=list)
    forgotten_groups: list[int] = field(default_factory=list)
    lost_groups: list[int] = field(default_factory=list)
    """Forgotten groups that were trained, and that no weights have any more."""
    pool: list[Row] = field(default_factory=list)
    evicted_pool: list[int] = field(default_factory=list)
    stored_groups: list[Row] = field(default_factory=list)
    evicted_stored_groups: list[int] = field(default_factory=list)
    tasks: list[Row] = field(default_factory=list)
    forgotten_tasks: list[str] = field(default_factory=list)
    meta: dict[str, Any] = field(default_factory=dict)
    counters: dict[str, int] = field(default_factory=dict)
    shrink: bool = False
    """Give all free pages back to the file system."""

    @property
    def n_bytes(self) -> int:
        """Bytes of the payloads, which are most of what is written."""
        return sum(n_bytes(frame) for frames in self.payloads.values() for frame in frames)

    def __bool__(self) -> bool:
        return any(getattr(self, name) for name in self.__dataclass_fields__)


class Journal:
    """Collects changes, effects, counters and observations while the core applies events."""

    def __init__(self, counters: dict[str, int] | None = None, messages: Mapping[str, str] | None = None) -> None:
        self.counters: Counter[str] = Counter(counters or {})
        """The ledger: values of :class:`Count`, and trajectories stored by environment."""
        self.messages = dict(messages or {})
        """The newest message of each counter of failures."""
        self._observations: defaultdict[tuple[str, ...], list[float]] = defaultdict(list)
        self._begin()

    def _begin(self) -> None:
        """Nothing has changed yet in this round."""
        self._changes = Changes()
        self._groups: dict[int, GroupRecord] = {}
        self._replays: dict[int, GroupRecord] = {}
        self._orders: dict[int, OrderRecord] = {}
        self._trajectories: dict[int, TrajectoryRecord] = {}
        self._counted: set[str] = set()
        self._effects: list[Effect] = []
        self._acks: defaultdict[str, tuple[list[str], dict[str, str]]] = defaultdict(lambda: ([], {}))

    def count(self, counter: Count, amount: int = 1) -> None:
        self._count(counter._value_, amount)  # ``value`` is a descriptor in Python, ten times as slow
        if amount < 0 and counter.metrics:
            self._count(f"{FALLEN}{counter._value_}", -amount)

    def inserted(self, environment: str) -> None:
        """Count a trajectory of ``environment`` that was stored."""
        self._count(f"{INSERTED}{environment}", 1)

    def succeeded(self, environment: str) -> None:
        """Count a rollout of ``environment`` that has a reward."""
        self._count(f"{SUCCEEDED}{environment}", 1)

    def failed(self, environment: str, cause: str, message: str = "") -> None:
        """Count a rollout of ``environment`` that failed for ``cause``; ``message`` has the details."""
        name = f"{FAILED}{environment}/{cause[:100]}"
        if name not in self.counters:
            known = sum(counter.startswith(f"{FAILED}{environment}/") for counter in self.counters)
            name = name if known < CAUSES_MAX else f"{FAILED}{environment}/{OTHER_CAUSE}"
        self._count(name, 1)
        self.messages[name] = message
        self.meta(FAILURES, self.messages)

    def _count(self, name: str, amount: int) -> None:
        if amount:
            self.counters[name] += amount
            self._counted.add(name)

    def group(self, group: GroupRecord) -> None:
        self._groups[group.group_number] = group

    def replays(self, group: GroupRecord) -> None:
        """The replays of ``group`` were decided, sent or trained."""
        self._replays[group.group_number] = group

    def order(self, order: OrderRecord) -> None:
        self._orders[id(order)] = order

    def trajectory(self, trajectory: TrajectoryRecord, frames: Frames | None = None) -> None:
        self._trajectories[trajectory.row_id] = trajectory
        if frames is not None:
            self._changes.payloads[trajectory.row_id] = frames

    def imported(self, trajectory: TrajectoryRecord, trajectory_id: str, frames: Frames) -> None:
        """A trajectory that answers no order."""
        self._changes.trajectories.append(trajectory_row(trajectory, trajectory_id))
        self._changes.payloads[trajectory.row_id] = frames

    def sampled(self, row_id: int) -> None:
        """A stored trajectory whose own group is not in memory was sent to the learner."""
        self._changes.sampled.append(row_id)

    def replay_changes(self, changes: ReplayChanges) -> None:
        """Rows of the pool that changed; at most once in each round."""
        rows = self._changes
        rows.pool = [pool_row(entry) for entry in changes.entries]
        rows.evicted_pool = [entry.row_id for entry, _ in changes.removed]
        rows.stored_groups = [stored_group_row(group) for group in changes.groups]
        rows.evicted_stored_groups = [group.group_number for group, _ in changes.removed_groups]
        rows.tasks, rows.forgotten_tasks = [task_row(task) for task in changes.tasks], changes.forgotten_tasks
        if changes.state is not None:
            self.meta("replay", changes.state)
        if changes.updates is not None:
            self.meta("replay_updates", changes.updates)

    def forget_payload(self, row_id: int) -> None:
        if self._changes.payloads.pop(row_id, None) is None:
            self._changes.forgotten_payloads.append(row_id)

    def shrink(self) -> None:
        """Payloads were forgotten to make room on the disk."""
        self._changes.shrink = True

    def forget_group(self, number: int) -> None:
        """The group leaves memory: it is not loaded when the stage starts again."""
        self._changes.forgotten_groups.append(number)

    def lose_group(self, number: int) -> None:
        """Cancel a forgotten group that no weights have any more, in its rows."""
        self._changes.lost_groups.append(number)

    def meta(self, key: str, value: Any) -> None:
        self._changes.meta[key] = value

    def observe(self, metric: str, value: float, label: str = "") -> None:
        """A value for a histogram of :class:`~pipeline.stage.metrics.ReplayMetrics`, and the value of its label."""
        self._observations[(metric, label) if label else (metric,)].append(value)

    def audit(self, population: str, **values: float) -> None:
        """Values of a rollout for the audit of selection bias: ``tokens``, ``duration_seconds``, ``reward``,
        ``age_versions``."""
        for name, value in values.items():
            self.observe(f"audit_{name}", value, population)

    def take_observations(self) -> dict[tuple[str, ...], list[float]]:
        """Values since the last call, by metric and label."""
        taken, self._observations = self._observations, defaultdict(list)
        return taken

    def effect(self, effect: Effect) -> None:
        self._effects.append(effect)

    def ack(self, actor: str, trajectory_id: str) -> None:
        self._acks[actor][0].append(trajectory_id)

    def refuse(self, actor: str, trajectory_id: str, reason: str) -> None:
        self._acks[actor][1][trajectory_id] = reason

    def collect(self) -> tuple[Changes, list[Effect]]:
        """Everything since the last call; acknowledgements come first, one message per actor."""
        changes = self._changes
        changes.groups = [group_row(g) for g in self._groups.values()]
        changes.replays = [row for g in self._replays.values() for row in replay_rows(g)]
        changes.orders = [order_row(o) for o in self._orders.values()]
        changes.trajectories += [trajectory_row(t) for t in self._trajectories.values()]
        changes.counters = {name: self.counters[name] for name in self._counted}
        effects: list[Effect] = [
            Send(actor, Kind.ACK, {"trajectory_ids": ids, "refused": refused})
            for actor, (ids, refused) in self._acks.items()
        ]
        effects += self._effects
        self._begin()
        return changes, effects


_FREED = (TrajectoryState.BASELINE, TrajectoryState.EVALUATED)


class PayloadRefCounts:
    """Counts holders of a payload by ``row_id``: its own group, the pool, the stored group that it is in, and every
    group that may replay it."""

    def __init__(self, journal: Journal) -> None:
        self._journal = journal
        self.holders: dict[int, int] = {}
        """Number of holders of each payload; one without is not kept."""

    def restore(
        self, groups: Iterable[GroupRecord], entries: Iterable[PoolEntry], stored: Iterable[StoredGroup] = ()
    ) -> None:
        """Count again after a restart."""
        for group in groups:
            for slot in group.all_slots:
                if slot.trajectory is not None and slot.trajectory.state not in _FREED:
                    self._hold(slot.trajectory.row_id)
            if group.state is not GroupState.CANCELLED and not group.dropped:
                for replay in group.replays:
                    self._hold(replay.entry.row_id)
        for entry in itertools.chain(entries, *(group.members for group in stored)):
            self._hold(entry.row_id)

    def arrived(self, row_id: int, n_bytes: int) -> None:
        """A new payload, with its first holder."""
        self._hold(row_id)
        self._journal.count(Count.PAYLOAD_BYTES, n_bytes)

    def hold(self, row_id: int) -> None:
        """One more holder of a payload. Raises :class:`KeyError` for an unknown one."""
        self.holders[row_id] += 1

    def release(self, row_id: int, n_bytes: int) -> None:
        """One holder less."""
        self.holders[row_id] -= 1
        if self.holders[row_id] == 0:
            del self.holders[row_id]
            self._journal.forget_payload(row_id)
            self._journal.count(Count.PAYLOAD_BYTES, -n_bytes)

    def _hold(self, row_id: int) -> None:
        self.holders[row_id] = self.holders.get(row_id, 0) + 1
