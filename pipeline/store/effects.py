"""Effects of the core of the stage: what the shell around it has to do."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from pipeline.schema import Trajectory
from pipeline.schema.record_file import Frames
from pipeline.store.records import TrajectoryRecord
from pipeline.transport.messages import Kind


@dataclass(slots=True)
class Send:
    """A message for a peer. ``payload`` names the trajectory (by ``row_id``) whose frames go with it."""

    peer: str
    kind: Kind
    header: dict[str, Any]
    payload: int | None = None


@dataclass(slots=True)
class Score:
    """Request to score a stored trajectory (already decoded, unless the stage has just started)."""

    record: TrajectoryRecord
    trajectory: Trajectory | None = None
    members: int = 1
    """Fresh trajectories of its group that have no reward yet, those that are still to come included."""


@dataclass(slots=True)
class GivenUp:
    """A group was cancelled, so a reward function that needs the whole group must not wait for it."""

    group: int


@dataclass(slots=True)
class Finished:
    """A group is complete and scored: lessons may be written from it."""

    group_id: str
    members: tuple[TrajectoryRecord, ...]
    """Its fresh rollouts, with their rewards."""


@dataclass(slots=True)
class UntrainedRollout:
    """A rollout that is not trained but kept for ``afterplay show``: it failed, or belongs to an evaluation."""

    trajectory_id: str
    frames: Frames
    received_at: float
    """Unix seconds."""
    evaluated: bool = False


@dataclass(slots=True)
class Evaluated:
    """An evaluation ended: a line for ``evaluations.jsonl``."""

    result: dict[str, Any]


Effect = Send | Score | GivenUp | Finished | UntrainedRollout | Evaluated
