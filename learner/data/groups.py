"""Complete groups: the plan, its trajectories, and facts of those from the experience pool."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from pipeline.errors import TrainingError
from pipeline.schema import GroupPlan, Trajectory


@dataclass(frozen=True, slots=True)
class StoredRollout:
    """Facts of one trajectory from the experience pool, as DELIVERY has them.

    Raises :class:`TrainingError` for a weight that cannot be.
    """

    weight: float = 1.0
    """Multiplies the loss of its tokens; denominators do not change."""
    entropy: float | None = None
    """Stored entropy, mean over sampled tokens, nats."""
    entropy_age: int | None = None
    """Versions since it was measured, when it was dispatched."""
    age: int = 0
    """Age in versions when it was dispatched."""
    success_rate: float | None = None
    """Success rate of the fresh rollouts of its first group."""

    def __post_init__(self) -> None:
        if not (math.isfinite(self.weight) and self.weight >= 0):
            raise TrainingError(f"expected a finite weight >= 0 of a replayed trajectory, got {self}")

    @classmethod
    def of(cls, header: Mapping[str, Any] | None) -> StoredRollout:
        """Facts in the ``replay`` part of a DELIVERY header. Raises TypeError or ValueError where it is malformed."""
        if header is None:
            return cls()
        entropy, rate = header.get("entropy"), header.get("success_rate")
        entropy_age = header.get("entropy_age")
        return cls(
            weight=float(header.get("weight", 1.0)),
            entropy=None if entropy is None else float(entropy),
            entropy_age=None if entropy_age is None else int(entropy_age),
            age=int(header.get("age", 0)),
            success_rate=None if rate is None else float(rate),
        )


@dataclass(frozen=True, slots=True)
class Group:
    """Scored trajectories of one task: the fresh ones of the plan, then replayed ones.

    As delivered it may hold more replayed ones than are trained; ``with_replayed`` takes those that are.
    """

    plan: GroupPlan
    trajectories: tuple[Trajectory, ...]
    stored_rollouts: Mapping[str, StoredRollout] = field(default_factory=dict)
    """Facts of the replayed ones, by trajectory id."""

    @property
    def group_id(self) -> str:
        return self.plan.group_id

    @property
    def n_replayed(self) -> int:
        """Replayed trajectories that are trained."""
        return self.plan.n_rollout - self.plan.n_fresh

    @property
    def settled(self) -> bool:
        """True where it holds exactly the trajectories that are trained."""
        return len(self.trajectories) == self.plan.n_rollout

    @property
    def fresh(self) -> tuple[Trajectory, ...]:
        return tuple(t for t in self.trajectories if not self.is_replayed(t))

    @property
    def candidates(self) -> tuple[Trajectory, ...]:
        """Trajectories from the pool, in the order of the plan: best first by stored entropy."""
        return tuple(t for t in self.trajectories if self.is_replayed(t))

    def is_replayed(self, trajectory: Trajectory) -> bool:
        """True where the plan took this trajectory from the pool."""
        name = trajectory.trajectory_id
        return name in self.plan.replay_ids or name in self.plan.candidates

    def stored_rollout(self, trajectory: Trajectory) -> StoredRollout:
        """Facts of a replayed trajectory."""
        return self.stored_rollouts.get(trajectory.trajectory_id) or StoredRollout()

    def with_replayed(self, chosen: Iterable[str]) -> Group:
        """The group with just these of its candidates. Raises :class:`TrainingError` when there are not ``n_replayed``
        of them."""
        ids, n = tuple(chosen), self.n_replayed
        candidates = {t.trajectory_id: t for t in self.candidates}
        if len(set(ids)) != n or not set(ids) <= set(candidates):
            raise TrainingError(f"expected {n} of the candidates {sorted(candidates)} of {self.group_id}, got {ids}")
        return Group(self.plan, (*self.fresh, *(candidates[name] for name in ids)), self.stored_rollouts)

    def with_planned_replays(self) -> Group:
        """The group with the trajectories that the stage chose by stored entropy."""
        return self if self.settled else self.with_replayed(self.plan.replay_ids)
