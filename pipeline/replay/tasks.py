"""Which task is played next. All state is two kinds of counters, so it is small, exact and resumable."""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Mapping
from enum import Enum, auto
from typing import Any

from pipeline.config.play import EnvironmentConfig
from pipeline.errors import ConfigurationError
from pipeline.replay.sharding import WHOLE, Shard
from pipeline.schema import Task

TRIES_MAX = 4096
"""Tasks of one environment that :meth:`TaskSampler.draw_where` looks at before it gives the environment up."""


class Verdict(Enum):
    """What becomes of a task that came next."""

    TAKE = auto()
    """It is played."""
    KEEP = auto()
    """The caller plays it later; the next one is looked at."""
    PASS = auto()
    """It is not played this time round; the environment's next one is looked at."""


class TaskSampler:
    """Draws tasks from weighted environments.

    The environment of a draw is the one furthest behind its share (so every batch is mixed as the weights say, without
    noise). Task ``i`` of environment ``E`` is ``Task("E/<seed+i>", "E", seed+i)``. An environment with ``tasks: N``
    visits its N tasks once per epoch, in an order that depends only on ``run.seed``, the name and the epoch.

    Every ``shard`` walks the same sequence and passes over what belongs to others. Raises :class:`ConfigurationError`
    when nothing is left for it.
    """

    def __init__(
        self,
        environments: Mapping[str, EnvironmentConfig],
        seed: int,
        state: Mapping[str, Any] | None = None,
        shard: Shard = WHOLE,
    ) -> None:
        self._environments = dict(environments)
        self._seed = seed
        self._shard = shard
        self._check_share()
        drawn = dict((state or {}).get("drawn", {}))
        self._drawn: dict[str, int] = {name: int(drawn.get(name, 0)) for name in self._environments}
        self._epochs: dict[str, tuple[int, list[int]]] = {}
        base = dict((state or {}).get("base", {}))
        self._base: dict[str, int] = {name: int(base.get(name, self._drawn[name])) for name in self._environments}
        if set(base) != set(self._environments):
            self._base = dict(self._drawn)

    def draw(self) -> Task:
        """The next task."""
        while not self._shard.owns((task := self._walk(self._next_environment())).task_id):
            pass
        return task

    def draw_where(
        self, verdict: Callable[[Task], Verdict], *, exhausted: Collection[str] = frozenset()
    ) -> Task | None:
        """The next task that ``verdict`` takes; None when no environment has one.

        Tasks passed over do not count for the share of their environment, a turn of one that has nothing to give
        does. An environment is given up after two epochs of it, at most :data:`TRIES_MAX` tasks; one that is
        ``exhausted`` at once.
        """
        tries = {name: min(TRIES_MAX, 2 * (section.tasks or TRIES_MAX)) for name, section in self._environments.items()}
        closed: set[str] = set()
        while len(closed) < len(tries):
            name = self._next_environment(closed)
            if name not in exhausted and tries[name]:
                tries[name] -= 1
                task = self._walk(name)
                if not self._shard.owns(task.task_id):
                    continue
                found = verdict(task)
                if found is Verdict.TAKE:
                    return task
                self._base[name] += found is Verdict.PASS
                continue
            closed.add(name)
            self._base[name] -= 1
        for name in closed:
            self._base[name] += 1
        return None

    def _walk(self, name: str) -> Task:
        index = self._drawn[name]
        self._drawn[name] += 1
        section = self._environments[name]
        if section.tasks is not None:
            index = self._shuffled(name, section.tasks, index // section.tasks)[index % section.tasks]
        seed = section.seed + index
        return Task(f"{name}/{seed}", name, seed)

    def state(self) -> dict[str, Any]:
        """JSON that :meth:`__init__` takes back."""
        return {"drawn": dict(self._drawn), "base": dict(self._base)}

    def _check_share(self) -> None:
        for name, section in self._environments.items():
            if section.tasks is None or any(
                self._shard.owns(f"{name}/{section.seed + i}") for i in range(section.tasks)
            ):
                return
        raise ConfigurationError(
            f"expected each of replay.shards={self._shard.count} stages to own a task, got none for stage "
            f"{self._shard.index}: tasks are divided by a hash of their ids. Give the environments more tasks, or set "
            "fewer shards"
        )

    def _next_environment(self, closed: Collection[str] = ()) -> str:
        counts = {name: self._drawn[name] - self._base[name] for name in self._environments if name not in closed}
        return min(counts, key=lambda name: (counts[name] + 0.5) / self._environments[name].weight)

    def _shuffled(self, name: str, n_tasks: int, epoch: int) -> list[int]:
        cached = self._epochs.get(name)
        if cached is None or cached[0] != epoch or len(cached[1]) != n_tasks:
            order = list(range(n_tasks))
            random.Random(f"{self._seed}/{name}/{epoch}").shuffle(order)
            cached = self._epochs[name] = (epoch, order)
        return cached[1]
