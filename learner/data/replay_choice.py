"""Choice of the stored trajectories that a group trains, by their entropy under the current policy.

The stage delivers more candidates than are trained where ``replay.entropy`` is ``current``. One pass over all of them
gives their mean entropies, which rank them (ExGRPO, arXiv:2510.02245, takes the lowest). Where that fails, the stage's
own choice by stored entropy is trained, and the group is counted: a failed choice never stops a run.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from learner.data.groups import Group
from learner.data.rows import Row, trajectory_rows
from pipeline.config.replay import ReplayConfig
from pipeline.errors import Interrupted

log = logging.getLogger(__name__)
Scorer = Callable[[Sequence[Row]], Mapping[int, float]]
"""Mean entropy of the sampled tokens, nats, by ``Row.trajectory_index``."""


@dataclass(frozen=True, slots=True)
class ReplayChoice:
    """Groups that hold exactly the trajectories that are trained."""

    groups: tuple[Group, ...]
    failed: frozenset[str] = frozenset()
    """Ids of groups whose candidates could not be scored."""
    scored: int = 0
    """Candidates that were scored."""


def choose_replays(groups: Sequence[Group], config: ReplayConfig, mean_entropies: Scorer) -> ReplayChoice:
    """Every group with its choice made. ``mean_entropies`` is called at most once, with the rows of all candidates.

    Raises only :class:`Interrupted`.
    """
    if not needs_scores(groups, config):
        return ReplayChoice(tuple(group.with_planned_replays() for group in groups))
    open_groups = [group for group in groups if not group.settled]
    rows: list[Row] = []
    indices: dict[tuple[str, str], int] = {}
    failed: dict[str, str] = {}
    for group in open_groups:
        try:
            found = [(t.trajectory_id, trajectory_rows(t, 0, group.stored_rollout(t))) for t in group.candidates]
        except Exception as error:  # a candidate that cannot be scored may still be left out of the stored choice
            failed[group.group_id] = str(error)
            continue
        for name, parts in found:
            index = indices[group.group_id, name] = len(indices)
            rows += [replace(row, trajectory_index=index) for row in parts]
    entropies: Mapping[int, float] = {}
    if rows:
        try:
            entropies = mean_entropies(rows)
        except Interrupted:
            raise
        except Exception as error:
            failed.update({group.group_id: f"{type(error).__name__}: {error}" for group in open_groups})
    settled = []
    for group in groups:
        if group.settled or group.group_id in failed:
            settled.append(group.with_planned_replays())
            continue
        names = [t.trajectory_id for t in group.candidates]
        values = [entropies.get(indices[group.group_id, name]) for name in names]
        if not all(value is not None and math.isfinite(value) for value in values):
            failed[group.group_id] = f"entropies {values}"
            settled.append(group.with_planned_replays())
            continue
        settled.append(group.with_replayed(names[i] for i in ranked(values, config.select)[: group.n_replayed]))
    for name, reason in failed.items():
        log.warning("candidates of %s were not scored (%s): the stored choice is trained", name, reason)
    return ReplayChoice(tuple(settled), frozenset(failed), len(indices))


def needs_scores(groups: Sequence[Group], config: ReplayConfig) -> bool:
    """True where :func:`choose_replays` asks for entropies under the current weights."""
    scored = config.entropy == "current" and config.select != "random"
    return scored and not all(group.settled for group in groups)


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
