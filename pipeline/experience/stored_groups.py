"""Stored groups: trained groups that come back whole (``replay.mode: groups``), failures included.

A group is stored when it was trained, all its members were fresh, and their rewards differ. Everything follows from the
groups in ``saved`` order and the version. :meth:`StoredGroups.take` gives a store exactly the rows that it lacks.
"""

from __future__ import annotations

import bisect
import itertools
import math
import random
from collections.abc import Collection, Iterable, Iterator, Mapping

from pipeline.config.replay import ReplayConfig
from pipeline.store.experience_records import Leave, StoredGroup


class StoredGroups:
    """Groups under four bounds: number (the oldest go), uses, age, retirement of their task.

    ``n_rollout``: members of a group of this run; stored groups of another size leave. ``staleness_max`` is added to a
    group's age: so much older it may be when it is trained.
    """

    def __init__(
        self,
        replay: ReplayConfig,
        n_rollout: int,
        staleness_max: int,
        environments: Collection[str],
        groups: Iterable[StoredGroup] = (),
        next_saved: int = 0,
    ) -> None:
        self._rule = replay.groups
        self._environments = environments
        self._age_max = None if replay.max_age is None else replay.max_age - staleness_max
        self._groups = {group.group_number: group for group in sorted(groups, key=lambda group: group.saved)}
        self._changed: dict[int, StoredGroup] = {}
        self._removed: dict[int, Leave] = {}
        self.next_saved = max([next_saved, *(group.saved + 1 for group in self._groups.values())])
        """Number of the next save."""
        for group in list(self):
            if len(group.members) != n_rollout:
                self._remove(group, Leave.RECONFIGURED)
        self._trim()

    def __len__(self) -> int:
        return len(self._groups)

    def __contains__(self, group_number: int) -> bool:
        return group_number in self._groups

    def __iter__(self) -> Iterator[StoredGroup]:
        """In the order they were saved."""
        return iter(self._groups.values())

    @property
    def bytes(self) -> int:
        """Bytes of the payloads of all members."""
        return sum(entry.n_bytes for group in self for entry in group.members)

    @property
    def oldest_version(self) -> int | None:
        """Smallest policy version that sampled a token of a member."""
        return min((group.version_min for group in self), default=None)

    def save(self, group: StoredGroup) -> bool:
        """Store a group whose rewards differ, and set its ``saved``; returns whether it was. The oldest one leaves if
        there are too many."""
        number = group.group_number
        if number in self._groups or number in self._removed or not group.informative:
            return False
        group.saved = self.next_saved
        self.next_saved += 1
        self._groups[number] = self._changed[number] = group
        self._trim()
        return True

    def age_to(self, version: int) -> None:
        """The policy is at this version: groups that can never be used again leave."""
        if self._age_max is not None:
            for group in [group for group in self if version - group.version_min > self._age_max]:
                self._remove(group, Leave.AGE)

    def retire(self, task_id: str) -> None:
        """The task is retired: its groups leave."""
        for group in [group for group in self if group.task.task_id == task_id]:
            self._remove(group, Leave.RETIRED)

    def draw(self, batch: Collection[str], version: int, rng: random.Random) -> StoredGroup | None:
        """The group to replay now, of a task that is not in ``batch``; None when there is none. This is one of its
        uses; after the last it leaves."""
        valid = [g for g in self if g.task.task_id not in batch and g.task.environment in self._environments]
        if not valid:
            return None
        group = valid[self._choose(valid, version, rng)]
        group.uses += 1
        self._changed[group.group_number] = group
        if group.uses >= self._rule.uses_max:
            self._remove(group, Leave.USES)
        return group

    def take(self) -> tuple[list[StoredGroup], Mapping[int, Leave]]:
        """Groups that were saved or used since the last call, and by number those that left."""
        taken = list(self._changed.values()), dict(sorted(self._removed.items()))
        self._changed, self._removed = {}, {}
        return taken

    def _choose(self, valid: list[StoredGroup], version: int, rng: random.Random) -> int:
        if self._rule.select == "newest":
            return len(valid) - 1
        if self._rule.select == "uniform":
            return rng.randrange(len(valid))
        ages = [version - group.version_min for group in valid]
        youngest = min(ages)  # weights relative to the youngest do not underflow
        weights = (
            group.spread * math.exp((youngest - age) / self._rule.tau) for group, age in zip(valid, ages, strict=True)
        )
        ends = list(itertools.accumulate(weights))
        return min(bisect.bisect_right(ends, rng.random() * ends[-1]), len(valid) - 1)

    def _trim(self) -> None:
        while len(self._groups) > self._rule.capacity:
            self._remove(next(iter(self)), Leave.CAPACITY)

    def _remove(self, group: StoredGroup, reason: Leave) -> None:
        del self._groups[group.group_number]
        self._changed.pop(group.group_number, None)
        self._removed[group.group_number] = reason
