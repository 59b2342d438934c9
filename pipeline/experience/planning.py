"""Composes replay groups: the task, its candidate stored trajectories, and their weights."""

from __future__ import annotations

from collections.abc import Collection

from pipeline.config import RunConfig
from pipeline.experience.difficulty import Difficulty
from pipeline.experience.pool import Pool, TaskEntries
from pipeline.experience.selection import (
    Draws,
    TaskIndex,
    choose,
    choose_turns,
    draw_by_turns,
    draw_normal,
    draw_priority,
    draw_uniform,
    log_priority,
)
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
        self._n_turns: dict[str, int] = {}
        self._log_variance: dict[str, float] = {}

    def reindex(self) -> None:
        """Bring the index up to date with the shelves that changed."""
        for task_id in self._pool.touched:
            shelf = self._pool.shelf(task_id)
            if shelf is not None and shelf.usable:
                self._index.put(task_id, self._difficulty.bucket(task_id))
                self._n_turns[task_id] = shelf.n_turns
                self._log_variance[task_id] = self._log_priority(task_id)
            else:
                self._index.discard(task_id)
                self._n_turns.pop(task_id, None)
                self._log_variance.pop(task_id, None)
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
        assert shelf is not None and shelf.usable, f"{drawn[0]} is indexed without usable entries"
        k = min(self._replay.trajectories_per_task, len(shelf.usable))
        return Planned(shelf.usable[0].task, k, self.candidates(shelf, k, drawn[1]))

    def _draw_task(self, batch: Collection[str], progress: float, version: int) -> tuple[str, float] | None:
        """A task and the importance correction of having drawn it."""
        replay, index = self._replay, self._index
        rng = self._draws.next("task")
        ids = index.all() if replay.difficulty is None else index.of(replay.difficulty)
        if replay.task_sampling == "priority":
            priority = replay.priority
            beta = priority.beta + (1 - priority.beta) * min(1.0, max(0.0, progress))
            shelves, variance, tau = self._pool.shelves, self._log_variance, priority.tau
            return draw_priority(ids, lambda t: variance[t] - shelves[t].mean_age(version) / tau, beta, batch, rng)
        if replay.task_sampling == "normal" and replay.difficulty is None:
            task_id = draw_normal(index, self._n, batch, rng)
        elif replay.unit == "turn" and replay.task_sampling == "uniform":
            task_id = draw_by_turns(ids, self._n_turns, batch, rng)
        else:
            task_id = draw_uniform(ids, batch, rng)
        return None if task_id is None else (task_id, 1.0)

    def _log_priority(self, task_id: str) -> float:
        """The part of a task's log priority that does not change with its age."""
        record = self._difficulty.records.get(task_id)
        priority = self._replay.priority
        return log_priority(record.success_rate if record else 0.5, priority.alpha, priority.epsilon)

    def candidates(self, shelf: TaskEntries, k: int, correction: float = 1.0) -> tuple[Candidate, ...]:
        """The k that are replayed, first; behind them, if the learner chooses, the others."""
        replay, rng = self._replay, self._draws.next("trajectory")
        if replay.unit == "turn" and replay.select == "random":
            turns: list[tuple[PoolEntry, int | None]] = [*choose_turns(shelf.usable, k, rng)]
        else:
            every = replay.entropy == "current" and replay.select != "random"
            chosen = choose(shelf.usable, len(shelf.usable) if every else k, replay.select, rng)
            turns = [(e, rng.randrange(e.n_turns) if replay.unit == "turn" else None) for e in chosen]
        return tuple(Candidate(e, correction * self._bias(e), turn) for e, turn in turns)

    def _bias(self, entry: PoolEntry) -> float:
        return entry.success_rate if self._replay.bias_correction and entry.success_rate is not None else 1.0
