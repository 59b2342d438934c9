"""Fresh tasks by what their rollouts can teach (``groups.tasks: informative``; docs/REPLAY.md)."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Collection

from pipeline.replay.difficulty import Difficulty
from pipeline.replay.priorities import SumTree
from pipeline.schema import Task
from pipeline.store.replay_records import TaskRecord
from pipeline.tasks.sampler import Drawn, TaskSampler

UNIFORM_SHARE = 0.1
"""Share of draws that take the next task of the sampler's order, whatever is known of it: in ten passes' worth of draws
each task comes about once, so that a change of its success rate is noticed."""
_ONE = 2.0**40
"""Integer weight of 1; the weights of 30 million tasks fit a sum tree."""


class InformativeTasks:
    """Known tasks of environments with a number of tasks, in proportion to E[p(1-p)] under the posterior of the success
    rate p. A task without a finished group has the posterior Beta(1, 1), the widest.

    This is Thompson sampling: were p drawn from the posterior of a task that is proposed uniformly, and the task taken
    with probability p(1-p), it would be taken in proportion to E[p(1-p)]. That mean has a closed form
    (:attr:`TaskRecord.variance`), so a tree holds it and no p is drawn.

    Everything follows from the records and the batch, so a resumed stage draws the same. Memory: 0.2 KB for each known
    task, beside its record.
    """

    def __init__(self, difficulty: Difficulty, sampler: TaskSampler) -> None:
        self._difficulty, self._sampler = difficulty, sampler
        self._trees: dict[str, SumTree] = {}
        strange = {task_id: r.task for task_id, r in difficulty.records.items() if not sampler.trains(r.task)}
        self._strange: Counter[str] = Counter(task.environment for task in strange.values())
        """Records of tasks that the run file does not train any more, by environment."""
        self._never = frozenset(strange)
        for record in difficulty.records.values():
            self.put(record)

    def put(self, record: TaskRecord) -> None:
        """The record is new, or changed."""
        task = record.task
        if task.task_id in self._never or self._sampler.trainable(task.environment) is None:
            return
        tree = self._trees.setdefault(task.environment, SumTree())
        if record.retired:
            tree.discard(task.task_id)
        else:
            tree.put(task.task_id, int(record.variance * _ONE))

    def admitted(self, task: Task) -> None:
        """A group of the task was admitted: from here on it is known."""
        if task.task_id not in self._difficulty.records and self._sampler.trainable(task.environment) is not None:
            self._difficulty.meet(task)
            self.put(self._difficulty.records[task.task_id])

    def draw(self, environment: str, batch: Collection[str], rng: random.Random) -> Drawn | None:
        """A known task that is not in this batch; None: the next of the sampler's order, in which those that are not
        known come first."""
        size, tree = self._sampler.trainable(environment), self._trees.get(environment)
        if size is None or tree is None:
            return None
        known = self._difficulty.known[environment] - self._strange[environment]
        unknown = max(0, size - known) * _UNKNOWN
        found: Task | None = None
        out = []
        while found is None and rng.randrange(max(1, tree.total + unknown)) < tree.total:
            record = self._difficulty.records[tree.draw(rng)]
            if record.task.task_id in batch:
                out.append(record)
                tree.discard(record.task.task_id)
            else:
                found = record.task
        for record in out:
            self.put(record)
        return None if found is None else Drawn.known(found)


_UNKNOWN = int(TaskRecord(Task("unknown", "unknown", 0)).variance * _ONE)
