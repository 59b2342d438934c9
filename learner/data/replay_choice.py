"""Choice of the stored trajectories that a group trains, by their entropy under the current policy.

The stage delivers more candidates than are trained where ``replay.entropy`` is ``current``. Their mean entropies rank
them (ExGRPO, arXiv:2510.02245, takes the lowest). They are measured while the learner waits for the other groups of the
update (:mod:`learner.candidate_scorer`), with the weights that the update starts from. What was not measured then is
measured in the update as far as ``replay.scoring_share`` allows, and ranked by its stored entropy beyond that. Where
measuring fails, the stage's own choice is trained, and the group is counted: a failed choice never stops a run.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from learner.data.groups import Group
from learner.data.rows import Row, trajectory_rows
from pipeline.config.replay import ReplayConfig
from pipeline.errors import Interrupted
from pipeline.schema import Trajectory

log = logging.getLogger(__name__)
Scorer = Callable[[Sequence[Row]], Mapping[int, float]]
"""Mean entropy of the sampled tokens, nats, by ``Row.trajectory_index``."""
TRAINING_PASSES = 2
"""Cost of training a token, in scoring passes: 3 where its row has an advantage, 1 where it has none."""
_Unscored = tuple[Group, Trajectory]


@dataclass(frozen=True, slots=True)
class ReplayChoice:
    """Groups that hold exactly the trajectories that are trained."""

    groups: tuple[Group, ...]
    failed: frozenset[str] = frozenset()
    """Ids of groups whose candidates could not be scored."""
    scored: Mapping[str, int] = field(default_factory=dict)
    """Candidates that were scored while ``waiting`` and in the ``update``."""
    entropies: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    """Mean entropies under the current weights, nats, by group and trajectory id: of whole trajectories, chosen or
    not."""


class CandidateScores:
    """Mean entropies of the candidates of one update, with the weights that it starts from."""

    def __init__(self, update: int = 0) -> None:
        self.update = update
        self._entropies: dict[tuple[str, str], float] = {}
        """By group and trajectory; not a number: it could not be measured."""

    def __len__(self) -> int:
        return len(self._entropies)

    def get(self, group: Group, trajectory: Trajectory) -> float | None:
        """None: not measured; not finite: that failed."""
        return self._entropies.get((group.group_id, trajectory.trajectory_id))

    def unscored(self, groups: Iterable[Group]) -> list[_Unscored]:
        """Candidates that a choice lacks: unknown ones first, then those that were measured longest ago."""
        found = [(g, t) for g in groups if not g.settled for t in g.candidates if self.get(g, t) is None]

        def key(pair: _Unscored) -> float:
            stored = pair[0].stored_rollout(pair[1])
            return -math.inf if stored.entropy is None or stored.entropy_age is None else -stored.entropy_age

        return sorted(found, key=key)

    def score(self, unscored: Sequence[_Unscored], mean_entropies: Scorer) -> None:
        """Measure these in one pass. Raises only :class:`Interrupted`."""
        rows: list[Row] = []
        entropies: Mapping[int, float] = {}
        for index, (group, trajectory) in enumerate(unscored):
            try:
                rows += trajectory_rows(trajectory, index, group.stored_rollout(trajectory))
            except Exception as error:  # a candidate that cannot be scored may still be left out of the stored choice
                log.warning("candidate %s cannot be scored: %s", trajectory.trajectory_id, error)
        try:
            entropies = mean_entropies(rows) if rows else entropies
        except Interrupted:
            raise
        except Exception as error:
            log.warning("%d candidates were not scored: %s: %s", len(unscored), type(error).__name__, error)
        for index, (group, trajectory) in enumerate(unscored):
            self._entropies[group.group_id, trajectory.trajectory_id] = entropies.get(index, math.nan)


def choose_replays(
    groups: Sequence[Group], config: ReplayConfig, mean_entropies: Scorer, scores: CandidateScores | None = None
) -> ReplayChoice:
    """Every group with its choice made. ``scores`` has what is measured already; ``mean_entropies`` is called at most
    once for the rest.

    Raises only :class:`Interrupted`.
    """
    if not needs_scores(groups, config):
        return ReplayChoice(tuple(group.with_planned_replays() for group in groups))
    scores = CandidateScores() if scores is None else scores
    waiting = len(scores)
    affordable = list(within_tokens(scores.unscored(groups), _affordable_tokens(groups, config)))
    if affordable:
        scores.score(affordable, mean_entropies)
    settled: list[Group] = []
    failed: set[str] = set()
    entropies: dict[str, dict[str, float]] = {}
    for group in groups:
        if group.settled:
            settled.append(group)
            continue
        measured = [scores.get(group, t) for t in group.candidates]
        stored = [group.stored_rollout(t) for t in group.candidates]
        names = [t.trajectory_id for t in group.candidates]
        if any(value is not None and not math.isfinite(value) for value in measured):
            failed.add(group.group_id)
            log.warning("candidates of %s were not scored (%s): the stored choice is trained", group.group_id, measured)
            settled.append(group.with_planned_replays())
            continue
        entropies[group.group_id] = {
            name: value for name, value in zip(names, measured, strict=True) if value is not None
        }
        known = [facts.entropy if value is None else value for value, facts in zip(measured, stored, strict=True)]
        settled.append(group.with_replayed(names[i] for i in ranked(known, config.select)[: group.n_replayed]))
    counts = {"waiting": waiting, "update": len(affordable)}
    return ReplayChoice(tuple(settled), frozenset(failed), counts, entropies)


def needs_scores(groups: Sequence[Group], config: ReplayConfig) -> bool:
    """True where :func:`choose_replays` asks for entropies under the current weights."""
    return scores_candidates(config) and not all(group.settled for group in groups)


def scores_candidates(config: ReplayConfig) -> bool:
    """True where the choice goes by the entropy under the current weights."""
    return config.entropy == "current" and config.select != "random"


def within_tokens(unscored: Iterable[_Unscored], tokens_max: float) -> Iterable[_Unscored]:
    """The first ones, of at most so many tokens together."""
    for group, trajectory in unscored:
        tokens_max -= trajectory.n_tokens
        if tokens_max < 0:
            return
        yield group, trajectory


def ranked(entropies: Sequence[float | None], select: str) -> list[int]:
    """Indices in order of preference; unknown entropies come last, ties keep their order.

    >>> ranked([0.5, None, 0.2, 0.9], "argmin"), ranked([0.5, None, 0.2, 0.9], "argmax")
    ([2, 0, 3, 1], [3, 0, 2, 1])
    """
    sign = -1.0 if select == "argmax" else 1.0

    def key(index: int) -> tuple[bool, float]:
        value = entropies[index]
        return (True, 0.0) if value is None or not math.isfinite(value) else (False, sign * value)

    return sorted(range(len(entropies)), key=key)


def _affordable_tokens(groups: Sequence[Group], config: ReplayConfig) -> float:
    """Tokens of candidates whose scoring takes at most ``replay.scoring_share`` of the time of an update of these
    groups."""
    if config.scoring_share is None:
        return math.inf
    trained = sum(t.n_tokens for group in groups for t in group.with_planned_replays().trajectories)
    return config.scoring_share * TRAINING_PASSES * trained
