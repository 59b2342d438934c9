"""One look at the bytes of an arriving trajectory: is it one, is it the one that was ordered, what is in it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from pipeline.codec import decode_trajectory
from pipeline.errors import LimitExceeded, SchemaError, VersionMismatch, WireError
from pipeline.replay.records import Drop, Facts, OrderKey, group_id
from pipeline.schema import Task, Trajectory, TrajectoryStatus
from pipeline.schema.tokens import NO_VERSION
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
    """Decode and validate once; arrays stay views on ``frames``, laid out as in ``pipeline.codec``."""
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
    facts = facts_of(trajectory, frames)
    return Arrival(trajectory, facts, _unfit(trajectory, facts))


def facts_of(trajectory: Trajectory, frames: Sequence[Buffer]) -> Facts:
    """What the stage keeps in memory of a trajectory and its payload frames."""
    versions = np.frombuffer(frames[3], dtype="<i4")[2::3]
    failure = trajectory.failure
    return Facts(
        status=trajectory.status.value,
        n_turns=len(trajectory.turns),
        n_tokens=_size(frames[1]) // 4,
        n_sampled=_size(frames[2]) // 4,
        version_min=int(versions.min()) if len(versions) else NO_VERSION,
        version_max=int(versions.max()) if len(versions) else NO_VERSION,
        duration_seconds=trajectory.timings.duration_seconds,
        actor=trajectory.actor_id,
        n_bytes=sum(map(_size, frames)),
        failure={
            "boundary": failure.boundary,
            "kind": failure.kind,
            "message": failure.message,
            "details": failure.details,
        }
        if failure
        else None,
        entropy=_entropy(frames[2]) if trajectory.recorded else None,
        replayable=trajectory.recorded and (trajectory.guidance is None or trajectory.guidance.keep),
    )


def _entropy(logprobs: Buffer) -> float | None:
    """``-mean(log mu)`` of float32 log-probabilities, nats: an unbiased estimate of the mean entropy of the
    distributions that the tokens were drawn from. None where there is no finite one."""
    values = np.frombuffer(logprobs, dtype="<f4")
    mean = -float(values.mean(dtype=np.float64)) if len(values) else math.nan
    return mean if math.isfinite(mean) else None


def _unfit(trajectory: Trajectory, facts: Facts) -> Drop | None:
    if trajectory.status is TrajectoryStatus.ABORTED:
        return Drop.ABORTED
    failed = trajectory.status is TrajectoryStatus.ERROR or facts.n_sampled == 0
    return Drop.FAILED if failed else None


def _size(frame: Buffer) -> int:
    return len(frame) if isinstance(frame, bytes) else frame.nbytes
