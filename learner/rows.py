"""From complete groups to training rows: one row per branch of a trajectory, arrays aligned by position.

A branch is a sequence that the engine saw. Context, and whatever an earlier branch sampled, is never trained.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from learner.advantages import group_advantages
from learner.assembly import Group
from pipeline.config.training import AdvantageConfig
from pipeline.errors import TrainingError
from pipeline.schema import FlatTokens, Trajectory


@dataclass(frozen=True, slots=True)
class Row:
    """One branch with at least one sampled token. All arrays have the row's length T.

    Raises :class:`TrainingError` when lengths disagree: they are never padded or cut.
    """

    trajectory_id: str
    sequence: int
    """Number of the trajectory in its batch: branches of one trajectory share it."""
    environment: str
    token_ids: npt.NDArray[np.int32]
    loss_mask: npt.NDArray[np.bool_]
    behaviour_logprobs: npt.NDArray[np.float32]
    """log μ, nats; meaningless where ``loss_mask`` is False."""
    policy_versions: npt.NDArray[np.int32]
    temperatures: npt.NDArray[np.float32]
    """Temperature that each token's turn was sampled with."""
    advantage: float
    replayed: bool = False
    """Taken from the pool: ``replay_mask`` is ``loss_mask`` on this row."""
    guided: bool = False
    """Its prompt held retrieved experience."""

    def __post_init__(self) -> None:
        n = len(self.token_ids)
        for name in ("loss_mask", "behaviour_logprobs", "policy_versions", "temperatures"):
            came = len(getattr(self, name))
            if came != n:
                raise TrainingError(
                    f"expected {name} of {self.trajectory_id} to have {n} entries (one per token), got {came}"
                )
        if n and self.loss_mask[0]:
            raise TrainingError(f"expected {self.trajectory_id} to start with context, got a sampled first token")
        if not self.loss_mask.any():
            raise TrainingError(f"expected {self.trajectory_id} to have a sampled token in the branch, got none")
        if not (self.temperatures[self.loss_mask] > 0).all():
            raise TrainingError(
                f"expected {self.trajectory_id} to be sampled with a temperature > 0, got greedy tokens"
            )

    def __len__(self) -> int:
        return len(self.token_ids)

    @property
    def n_sampled(self) -> int:
        return int(self.loss_mask.sum())


@dataclass(frozen=True, slots=True)
class Batch:
    """What one update is made of."""

    update: int
    groups: tuple[Group, ...]
    rows: tuple[Row, ...]

    @property
    def trajectories(self) -> list[Trajectory]:
        return [t for group in self.groups for t in group.trajectories]

    @property
    def n_sampled(self) -> int:
        return sum(row.n_sampled for row in self.rows)


def build_batch(update: int, groups: Sequence[Group], config: AdvantageConfig) -> Batch:
    """Rows of the groups, in the order of groups, trajectories and branches. Raises :class:`TrainingError`."""
    rows: list[Row] = []
    sequence = 0
    for group in groups:
        advantages = group_advantages([_reward(t) for t in group.trajectories], config)
        for trajectory, advantage in zip(group.trajectories, advantages, strict=True):
            replayed = group.replayed(trajectory)
            rows += trajectory_rows(trajectory, sequence, float(advantage), replayed=replayed)
            sequence += 1
    return Batch(update, tuple(groups), tuple(rows))


def trajectory_rows(trajectory: Trajectory, sequence: int, advantage: float, *, replayed: bool = False) -> list[Row]:
    """One row per branch that sampled something."""
    temperatures = np.asarray([turn.temperature for turn in trajectory.turns], dtype=np.float32)
    return [
        Row(
            trajectory_id=trajectory.trajectory_id,
            sequence=sequence,
            environment=trajectory.task.environment,
            token_ids=tokens.token_ids,
            loss_mask=tokens.loss_mask,
            behaviour_logprobs=tokens.behaviour_logprobs,
            policy_versions=tokens.policy_versions,
            temperatures=temperatures[tokens.turn_index],
            advantage=advantage,
            replayed=replayed,
        )
        for tokens in map(_trimmed, trajectory.branches())
        if len(tokens)
    ]


def _trimmed(tokens: FlatTokens) -> FlatTokens:
    """Without the context after the last sampled token: nothing is predicted from it."""
    sampled = np.flatnonzero(tokens.loss_mask)
    stop = int(sampled[-1]) + 1 if len(sampled) else 0
    if stop == len(tokens):
        return tokens
    return FlatTokens(
        tokens.token_ids[:stop],
        tokens.loss_mask[:stop],
        tokens.behaviour_logprobs[:stop],
        tokens.policy_versions[:stop],
        tokens.turn_index[:stop],
    )


def _reward(trajectory: Trajectory) -> float:
    if trajectory.reward is None:
        raise TrainingError(
            f"expected a reward on {trajectory.trajectory_id}, got None: only scored groups are dispatched"
        )
    return trajectory.reward
