"""Composes replay groups: the task, its candidate stored trajectories, and their weights."""

from __future__ import annotations

from collections.abc import Collection
from functools import partial

from pipeline.config import RunConfig
from pipeline.experience.difficulty import Difficulty
from pipeline.experience.pool import Pool, TaskEntries
from pipeline.experience.selection import (
    Draws,
    TaskIndex,
    choose,
    draw_normal,
    draw_uniform,
    log_priority,
    sampling_correction,
)
from pipeline.experience.sum_tree import Priorities
from pipeline.schema import Task
from pipeline.store.experience_records import Candidate, Planned, PoolEntry


class Planner:
    """Draws from ``pool`` and ``difficulty``; changes only the counters of ``draws``."""

    def __init__(self, config: RunConfig, pool: Pool, difficulty: Difficulty, draws: Draws) -> None:
        self._replay = config.replay
        self._n = config.groups.n_rollout
        self._environments = config.environments
        self._pool = pool
        self._difficulty = difficulty
        self._draws = draws
        self._index = TaskIndex()
        self._priorities = Priorities()
        self._by_priority = config.replay.task_sampling == "priority"

    def reindex(self) -> None:
        """Bring the index up to date with the shelves that changed."""
        for task_id in sorted(self._pool.touched):
            shelf = self._pool.shelf(task_id)
            bucket = self._difficulty.bucket(task_id)
            if shelf is None or shelf.entries[0].task.environment not in self._environments:
                self._index.discard(task_id)
                self._priorities.discard(task_id)
            elif self._by_priority:
                born = shelf.mean_version
                log_weight = self._log_priority(task_id) + (born or 0.0) / self._replay.priority.tau
                self._priorities.put(task_id, log_weight, decays=born is not None)
            else:
                self._index.put(task_id, bucket)
        self._pool.touched.clear()

    def retired(self, batch: Collection[str]) -> Task | None:
        """A retired task that is not in this batch; None when there is none."""
        if not self._difficulty.retired:
            return None
        task_id = draw_uniform(self._difficulty.retired, batch, self._draws.next("retest"))
        task = self._difficulty.records[task_id].task if task_id is not None else None
        return task if task is not None and task.environment in self._environments else None

    def replay_group(self, batch: Collection[str], progress: float, version: int) -> Planned | None:
        """A group with replays of a task that is not in this batch; None when nothing is valid."""
        drawn = self._draw_task(batch, progress, version)
        if drawn is None:
            return None
        shelf = self._pool.shelf(drawn[0])
        assert shelf is not None, f"{drawn[0]} is indexed without entries"
        k = min(self._replay.trajectories_per_task, len(shelf.entries))
        return Planned(shelf.entries[0].task, k, self.candidates(shelf, k, drawn[1]))

    def _draw_task(self, batch: Collection[str], progress: float, version: int) -> tuple[str, float] | None:
        """A task and the importance correction of having drawn it."""
        rng = self._draws.next("task")
        if self._by_priority:
            priority = self._replay.priority
            beta = priority.beta + (1 - priority.beta) * min(1.0, max(0.0, progress))
            drawn = self._priorities.draw(batch, rng, version / priority.tau)
            return None if drawn is None else (drawn[0], sampling_correction(drawn[1], beta))
        if self._replay.task_sampling == "normal":
            task_id = draw_normal(self._index, self._n, batch, rng)
        else:
            task_id = draw_uniform(self._index.all(), batch, rng)
        return None if task_id is None else (task_id, 1.0)

    def _log_priority(self, task_id: str) -> float:
        """The part of a task's log priority that does not change with its age."""
        record = self._difficulty.records.get(task_id)
        priority = self._replay.priority
        return log_priority(record.variance if record else 1 / 6, priority.alpha)

    def candidates(self, shelf: TaskEntries, k: int, correction: float = 1.0) -> tuple[Candidate, ...]:
        """The k that are replayed, first; behind them, if the learner chooses, the others."""
        replay = self._replay
        n = len(shelf.entries) if replay.entropy == "current" and replay.select != "random" else k
        chosen = choose(shelf.entries, n, replay.select, partial(self._draws.next, "trajectory"))
        return tuple(Candidate(e, correction * self._bias(e)) for e in chosen)

    def _bias(self, entry: PoolEntry) -> float:
        return entry.success_rate if self._replay.bias_correction and entry.success_rate is not None else 1.0
