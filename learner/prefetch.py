"""Prefetching: the batch of the next update is built while the current one trains.

*consumes* the complete groups of the next update without taking them: the stage may still cancel or replace them;
*produces* a batch that is used only if the update trains just these groups, otherwise it is built again; *waits for*
the last group of the next update; *unblocked by* its delivery, or the end of the training that it runs beside.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import anyio.to_thread

from learner.data.groups import Group
from learner.data.replay_choice import CandidateScores, ReplayChoice, Scorer, choose_replays, needs_scores
from learner.data.rows import Batch, Row, build_batch
from learner.session import LearnerSession
from pipeline.config.replay import ReplayConfig
from pipeline.errors import TrainingError


@dataclass(frozen=True, slots=True)
class PrefetchedBatch:
    """A batch, the groups that it was made of, and the seconds that it took."""

    groups: tuple[Group, ...]
    """Before the choice of stored rollouts."""
    choice: ReplayChoice
    batch: Batch
    choose_seconds: float = 0.0
    build_seconds: float = 0.0

    def is_made_of(self, update: int, groups: Sequence[Group]) -> bool:
        """True for the batch of ``update`` from these very plans and trajectories."""
        return (
            self.batch.update == update
            and len(groups) == len(self.groups)
            and all(_same(a, b) for a, b in zip(groups, self.groups, strict=True))
        )


def make_batch(
    update: int,
    groups: tuple[Group, ...],
    config: ReplayConfig,
    mean_entropies: Scorer,
    scores: CandidateScores | None = None,
) -> PrefetchedBatch:
    """Choose stored rollouts, with the ``scores`` that there are, and build the rows. Raises :class:`TrainingError`, or
    as :func:`choose_replays` does."""
    start = time.perf_counter()
    choice = choose_replays(groups, config, mean_entropies, scores)
    chosen = time.perf_counter()
    batch = build_batch(update, choice.groups)
    return PrefetchedBatch(groups, choice, batch, chosen - start, time.perf_counter() - chosen)


class Prefetcher:
    """Holds at most one prefetched batch."""

    def __init__(self, session: LearnerSession, config: ReplayConfig) -> None:
        self._session = session
        self._config = config
        self._prefetched: PrefetchedBatch | None = None

    async def prefetch(self, update: int) -> None:
        """Build the batch of ``update`` once its groups are complete, and hold it in place of any other. One that needs
        the current weights is left to :func:`make_batch`, as is one that cannot be built. Cancel it at will."""
        groups = await self._session.peek(update)
        if needs_scores(groups, self._config):
            return

        def build() -> PrefetchedBatch | None:
            try:
                return make_batch(update, groups, self._config, _no_scores)
            except TrainingError:
                return None

        self._prefetched = await anyio.to_thread.run_sync(build)

    def take(self, update: int, groups: tuple[Group, ...]) -> PrefetchedBatch | None:
        """The prefetched batch of ``update`` from ``groups``, with seconds of 0: nobody waited. None: there is none."""
        prefetched, self._prefetched = self._prefetched, None
        if prefetched is None or not prefetched.is_made_of(update, groups):
            return None
        return PrefetchedBatch(prefetched.groups, prefetched.choice, prefetched.batch)


def _same(a: Group, b: Group) -> bool:
    return (
        a.plan is b.plan
        and a.stored_rollouts == b.stored_rollouts
        and len(a.trajectories) == len(b.trajectories)
        and all(x is y for x, y in zip(a.trajectories, b.trajectories, strict=True))
    )


def _no_scores(rows: Sequence[Row]) -> dict[int, float]:
    return {}
