"""One look at the bytes of an arriving trajectory: is it one, is it the one that was ordered, what is in it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pipeline.codec import decode_trajectory
from pipeline.errors import LimitExceeded, SchemaError, VersionMismatch, WireError
from pipeline.replay.records import Drop, Facts, OrderKey, group_id
from pipeline.schema import Task, Trajectory, TrajectoryStatus
from pipeline.transport.base import Buffer, Limits


@dataclass(frozen=True, slots=True)
class Arrival:
    """A trajectory that was understood. ``drop`` says why it cannot be trained, if it cannot."""

    trajectory: Trajectory
    facts: Facts
    drop: Drop | None = None


@dataclass(frozen=True, slots=True)
class Unreadable:
    """Bytes that are not the trajectory that was ordered."""

    drop: Drop
    reason: str


def examine(frames: Sequence[Buffer], limits: Limits, key: OrderKey, task: Task) -> Arrival | Unreadable:
    """Decode and validate once; arrays stay views on ``frames``."""
    try:
        trajectory = decode_trajectory(frames, limits)
    except (SchemaError, VersionMismatch) as error:
        return Unreadable(Drop.SCHEMA, str(error))
    except (WireError, LimitExceeded) as error:
        return Unreadable(Drop.CORRUPT, str(error))
    expected = (key.text, group_id(key.group), task.task_id)
    came = (trajectory.trajectory_id, trajectory.group_id, trajectory.task.task_id)
    if came != expected:
        return Unreadable(Drop.CORRUPT, f"expected trajectory, group and task {expected}, got {came}")
    return Arrival(trajectory, _facts(trajectory, frames), _unfit(trajectory))


def _facts(trajectory: Trajectory, frames: Sequence[Buffer]) -> Facts:
    versions = trajectory.version_range() or (-1, -1)
    failure = trajectory.failure
    return Facts(
        status=trajectory.status.value,
        n_turns=len(trajectory.turns),
        n_tokens=trajectory.n_tokens,
        n_sampled=trajectory.n_sampled,
        version_min=versions[0],
        version_max=versions[1],
        duration_seconds=trajectory.timings.duration_seconds,
        actor=trajectory.actor_id,
        n_bytes=sum(len(f) if isinstance(f, bytes) else f.nbytes for f in frames),
        failure={
            "boundary": failure.boundary,
            "kind": failure.kind,
            "message": failure.message,
            "details": failure.details,
        }
        if failure
        else None,
    )


def _unfit(trajectory: Trajectory) -> Drop | None:
    if trajectory.status is TrajectoryStatus.ABORTED:
        return Drop.ABORTED
    return None if trajectory.usable else Drop.FAILED
