"""Connection between groups and the replay pool: plans groups with stored candidates, saves fresh successes.

*consumes* admissions, finished and cancelled groups, the learner's reports; *produces* planned groups with pinned
candidates, rows and counts of the pool. The pool itself (:mod:`pipeline.replay`) knows no groups, payloads or rows.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pipeline.errors import WireError
from pipeline.replay.replay import Replay
from pipeline.schema.counters import Count
from pipeline.schema.orders import WHOLE_MAX, whole
from pipeline.stage.group_records import SharedState, StagePart
from pipeline.store.records import GroupRecord
from pipeline.store.replay_records import Candidate, Planned, PoolEntry
from pipeline.tasks.sampler import TaskSampler

ESS_OF = ("all", "fresh", "replay", "carried")


@dataclass(frozen=True, slots=True)
class UpdateReport:
    """The optional part of CONSUMED (docs/PROTOCOL.md), checked before anything changes."""

    replayed: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Ids of the replays that were trained, by group id."""
    ess: Mapping[str, float | None] = field(default_factory=lambda: dict.fromkeys(ESS_OF))
    """Kish effective sample size of pi/mu over recorded tokens, as a share: ``all``, ``fresh``, ``replay``.
    ``carried``: what the guard of the replay share goes by, that of ``replay`` times min(1, mean ratio), over tokens or
    trajectories as ``replay.ess_guard.level`` says."""
    entropies: Mapping[str, float] = field(default_factory=dict)
    """Mean exact entropy over sampled tokens, nats, by trajectory id."""
    choice_failed: int = 0
    """Groups for which the learner could not choose and took the stage's choice."""
    policy_version: int | None = None
    """Version of the weights that the update was made from; None: not reported."""

    @classmethod
    def read(cls, header: Mapping[str, Any], version_max: int = WHOLE_MAX) -> UpdateReport:
        """Raises :class:`WireError` for values of the wrong kind or beyond ``version_max``; numbers that are not finite
        count as unknown."""
        try:
            replayed = {str(g): tuple(map(str, ids)) for g, ids in (header.get("replayed") or {}).items()}
            ess = {key: _finite((header.get("ess") or {}).get(key)) for key in ESS_OF}
            entropies = {
                str(t): value for t, v in (header.get("entropy") or {}).items() if (value := _finite(v)) is not None
            }
            told = header.get("policy_version") is not None
            version = whole(header, "policy_version", 0, version_max) if told else None
            failed = whole(header, "choice_failed", default=0)
            return cls(replayed, ess, entropies, failed, version)
        except (TypeError, ValueError, AttributeError) as error:
            raise WireError(f"invalid report of an update from the learner: {error}") from error


