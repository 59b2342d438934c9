"""The batch of the next update, built while the present one trains.

*consumes* the complete groups of the next update without taking them: the stage may still cancel or replace them;
*produces* a batch that holds only if just these groups are trained in the end, otherwise it is built anew; *waits for*
the last group of the next update; *unblocked by* its delivery, or the end of the training that it runs beside.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import anyio.to_thread

from learner.data.groups import Group
from learner.data.replay_choice import ReplayChoice, Scorer, choose_replays, needs_scores
from learner.data.rows import Batch, Row, build_batch
from learner.session import LearnerSession
from pipeline.config.replay import ReplayConfig
from pipeline.errors import TrainingError


@dataclass(frozen=True, slots=True)
class PrefetchedBatch:
    """A batch and how it came about."""

    groups: tuple[Group, ...]
    """What it was chosen from."""
    choice: ReplayChoice
    batch: Batch
    choose_seconds: float = 0.0
    build_seconds: float = 0.0

    def made_of(self, update: int, groups: Sequence[Group]) -> bool:
        """Whether it is the batch of ``update`` from these very plans and trajectories."""
        return (
            self.batch.update == update
            and len(groups) == len(self.groups)
            and all(_same(a, b) for a, b in zip(groups, self.groups, strict=True))
        )


def prepare(update: int, groups: tuple[Group, ...], config: ReplayConfig, mean_entropies: Scorer) -> PrefetchedBatch:
    """Choose replays and build the rows. Raises :class:`TrainingError`, or as :func:`choose_replays` does."""
    start = time.perf_counter()
    choice = choose_replays(groups, config, mean_entropies)
    chosen = time.perf_counter()
    batch = build_batch(update, choice.groups)
    return PrefetchedBatch(groups, choice, batch, chosen - start, time.perf_counter() - chosen)


class Prefetcher:
    """Keeps at most one batch ahead."""

    def __init__(self, session: LearnerSession, config: ReplayConfig) -> None:
        self._session = session
        self._config = config
        self._ahead: PrefetchedBatch | None = None

    async def ahead(self, update: int) -> None:
        """Build the batch of ``update`` once its groups are complete, and keep it in place of any other. One that needs
        today's weights is left to :func:`prepare`, as is one that cannot be built. Cancel it at will."""
        groups = await self._session.foreseen(update)
        if needs_scores(groups, self._config):
            return

        def build() -> PrefetchedBatch | None:
            try:
                return prepare(update, groups, self._config, _no_scores)
            except TrainingError:
                return None

        self._ahead = await anyio.to_thread.run_sync(build)

    def take(self, update: int, groups: tuple[Group, ...]) -> PrefetchedBatch | None:
        """The batch of ``update`` from ``groups`` where it was built ahead, its seconds 0: nobody waited."""
        ahead, self._ahead = self._ahead, None
        if ahead is None or not ahead.made_of(update, groups):
            return None
        return PrefetchedBatch(ahead.groups, ahead.choice, ahead.batch)


def _same(a: Group, b: Group) -> bool:
    return (
        a.plan is b.plan
        and a.replays == b.replays
        and len(a.trajectories) == len(b.trajectories)
        and all(x is y for x, y in zip(a.trajectories, b.trajectories, strict=True))
    )


def _no_scores(rows: Sequence[Row]) -> dict[int, float]:
    return {}
