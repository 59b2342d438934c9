"""Tasks that the sampler gave and nobody has played: they come first when there is room for them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

from pipeline.replay.tasks import Drawn, TaskSampler, Verdict
from pipeline.schema import Task


class Aside:
    """Draws fresh tasks, not twice in a batch where that can be helped, and keeps what was drawn in vain.

    A task whose group was cancelled comes back once: were it to come back each time, one that cannot be played would
    take the place of others for ever.
    """

    def __init__(self, environments: Collection[str], state: Mapping[str, Any] | None = None) -> None:
        state = state or {}
        tasks = (
            Task(t["task_id"], t["environment"], t["seed"], t.get("payload") or {}) for t in state.get("tasks", ())
        )
        self._environments = environments
        self._tasks = {task.task_id: task for task in tasks if task.environment in environments}
        self._again = dict.fromkeys(str(task_id) for task_id in state.get("again", ()))

    def draw(
        self, sampler: TaskSampler, batch: Collection[str], is_retired: Callable[[str], bool], exhausted: set[str]
    ) -> Task | None:
        """A task that is neither retired nor in this batch; None when nothing like that is found."""
        for task_id in [task_id for task_id in self._tasks if is_retired(task_id)]:
            del self._tasks[task_id]
            self._again.pop(task_id, None)
        for task_id in self._tasks:
            if task_id not in batch:
                return self._tasks.pop(task_id)

        def verdict(drawn: Drawn) -> Verdict:
            if drawn.task_id in self._tasks:
                return Verdict.PASS
            if is_retired(drawn.task_id):
                return Verdict.PASS
            if drawn.task_id not in batch:
                return Verdict.TAKE
            self._tasks[drawn.task_id] = drawn.task()
            return Verdict.KEEP

        return sampler.draw_where(verdict, exhausted=exhausted)

    def take(self) -> Task | None:
        """The first task that was set aside, although it is in this batch; None when there is none."""
        return self._tasks.pop(next(iter(self._tasks))) if self._tasks else None

    def give_back(self, task: Task) -> None:
        """The task's group was cancelled."""
        if task.task_id in self._again:
            del self._again[task.task_id]
        elif task.environment in self._environments:
            self._again[task.task_id] = None
            self._tasks.setdefault(task.task_id, task)

    def played(self, task_id: str) -> None:
        """The task's group is finished."""
        self._again.pop(task_id, None)

    def state(self) -> dict[str, Any]:
        """JSON that :meth:`__init__` takes back."""
        tasks = [
            {"task_id": t.task_id, "environment": t.environment, "seed": t.seed, "payload": dict(t.payload)}
            for t in self._tasks.values()
        ]
        return {"tasks": tasks, "again": list(self._again)}
