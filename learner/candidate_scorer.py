"""Scoring of the stored trajectories that the next update may train, while the learner waits for its groups.

*consumes* the complete groups of the next update without taking them; *produces* the entropies that the choice is made
from (:mod:`learner.data.replay_choice`), with the weights that the update starts from; *waits for* the next complete
group; *unblocked by* its delivery, or the last group of the update. A pass is of one micro-batch for each rank, so the
update begins at most that much later.
"""

from __future__ import annotations

from collections.abc import Callable

import anyio.to_thread

from learner.data.groups import Group
from learner.data.replay_choice import CandidateScores, Scorer, scores_candidates, within_tokens
from learner.session import LearnerSession
from pipeline.config.replay import ReplayConfig


class CandidateScorer:
    """``free`` says whether the device may be used now; ``tokens``: of a pass."""

    def __init__(
        self,
        session: LearnerSession,
        config: ReplayConfig,
        mean_entropies: Scorer,
        tokens: int,
        free: Callable[[], bool],
    ) -> None:
        self._session = session
        self._config = config
        self._mean_entropies = mean_entropies
        self._tokens = tokens
        self._free = free
        self._scores = CandidateScores()

    def scores(self, update: int) -> CandidateScores:
        """Measured with the weights that ``update`` starts from."""
        if self._scores.update != update:
            self._scores = CandidateScores(update)
        return self._scores

    async def run(self, update: int) -> None:
        """Score candidates of ``update`` until cancelled; a pass under way ends first."""
        if not scores_candidates(self._config):
            return
        scores = self.scores(update)
        groups: tuple[Group, ...] = ()
        n_complete = 0
        while True:
            if (complete := self._session.group_progress(update).complete) != n_complete:
                groups, n_complete = self._session.complete(update), complete
            unscored = scores.unscored(groups) if self._free() else []
            if unscored:
                part = list(within_tokens(unscored, self._tokens)) or unscored[:1]
                await anyio.to_thread.run_sync(scores.score, part, self._mean_entropies)
            else:
                await self._session.changed()
