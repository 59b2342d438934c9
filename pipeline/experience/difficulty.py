"""Difficulty of tasks: bucket, history and retirement (docs/REPLAY.md, "What happens").

Only fresh rollouts count. A task is in one bucket, by the successes of its latest finished group, or retired (every
fresh rollout of its latest ``replay.retire_after`` groups succeeded), or neither (it has no finished group yet).
"""

from __future__ import annotations

import bisect
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from pipeline.schema import Task
from pipeline.store.experience_records import HISTORY, TaskRecord

ENDLESS_RETIRED_MAX = 4096
"""Retired tasks remembered of all environments without a number of tasks, which never draw them again by themselves;
beyond it those with the smallest seeds, drawn first, are forgotten."""


class Difficulty:
    """Records of tasks.

    ``finite`` says how many tasks each environment has (None: without end). Call :meth:`keep` or :meth:`forget` after
    every change; :attr:`changed` and :attr:`forgotten` collect what a store must do, the owner empties them.
    """

    def __init__(
        self, finite: Mapping[str, int | None], records: Iterable[TaskRecord] = (), retire_after: int | None = 1
    ) -> None:
        self._finite = dict(finite)
        self._retire_after = retire_after
        self.records: dict[str, TaskRecord] = {}
        self._buckets: Counter[int] = Counter()
        self._retired: list[str] = []
        self._retired_of: Counter[str] = Counter()
        self._endless: list[tuple[int, str]] = []
        self.changed: dict[str, TaskRecord] = {}
        self.forgotten: set[str] = set()
        for record in records:
            self._enter(record)

    @property
    def buckets(self) -> dict[int, int]:
        """Tasks per bucket; empty buckets are left out."""
        return {bucket: n for bucket, n in sorted(self._buckets.items()) if n}

    @property
    def retired(self) -> Sequence[str]:
        """Ids of retired tasks, sorted."""
        return self._retired

    def is_retired(self, task_id: str) -> bool:
        record = self.records.get(task_id)
        return record is not None and record.retired

    @property
    def exhausted(self) -> set[str]:
        """Environments of which every task is retired."""
        return {name for name, n in self._finite.items() if n is not None and self._retired_of[name] >= n}

    def bucket(self, task_id: str) -> int | None:
        record = self.records.get(task_id)
        return record.bucket if record else None

    def finished(self, task: Task, successes: int, n_fresh: int) -> tuple[bool, bool]:
        """A group's fresh rollouts are scored; returns whether the task retired, and whether it left retirement.

        A task that was retired and is solved again stays retired, and neither is reported.
        """
        record = self.records.get(task.task_id)
        was_retired = record is not None and record.retired
        if record is None:
            record = TaskRecord(task)
        else:
            self._leave(record)
        record.n_fresh = n_fresh
        record.visits += 1
        record.history = [*record.history, (successes, n_fresh)][-HISTORY:]
        record.retired = self._solved(record, was_retired)
        record.bucket = None if record.retired else successes
        self._enter(record)
        self._change(record)
        return record.retired and not was_retired, was_retired and not record.retired

    def _solved(self, record: TaskRecord, was_retired: bool) -> bool:
        """True if the task is, or stays, retired after the group that ends its history."""
        after = self._retire_after
        if after is None:
            return False
        latest = record.history[-1:] if was_retired else record.history[-after:]
        return (was_retired or len(latest) == after) and all(s == n for s, n in latest)

    def meet(self, task: Task) -> None:
        """The task has come into the pool by import: from here on there is a record of it."""
        if task.task_id not in self.records:
            record = TaskRecord(task)
            self._enter(record)
            self._change(record)

    def settle(self, task_id: str, *, pooled: bool) -> None:
        """Forget the task unless something needs its record: the pool, retirement, or an environment with an end."""
        record = self.records.get(task_id)
        if record is None:
            return
        endless = self._finite.get(record.task.environment) is None
        if endless and not pooled and not record.retired:
            self._forget(record)
        while len(self._endless) > ENDLESS_RETIRED_MAX:
            self._forget(self.records[self._endless[0][1]])

    def _change(self, record: TaskRecord) -> None:
        self.changed[record.task.task_id] = record
        self.forgotten.discard(record.task.task_id)

    def _forget(self, record: TaskRecord) -> None:
        task_id = record.task.task_id
        self._leave(record)
        del self.records[task_id]
        self.changed.pop(task_id, None)
        self.forgotten.add(task_id)

    def _enter(self, record: TaskRecord) -> None:
        task = record.task
        self.records[task.task_id] = record
        if record.bucket is not None:
            self._buckets[record.bucket] += 1
        if record.retired:
            bisect.insort(self._retired, task.task_id)
            self._retired_of[task.environment] += 1
            if self._finite.get(task.environment) is None:
                bisect.insort(self._endless, (task.seed, task.task_id))

    def _leave(self, record: TaskRecord) -> None:
        task = record.task
        if record.bucket is not None:
            self._buckets[record.bucket] -= 1
        if record.retired:
            self._retired.remove(task.task_id)
            self._retired_of[task.environment] -= 1
            if self._finite.get(task.environment) is None:
                self._endless.remove((task.seed, task.task_id))
