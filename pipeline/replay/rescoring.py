"""Whether the stored rewards of pooled trajectories are what the run's score functions say today. Changes nothing.

The stored reward is the one that is trained; a disagreement tells that a score function was changed, depends on
something outside the trajectory, or is not deterministic. The environment's own score is taken as it was recorded.
"""

from __future__ import annotations

import math
import random
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import anyio

from pipeline.codec import decode_trajectory
from pipeline.config import RunConfig
from pipeline.errors import AfterplayError, ConfigurationError, StoreError
from pipeline.replay.reading import pooled_rewards, pooled_seqs, reading
from pipeline.schema import Trajectory
from pipeline.scorer.scorer import Scorer
from pipeline.transport.base import Limits

TOLERANCE = 1e-6
"""Rewards that differ by no more than this, or by this share of the stored one, agree."""


@dataclass(frozen=True, slots=True)
class Disagreement:
    """One trajectory that is not scored as it was."""

    trajectory_id: str
    task_id: str
    stored: float
    reward: float | None
    """What it is today; None: it cannot be scored any more."""
    reason: str = ""
    """Why it cannot, as ``function: reason``."""


@dataclass(frozen=True, slots=True)
class Rescored:
    """What came of it."""

    pooled: int
    """Trajectories in the pool."""
    checked: int
    different: tuple[Disagreement, ...] = ()
    """Scored otherwise, largest difference first."""
    unscored: tuple[Disagreement, ...] = ()
    """Not scored at all."""

    @property
    def agreed(self) -> int:
        return self.checked - len(self.different) - len(self.unscored)

    def json(self) -> dict[str, Any]:
        """For machines."""
        return {**asdict(self), "agreed": self.agreed}


def rescore(config: RunConfig, path: Path, n: int) -> Rescored:
    """Score ``n`` trajectories of the pool anew (all where there are fewer), drawn by ``run.seed``: the same pool
    gives the same ones. A run may be using the store.

    Raises :class:`StoreError` for a store that is missing, not ours or holds what is no trajectory,
    :class:`ConfigurationError` where a path leads to no score function, or one must see whole groups.
    """
    if config.scorer.by_group:
        raise ConfigurationError(
            "expected score functions that see one trajectory or any batch, got one with per: group: what a pool holds "
            "of a group is not all of it, so it cannot be scored again"
        )
    scorer = Scorer(config.scorer)
    limits = Limits(tokens_max=config.transport.tokens_max)
    pooled, chosen = _read(path, n, random.Random(f"{config.run.seed}/rescore"), limits)
    verdicts: dict[int, tuple[float | None, str]] = {}

    async def one(position: int, trajectory: Trajectory) -> None:
        verdict = await scorer.score(trajectory)
        verdicts[position] = verdict.reward, "; ".join(f"{f.name}: {f.reason}" for f in verdict.failures)

    async def every() -> None:
        async with scorer, anyio.create_task_group() as tasks:
            for position, (trajectory, _) in enumerate(chosen):
                tasks.start_soon(one, position, trajectory)

    anyio.run(every)
    different, unscored = [], []
    for position, (trajectory, stored) in enumerate(chosen):
        reward, reason = verdicts[position]
        found = Disagreement(trajectory.trajectory_id, trajectory.task.task_id, stored, reward, reason)
        if reward is None:
            unscored.append(found)
        elif not math.isclose(reward, stored, rel_tol=TOLERANCE, abs_tol=TOLERANCE):
            different.append(found)
    different.sort(key=lambda d: -abs((d.reward or 0.0) - d.stored))
    return Rescored(pooled, len(chosen), tuple(different), tuple(unscored))


def _read(path: Path, n: int, rng: random.Random, limits: Limits) -> tuple[int, list[tuple[Trajectory, float]]]:
    """How many are pooled, and the chosen ones with their stored rewards."""
    chosen = []
    with reading(path) as connection:
        held = pooled_seqs(connection)
        for reward, frames in pooled_rewards(connection, sorted(rng.sample(held, min(n, len(held))))):
            try:
                chosen.append((decode_trajectory(frames, limits), reward))
            except AfterplayError as error:
                raise StoreError(f"{path} holds a trajectory that is not understood: {error}") from error
    return len(held), chosen
