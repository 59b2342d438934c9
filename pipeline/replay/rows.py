"""Records as rows of the store: columns in the order of ``store_file.TABLES``."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import orjson

from pipeline.replay.experience.records import PoolEntry, TaskRecord
from pipeline.replay.records import GroupRecord, OrderRecord, TrajectoryRecord
from pipeline.schema import Task

Row = tuple[Any, ...]


def group_row(g: GroupRecord) -> Row:
    return (
        g.number, task_json(g.task), g.n_rollout, g.n_fresh, g.k, g.rescued, g.admitted_update, g.state.value,
        g.update, g.late, g.reason, g.planned_at, g.ended_at,
    )  # fmt: skip


def replay_rows(g: GroupRecord) -> Iterator[Row]:
    for position, replay in enumerate(g.replays):
        candidate, entry = replay.candidate, replay.candidate.entry
        yield (
            g.number, position, entry.seq, candidate.weight, candidate.turn, replay.chosen, replay.age, entry.saved,
            entry.entropy, entry.success_rate, entry.recorded,
        )  # fmt: skip


def order_row(o: OrderRecord) -> Row:
    return (*o.key, o.actor, o.attempt, o.policy_version, o.state.value, o.reason, o.failure, o.issued_at, o.ended_at)


def trajectory_row(t: TrajectoryRecord, trajectory_id: str | None = None) -> Row:
    """``trajectory_id`` of one that answers no order; None: the id of the order."""
    f = t.facts
    return (
        t.seq, trajectory_id or t.key.text, *t.key, t.state.value, t.reason, t.reward, orjson.dumps(dict(t.rewards)),
        t.samples, t.received_at, f.status, f.n_turns, f.n_tokens, f.n_sampled, f.version_min, f.version_max,
        f.duration_seconds, f.actor, f.n_bytes, orjson.dumps(dict(f.failure)) if f.failure else None, f.entropy,
        f.replayable, t.age_insert, t.saved,
    )  # fmt: skip


def pool_row(e: PoolEntry) -> Row:
    return (e.seq, e.trajectory_id, e.task.task_id, e.saved, e.entropy, e.success_rate, e.recorded, e.uses)


def task_row(t: TaskRecord) -> Row:
    return (
        t.task.task_id, task_json(t.task), t.bucket, t.n_fresh, t.retired, t.visits, orjson.dumps(t.history),
    )  # fmt: skip


def task_json(task: Task) -> bytes:
    return orjson.dumps(
        {"task_id": task.task_id, "environment": task.environment, "seed": task.seed, "payload": dict(task.payload)}
    )
