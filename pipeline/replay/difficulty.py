"""Difficulty of tasks: success rate, bucket and retirement (docs/REPLAY.md, "Difficulty and retirement").

Only fresh rollouts count, those of replay groups included. A task is in one bucket, by its success rate, or retired
(its latest ``replay.retire_after * n_rollout`` fresh rollouts succeeded, in groups without a failure), or neither (it
has no finished group yet).
"""

from __future__ import annotations

import bisect
import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence

from pipeline.config import RunConfig
from pipeline.schema import Task
from pipeline.store.replay_records import TaskRecord

ENDLESS_RETIRED_MAX = 4096
"""Retired tasks remembered of all environments without a number of tasks, which never draw them again by themselves;
beyond it those with the smallest seeds, drawn first, are forgotten."""


STEPS_MAX = 100
TOLERANCE = 1e-12
"""Newton steps to a rate, halvings where a step leaves the interval; the last one is smaller than this."""


class Difficulty:
    """Records of tasks.

    ``finite`` says how many tasks each environment has (None: without end). Call :meth:`keep` or :meth:`forget` after
    every change; :attr:`changed` and :attr:`forgotten` collect what a store must do, the owner empties them.
    """

    def __init__(self, config: RunConfig, finite: Mapping[str, int | None], records: Iterable[TaskRecord] = ()) -> None:
        self._finite = dict(finite)
        self._n = config.groups.n_rollout
        self._retire_after = config.replay.retire_after
        self._half_life = config.replay.difficulty_half_life * self._n
        self.records: dict[str, TaskRecord] = {}
        self._trains: Callable[[Task], bool] = lambda task: True
        self._buckets: Counter[int] = Counter()
        self._retired: list[str] = []
        self._retired_of: Counter[str] = Counter()
        self.solved = 0
        """Retired tasks, those that the run file does not train any more included."""
        self._endless: list[tuple[int, str]] = []
        self.changed: dict[str, TaskRecord] = {}
        self.forgotten: set[str] = set()
        for record in records:
            record.retired = record.retired and self._retire_after is not None
            if record.bucket is not None or (record.visits and not record.retired):
                record.bucket = bucket_of(record.success_rate, self._n)
            self._enter(record)

    @property
    def buckets(self) -> dict[int, int]:
        """Tasks per bucket; empty buckets are left out."""
        return {bucket: n for bucket, n in sorted(self._buckets.items()) if n}

    @property
    def retired(self) -> Sequence[str]:
        """Ids of retired tasks that the run file trains, sorted."""
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
            record = TaskRecord.of(task)
        else:
            self._leave(record)
        record.visits += 1
        kept = 0.5 ** (n_fresh / self._half_life) if self._half_life else 0.0
        record.successes = record.successes * kept + successes
        record.failures = record.failures * kept + n_fresh - successes
        record.solved = record.solved + n_fresh if successes == n_fresh else 0
        after = self._retire_after
        record.retired = after is not None and record.solved >= (1 if was_retired else after * self._n)
        record.bucket = None if record.retired else bucket_of(record.success_rate, self._n)
        self._enter(record)
        self._change(record)
        return record.retired and not was_retired, was_retired and not record.retired

    def rate_when_stored(self, task_id: str, n_fresh: int) -> float:
        """Success rate of the task by the groups finished so far, the latest of which, with ``n_fresh`` rollouts, is
        stored, because some of these succeeded and some did not."""
        record = self.records[task_id]
        return selected_rate(record.successes, record.successes + record.failures, n_fresh)

    def meet(self, task: Task) -> None:
        """The task has come into the pool by import: from here on there is a record of it."""
        if task.task_id not in self.records:
            record = TaskRecord.of(task)
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

    def learn(self, trains: Callable[[Task], bool]) -> None:
        """``trains`` tells which tasks the run file trains. Others that are retired are not retested, and say nothing
        about how many tasks of their environment are left. Call it before anything is drawn."""
        self._trains = trains
        self._retired = [task_id for task_id in self._retired if trains(self.records[task_id].task)]
        self._retired_of = Counter(self.records[task_id].task.environment for task_id in self._retired)

    def _change(self, record: TaskRecord) -> None:
        self.changed[record.task_id] = record
        self.forgotten.discard(record.task_id)

    def _forget(self, record: TaskRecord) -> None:
        self._leave(record)
        del self.records[record.task_id]
        self.changed.pop(record.task_id, None)
        self.forgotten.add(record.task_id)

    def _enter(self, record: TaskRecord) -> None:
        self.records[record.task_id] = record
        if record.bucket is not None:
            self._buckets[record.bucket] += 1
        if not record.retired:
            return
        self.solved += 1
        task = record.task
        if self._trains(task):
            bisect.insort(self._retired, task.task_id)
            self._retired_of[task.environment] += 1
        if self._finite.get(task.environment) is None:
            bisect.insort(self._endless, (task.seed, task.task_id))

    def _leave(self, record: TaskRecord) -> None:
        if record.bucket is not None:
            self._buckets[record.bucket] -= 1
        if not record.retired:
            return
        self.solved -= 1
        task = record.task
        if self._trains(task):
            self._retired.remove(task.task_id)
            self._retired_of[task.environment] -= 1
        if self._finite.get(task.environment) is None:
            self._endless.remove((task.seed, task.task_id))


def bucket_of(rate: float, n: int) -> int:
    """Successes of n at this rate, rounded; halves go towards n/2, so that successes and failures count alike."""
    successes = rate * n
    return math.floor(successes + 0.5) if successes < n / 2 else math.ceil(successes - 0.5)


def selected_rate(successes: float, counted: float, n: int) -> float:
    """Rate p for which the expected number of successes is ``successes``, given that the latest n of the ``counted``
    rollouts are stored: ``(counted - n) p + E_p[s | 0 < s < n] = successes``.

    That is the mode of the posterior with a uniform prior and the likelihood of a selected group. Without the selection
    it is ``successes / counted``. It is 0 or 1 where selection alone explains what was counted: a lone success.
    """
    sizes = [(s, math.log(math.comb(n, s))) for s in range(1, n)]
    if successes <= 1:
        return 0.0
    if successes >= counted - 1:
        return 1.0
    low, high, p = 0.0, 1.0, successes / counted
    for _ in range(STEPS_MAX):
        logs = [size + s * math.log(p) + (n - s) * math.log1p(-p) for s, size in sizes]
        largest = max(logs)
        weights = [math.exp(value - largest) for value in logs]
        total = sum(weights)
        expected = sum(w * s for w, (s, _) in zip(weights, sizes, strict=True)) / total
        variance = sum(w * (s - expected) ** 2 for w, (s, _) in zip(weights, sizes, strict=True)) / total
        over = (counted - n) * p + expected - successes
        low, high = (low, p) if over > 0 else (p, high)
        before, p = p, p - over / (counted - n + variance / (p * (1 - p)))
        p = p if low < p < high else (low + high) / 2
        if abs(p - before) <= TOLERANCE:
            break
    return p
