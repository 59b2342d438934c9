"""Mixing of replayed and fresh groups: replay share of a batch, retests, deferred tasks, and the ESS guard.

A batch is ``B`` consecutive admissions, ``B * task_ratio * factor`` of them replay groups, where ``factor`` is the
guard's. The whole part is fixed when the batch begins, and the fraction is carried over to the next batch. Replay
groups come first in a batch, so that its fresh draws do not take the tasks that could be replayed. If one finds no
valid task, a later admission of the batch replaces it. The guard lowers ``factor`` while the effective sample size of
replayed tokens is below its floor.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from typing import Any

import msgspec

from pipeline.config.replay import EssGuardConfig, ReplayConfig
from pipeline.schema import Task
from pipeline.schema.orders import task_header
from pipeline.tasks.sampler import Drawn, DrawOutcome, TaskSampler

SLACK = 1e-9
"""Products of a count and a ratio may fall below the whole number that is meant by so much: 100 * 0.29 < 29."""

SHRINK = 0.5
"""Factor on the factor of the replay share after an update below the floor of the guard."""
RECOVERY = 0.05
"""Added to it after each other update, until it is 1."""


class Mixing:
    """State of mixing: counters of the batch being admitted, whether replay has begun, credit for retests.

    ``batch``: groups of every batch.
    """

    def __init__(self, replay: ReplayConfig, batch: int, state: Mapping[str, Any] | None = None) -> None:
        state = state or {}
        self._replay = replay
        self._batch = batch
        self.started = bool(state.get("started", False))
        """True if mixing has begun; it never ends, unless the updates that began it are taken back."""
        self._position = int(state.get("position", 0))
        self._target = int(state.get("target", 0))
        self._fraction = float(state.get("fraction", 0.0))
        self._replays = int(state.get("replays", 0))
        self._tasks = dict.fromkeys(str(task_id) for task_id in state.get("tasks", ()))
        self._retest_credit = float(state.get("retest_credit", 0.0))
        if self._position >= batch:
            self._end_batch()

    @property
    def tasks(self) -> Mapping[str, None]:
        """Ids of the tasks of this batch so far."""
        return self._tasks

    def begin(self, progress: float, factor: float) -> None:
        """Before every admission. ``progress`` is the share of the run that is done."""
        if self._replay.start_solve_rate is None and progress >= self._replay.start_ratio:
            self.started = True
        if self._position == 0:
            share = self._replay.task_ratio * factor if self.started else 0.0
            planned = self._batch * share + self._fraction
            self._target = math.floor(planned + SLACK)
            self._fraction = max(0.0, planned - self._target)
        self._retest_credit = min(1.0, self._retest_credit) + self._replay.retest_ratio

    @property
    def retest_due(self) -> bool:
        """True if this admission should retest a retired task."""
        return self._retest_credit >= 1 - SLACK

    @property
    def replay_due(self) -> bool:
        """True if this admission should be a replay group: those of a batch come first, so that its fresh draws do not
        take the tasks that could be replayed."""
        return self._replays < self._target

    def admitted(self, task_id: str, *, replay: bool = False, retest: bool = False) -> None:
        """The admission that :meth:`begin` began is made."""
        self._tasks[task_id] = None
        self._position += 1
        self._replays += replay
        if retest:
            self._retest_credit = max(0.0, self._retest_credit - 1)
        if self._position >= self._batch:
            self._end_batch()

    def solved(self, solve_rate: float) -> None:
        """An update trained a batch in which this share of fresh rollouts succeeded (ExGRPO's start)."""
        start = self._replay.start_solve_rate
        if start is not None and solve_rate > start:
            self.started = True

    def state(self) -> dict[str, Any]:
        """JSON that :meth:`__init__` takes back."""
        return {
            "started": self.started,
            "position": self._position,
            "target": self._target,
            "fraction": self._fraction,
            "replays": self._replays,
            "tasks": list(self._tasks),
            "retest_credit": self._retest_credit,
        }

    def _end_batch(self) -> None:
        self._position = self._replays = 0
        self._tasks.clear()


class DeferredTasks:
    """Draws fresh tasks, avoiding repeats in a batch. A drawn task that cannot be used yet is kept for later.

    A task whose group was cancelled comes back once: were it to come back each time, one whose rollouts
    always fail would keep others out permanently.
    """

    def __init__(self, environments: Collection[str], state: Mapping[str, Any] | None = None) -> None:
        state = state or {}
        tasks = msgspec.convert(state.get("tasks", ()), tuple[Task, ...])
        self._environments = environments
        self._tasks = {task.task_id: task for task in tasks if task.environment in environments}
        self._again = dict.fromkeys(str(task_id) for task_id in state.get("again", ()))

    def draw(
        self, sampler: TaskSampler, batch: Collection[str], is_retired: Callable[[str], bool], exhausted: set[str]
    ) -> Task | None:
        """A task that is neither retired nor in this batch; None when nothing like that is found."""
        closed = [task_id for task_id, task in self._tasks.items() if is_retired(task_id) or not sampler.trains(task)]
        for task_id in closed:
            del self._tasks[task_id]
            self._again.pop(task_id, None)
        for task_id in self._tasks:
            if task_id not in batch:
                return self._tasks.pop(task_id)

        def verdict(drawn: Drawn) -> DrawOutcome:
            if drawn.task_id in self._tasks or is_retired(drawn.task_id):
                return DrawOutcome.PASS
            if drawn.task_id not in batch:
                return DrawOutcome.TAKE
            self._tasks[drawn.task_id] = drawn.task()
            return DrawOutcome.KEEP

        return sampler.draw_where(verdict, exhausted=exhausted)

    def take(self) -> Task | None:
        """The first deferred task, although it is in this batch; None when there is none."""
        return self._tasks.pop(next(iter(self._tasks))) if self._tasks else None

    def give_back(self, task: Task) -> None:
        """The task's group was cancelled."""
        if task.task_id in self._again:
            del self._again[task.task_id]
        elif task.environment in self._environments:
            self._again[task.task_id] = None
            self._tasks.setdefault(task.task_id, task)

    def finished(self, task_id: str) -> None:
        """The task's group is finished."""
        self._again.pop(task_id, None)

    def state(self) -> dict[str, Any]:
        """JSON that :meth:`__init__` takes back."""
        return {"tasks": [task_header(task) for task in self._tasks.values()], "again": list(self._again)}


def next_factor(guard: EssGuardConfig, factor: float, ess: float | None) -> float:
    """The share's factor, in [0, 1], after an update whose replayed tokens had this ESS (0 to 1): Kish's times
    ``min(1, mean ratio)``. Kish's alone is 1 where every ratio is 0.01, and such replays carry nothing but a baseline.

    Below the floor it shrinks by a factor, else it grows by a constant: fast down, slow up. An update without replayed
    tokens (``ess`` None) counts as one above the floor, or a share of 0 would stay 0. An ESS that is not
    finite counts as 0.
    """
    if not guard.enabled:
        return 1.0
    if ess is not None and not (math.isfinite(ess) and ess >= guard.floor):
        return factor * SHRINK
    return min(1.0, factor + RECOVERY)