class ReplayGroups(StagePart):
    """Plans replay groups and saves successes. A trajectory's terminal state does not depend on the pool."""

    def __init__(self, shared: SharedState, replay: Replay, sampler: TaskSampler) -> None:
        super().__init__(shared)
        self._sampler = sampler
        self.replay = replay
        """Replayed tokens among the sampled tokens that the last update trained."""
        self._dropped_counts = [0, 0]
        """Successes and fresh rollouts of groups that were dropped since the last update; a restart forgets them."""

    def next(self) -> Planned:
        """The group to admit now."""
        progress = self._staleness.consumed / max(1, self._config.run.total_steps)
        planned = self.replay.next_group(self._sampler, progress=progress, version=self._staleness.policy_version)
        self._journal.meta("sampler", self._sampler.state())
        return planned

    def pin(self, group: GroupRecord, candidates: Iterable[Candidate], k: int) -> None:
        """``group`` is completed with ``k`` of the candidates: they stay until it was trained for good."""
        group.k, group.replays = k, list(candidates)
        for replay in group.replays:
            self._payloads.hold(replay.entry.row_id)
        if group.replays:
            self._journal.replays(group)
            self._journal.count(Count.REPLAYS_PLANNED, k)

    def finished(self, group: GroupRecord) -> None:
        """All fresh rollouts of ``group`` are scored: difficulty, retirement, pool."""
        records = {slot.trajectory.row_id: slot.trajectory for slot in group.slots if slot.trajectory is not None}
        fresh = [record.pool_entry(group.task) for record in records.values()]
        outcome = self.replay.finished(group.task, fresh, version=self._staleness.policy_version)
        for entry in outcome.saved:
            record = records[entry.row_id]
            record.saved = entry.saved
            self._journal.trajectory(record)
            self._payloads.hold(entry.row_id)
            self._journal.count(Count.POOL_SAVED)
            self._audit("stored", entry, entry.age(self._staleness.policy_version))
        self._journal.count(Count.TASKS_RETIRED, int(outcome.retired))
        self._journal.count(Count.TASKS_RETURNED, int(outcome.returned))

    def trained(self, update: int, groups: Sequence[GroupRecord], report: UpdateReport, version: int) -> None:
        """``update`` was made from ``groups``, which are marked as trained already, and from weights of ``version``."""
        row_ids = {}
        for group in groups:
            self._choose(group, report.replayed.get(group.group_id, ()), version)
            row_ids.update({record.key.text: record.row_id for slot in group.slots if (record := slot.trajectory)})
            row_ids.update({replay.entry.trajectory_id: replay.entry.row_id for replay in group.replays})
        used = [replay.entry.row_id for group in groups for replay in group.replays if replay.chosen]
        self._journal.count(Count.REPLAYS_CHOICE_FAILED, report.choice_failed)
        factor = self.replay.factor
        self.replay.consumed(
            update=update,
            used=used,
            ess=report.ess,
            entropies={row_ids[t]: value for t, value in report.entropies.items() if t in row_ids},
            version=version,
            solve_rate=self._solve_rate(groups),
        )
        if self.replay.factor != factor:
            self._journal.count(Count.GUARD_SHRINK if self.replay.factor < factor else Count.GUARD_RECOVER)
        for group in groups:
            self._store(group)

    def _choose(self, group: GroupRecord, chosen: Sequence[str], version: int) -> None:
        """Mark what was trained, and put it first in that order: what the learner says, or the stage's own choice."""
        if not group.replays:
            return
        stored = {replay.entry.trajectory_id for replay in group.replays}
        ids = list(dict.fromkeys(chosen))
        if len(ids) != group.k or not stored.issuperset(ids):
            if chosen:
                self._journal.count(Count.LEARNER_REPLAYED_UNKNOWN)
            ids = [replay.entry.trajectory_id for replay in group.replays[: group.k]]
        order = {trajectory_id: i for i, trajectory_id in enumerate(ids)}
        group.replays.sort(key=lambda replay: order.get(replay.entry.trajectory_id, len(order)))
        for replay in group.replays:
            replay.chosen = replay.entry.trajectory_id in ids
            if replay.chosen:
                replay.age = replay.entry.age(version)
                self._journal.count(Count.REPLAYS_TRAINED)
                self._audit("replayed", replay.entry, replay.age)
        self._journal.replays(group)

    def _store(self, group: GroupRecord) -> None:
        """``group`` was trained: it may come back whole. One whose update is made again was stored the first time, and
        has its uses."""
        records = [slot.trajectory for slot in group.slots if slot.trajectory is not None]
        if group.replays or group.dropped or len(records) < group.n_rollout:
            return
        if all(record.saved is not None for record in records):  # the pool alone never has all: it takes no failures
            return
        fresh = [record.pool_entry(group.task) for record in records]
        stored = self.replay.trained(group.group_number, group.task, fresh)
        if stored is not None:
            for record in records:
                record.saved = stored.saved
                self._journal.trajectory(record)
                self._payloads.hold(record.row_id)
            self._journal.count(Count.STORED_GROUPS_SAVED)

    def _solve_rate(self, groups: Sequence[GroupRecord]) -> float | None:
        """Share of successes among all fresh rollouts of ``groups`` and of those dropped since the update before."""
        counts = [self._successes(group) for group in groups] + [(self._dropped_counts[0], self._dropped_counts[1])]
        self._dropped_counts = [0, 0]
        n = sum(count for _, count in counts)
        return sum(successes for successes, _ in counts) / n if n else None

    def published(self) -> None:
        """A new policy version is live."""
        self.replay.age_to(self._staleness.policy_version)

    def unpin(self, group: GroupRecord) -> None:
        """``group`` will never be trained (again)."""
        if group.dropped:
            return
        for replay in group.replays:
            self._payloads.release(replay.entry.row_id, replay.entry.n_bytes)

    def dropped(self, group: GroupRecord) -> None:
        """``group`` is finished and will not be trained, but stays assigned to an update."""
        self.unpin(group)
        self.count_dropped(group)

    def count_dropped(self, group: GroupRecord) -> None:
        """The fresh rollouts of ``group`` count in the success rate of the next update although they are not in it."""
        successes, n = self._successes(group)
        self._dropped_counts = [self._dropped_counts[0] + successes, self._dropped_counts[1] + n]

    def cancelled(self, group: GroupRecord, *, finished: bool) -> None:
        """``group`` was given up; ``finished``: after all its fresh rollouts were scored."""
        self.unpin(group)
        if not finished and group.task.environment in self._config.environments:
            self.replay.cancelled(group.task)

    def untrained(self, group: GroupRecord) -> None:
        """The learner went back to weights without ``group``, and makes its update again: with the choice that was
        made then, so its other candidates are not sent."""
        if not group.replays:
            return
        self._journal.count(Count.REPLAYS_TRAINED, -group.k)
        self._journal.count(Count.REPLAYS_ROLLED_BACK, group.k)
        others, group.replays = group.replays[group.k :], group.replays[: group.k]
        for replay in others:
            self._payloads.release(replay.entry.row_id, replay.entry.n_bytes)
        for replay in group.replays:
            replay.chosen = False
        self._journal.replays(group)

    def sent(self, replay: Candidate) -> dict[str, Any]:
        """The part of a DELIVERY header that tells a replayed trajectory from a fresh one."""
        entry = replay.entry
        replay.age = entry.age(self._staleness.policy_version)
        record = self._records.find_trajectory(entry.trajectory_id)
        if record is not None and record.row_id == entry.row_id:  # its own group is in memory
            record.samples += 1
            self._journal.trajectory(record)
        else:
            self._journal.sampled(entry.row_id)
        return {
            "weight": replay.weight,
            "entropy": entry.entropy,
            "age": replay.age,
            "entropy_age": entry.entropy_age(self._staleness.policy_version),
            "success_rate": entry.success_rate,
        }

    def record(self) -> None:
        """Hand what changed in the pool since the last call to the journal."""
        changes = self.replay.take_changes()
        if changes:
            for entry, reason in changes.removed:
                self._payloads.release(entry.row_id, entry.n_bytes)
                self._journal.count(Count(f"pool.evicted.{reason}"))
            for group, reason in changes.removed_groups:
                for entry in group.members:
                    self._payloads.release(entry.row_id, entry.n_bytes)
                self._journal.count(Count(f"stored_groups.evicted.{reason}"))
            self._journal.replay_changes(changes)

    def _successes(self, group: GroupRecord) -> tuple[int, int]:
        """Successes among its fresh rollouts, and how many these are."""
        threshold = self._config.replay.success_threshold
        rewards = [slot.trajectory.reward for slot in group.slots if slot.trajectory is not None]
        return sum(r is not None and r >= threshold for r in rewards), len(rewards)

    def _audit(self, population: str, entry: PoolEntry, age: int) -> None:
        self._journal.audit(population, reward=entry.reward, tokens=entry.n_sampled,
                            duration_seconds=entry.duration_seconds, age_versions=age)  # fmt: skip


def _finite(value: Any) -> float | None:
    number = math.nan if value is None else float(value)
    return number if math.isfinite(number) else None
