"""A group that is complete: its plan, its trajectories, and what the stage says of those from its pool."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from pipeline.errors import TrainingError
from pipeline.schema import GroupPlan, Trajectory


@dataclass(frozen=True, slots=True)
class StoredRollout:
    """Facts of one trajectory from the pool, as DELIVERY tells them.

    Raises :class:`TrainingError` for a weight or turn that cannot be.
    """

    weight: float = 1.0
    """Multiplies the loss of its tokens; denominators do not change."""
    entropy: float | None = None
    """Stored: mean over sampled tokens, nats."""
    turn: int | None = None
    """The one turn that is trained; None: all."""
    age: int = 0
    """Versions, when it was dispatched."""
    success_rate: float | None = None
    """Of the fresh rollouts of the group it came from."""

    def __post_init__(self) -> None:
        if not (math.isfinite(self.weight) and self.weight >= 0) or (self.turn is not None and self.turn < 0):
            raise TrainingError(f"expected a finite weight >= 0 and a turn >= 0 of a replayed trajectory, got {self}")

    @classmethod
    def of(cls, header: Mapping[str, Any] | None) -> StoredRollout:
        """From the ``replay`` part of a DELIVERY header. Raises TypeError or ValueError where it is not understood."""
        if header is None:
            return cls()
        entropy, turn, rate = header.get("entropy"), header.get("turn"), header.get("success_rate")
        return cls(
            weight=float(header.get("weight", 1.0)),
            entropy=None if entropy is None else float(entropy),
            turn=None if turn is None else int(turn),
            age=int(header.get("age", 0)),
            success_rate=None if rate is None else float(rate),
        )


@dataclass(frozen=True, slots=True)
class Group:
    """Scored trajectories of one task: the fresh ones of the plan, then replayed ones.

    As delivered it may hold more replayed ones than are trained; ``with_replays`` settles which.
    """

    plan: GroupPlan
    trajectories: tuple[Trajectory, ...]
    replays: Mapping[str, StoredRollout] = field(default_factory=dict)
    """By trajectory id."""

    @property
    def group_id(self) -> str:
        return self.plan.group_id

    @property
    def k(self) -> int:
        """How many replayed trajectories are trained."""
        return self.plan.n_rollout - self.plan.n_fresh

    @property
    def settled(self) -> bool:
        """Whether it holds exactly what is trained."""
        return len(self.trajectories) == self.plan.n_rollout

    @property
    def fresh(self) -> tuple[Trajectory, ...]:
        return tuple(t for t in self.trajectories if not self.replayed(t))

    @property
    def candidates(self) -> tuple[Trajectory, ...]:
        """Those from the pool, in the order of the plan: best first by stored entropy."""
        return tuple(t for t in self.trajectories if self.replayed(t))

    def replayed(self, trajectory: Trajectory) -> bool:
        """Whether the plan took this trajectory from the pool."""
        name = trajectory.trajectory_id
        return name in self.plan.replay_ids or name in self.plan.candidates

    def replay(self, trajectory: Trajectory) -> StoredRollout:
        """Facts of a replayed trajectory."""
        return self.replays.get(trajectory.trajectory_id) or StoredRollout()

    def with_replays(self, chosen: Iterable[str]) -> Group:
        """The group with just these of its candidates. Raises :class:`TrainingError` when there are not ``k`` of
        them."""
        names = tuple(chosen)
        held = {t.trajectory_id: t for t in self.candidates}
        if len(set(names)) != self.k or not set(names) <= set(held):
            raise TrainingError(f"expected {self.k} of the candidates {sorted(held)} of {self.group_id}, got {names}")
        return Group(self.plan, (*self.fresh, *(held[name] for name in names)), self.replays)

    def as_stored(self) -> Group:
        """The group with the replays that the stage chose by stored entropy."""
        return self if self.settled else self.with_replays(self.plan.replay_ids)
