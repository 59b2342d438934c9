"""Draws the next task to train. All state is two kinds of counters, so it is small, exact and resumable."""

from __future__ import annotations

import logging
import random
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from enum import Enum, auto
from functools import partial
from typing import Any

from pipeline.config.rollouts import HELD_OUT_SEED, EnvironmentConfig
from pipeline.config.tasks import TRAIN
from pipeline.errors import ConfigurationError
from pipeline.schema import Task
from pipeline.tasks.source import TaskSplit
from pipeline.tasks.splits import Splits, is_held_out

log = logging.getLogger(__name__)

TRIES_MAX = 4096
"""Tasks of one environment that :meth:`TaskSampler.draw_where` looks at before it gives the environment up."""


class DrawOutcome(Enum):
    """Decision about a drawn task."""

    TAKE = auto()
    """The caller uses it now."""
    KEEP = auto()
    """The caller uses it later; the next one is looked at."""
    PASS = auto()
    """The task is skipped in this pass; the environment's next one is examined."""


@dataclass(frozen=True, slots=True)
class Drawn:
    """The next task. Its id is known at once; a row of a data set is read on demand."""

    task_id: str
    task: Callable[[], Task]


class TaskSampler:
    """Draws tasks from weighted environments.

    The environment of a draw is the one furthest behind its share (so every batch is mixed as the weights say, without
    noise); where the run file changed the weights, shares count from there on. Task ``i`` of environment ``E`` is
    ``Task("E/<seed+i>", "E", seed+i)``. An environment with ``tasks: N`` visits its N tasks once per epoch, in an order
    that depends only on ``run.seed``, the name and the epoch.

    ``sources`` are the train splits of the environments with ``tasks_from``: their tasks are rows. One that had all
    its ``epochs`` gives its turns to the others; when all had, a further pass begins, because cancelled groups used up
    some tasks.

    Environments may have splits of their own (:meth:`learn`): then task ``i`` has the seed at index ``seed + i`` of
    their train split, round and round, and what is in any other split is never drawn.
    """

    def __init__(
        self,
        environments: Mapping[str, EnvironmentConfig],
        seed: int,
        state: Mapping[str, Any] | None = None,
        sources: Mapping[str, TaskSplit] | None = None,
    ) -> None:
        self._environments = dict(environments)
        self._seed = seed
        self._sources = dict(sources or {})
        self._all_spent = False
        self._splits: dict[str, Splits] = {}
        for name, section in self._environments.items():
            if section.tasks_from is not None and name not in self._sources:
                raise ConfigurationError(f"expected the data of environments.{name}.tasks_from to be open, got none")
        drawn = {name: int(n) for name, n in dict((state or {}).get("drawn", {})).items()}
        self._drawn: dict[str, int] = dict.fromkeys(self._environments, 0) | drawn
        """Environments that the run file had before are in it too, so that one that is put back continues."""
        self._epochs: dict[str, tuple[int, list[int]]] = {}
        self._weights = {name: section.weight for name, section in self._environments.items()}
        base = dict((state or {}).get("base", {}))
        if set(base) != set(self._environments) or (state or {}).get("weights", self._weights) != self._weights:
            base = self._drawn
        self._base: dict[str, int] = {name: int(base[name]) for name in self._environments}
        self._fingerprints = dict((state or {}).get("sources", {}))
        self._compare(self._fingerprints)

    def learn(self, splits: Mapping[str, Splits]) -> None:
        """The splits that environments whose tasks are seeds have of their own. Call it before anything is drawn.

        Raises :class:`ConfigurationError` when that leaves no task to train on."""
        self._splits = {name: own for name, own in splits.items() if own and name not in self._sources}
        for name, own in self._splits.items():
            section = self._environments.get(name)
            if section is None:
                continue
            n = section.tasks or (len(own[TRAIN]) if TRAIN in own else None)  # None: there are seeds behind all splits
            if n is not None and all(self._seed_at(name, i) is None for i in range(n)):
                raise ConfigurationError(
                    f"environments.{name}: expected tasks to train on, but its splits {', '.join(own)} leave none of "
                    f"the {n} seeds from {section.seed} on: set another seed, or more tasks"
                )

    def trains(self, task: Task) -> bool:
        """True if the task is one of those that this sampler draws; a task of an earlier run file may not be."""
        name, seed = task.environment, task.seed
        section, own = self._environments.get(name), self._splits.get(name, {})
        if section is None or name in self._sources:
            return section is not None
        if TRAIN in own:
            inside = seed in own[TRAIN]
        else:
            inside = section.seed <= seed and (section.tasks is None or seed < section.seed + section.tasks)
        return inside and task.task_id == f"{name}/{seed}" and not is_held_out(own, seed)

    def holds_out(self, task: Task) -> bool:
        """True if the task has a seed that is held out for evaluation."""
        held_out = task.seed >= HELD_OUT_SEED or is_held_out(self._splits.get(task.environment, {}), task.seed)
        return task.environment not in self._sources and held_out

    @property
    def sizes(self) -> dict[str, int | None]:
        """Number of different tasks of each environment; None: no end."""
        return {name: self._size(name) for name in self._environments}

    def draw(self) -> Task:
        """The next task."""
        return self._walk(self._next_environment(self._spent())).task()

    def draw_where(
        self, verdict: Callable[[Drawn], DrawOutcome], *, exhausted: Collection[str] = frozenset()
    ) -> Task | None:
        """The next task that ``verdict`` takes; None when no environment has one.

        Tasks passed over do not count for the share of their environment, a turn of one that has nothing to give
        does. An environment is given up after two epochs of it, at most :data:`TRIES_MAX` tasks; one that is
        ``exhausted`` at once.
        """
        spent = self._spent()
        open_ones = [name for name in self._environments if name not in spent]
        tries = {name: min(TRIES_MAX, 2 * (self._size(name) or TRIES_MAX)) for name in open_ones}
        closed: set[str] = set()
        while len(closed) < len(tries):
            name = self._next_environment(closed | spent)
            if name not in exhausted and tries[name]:
                tries[name] -= 1
                drawn = self._walk(name)
                found = verdict(drawn)
                if found is DrawOutcome.TAKE:
                    return drawn.task()
                self._base[name] += found is DrawOutcome.PASS
                continue
            closed.add(name)
            self._base[name] -= 1
        for name in closed:
            self._base[name] += 1
        return None

    def _walk(self, name: str) -> Drawn:
        index = self._drawn[name]
        self._drawn[name] += 1
        source = self._sources.get(name)
        if source is not None:
            row = source.order(index)
            return Drawn(source.task_id(row), partial(source.__getitem__, row))
        seed = self._seed_at(name, self._position(name, index))
        while seed is None:
            # held out: the environment's share counts only tasks that are used
            self._base[name] += 1
            seed = self._seed_at(name, self._position(name, self._drawn[name]))
            self._drawn[name] += 1
        task_id = f"{name}/{seed}"
        return Drawn(task_id, partial(Task, task_id, name, seed))

    def _position(self, name: str, index: int) -> int:
        n = self._environments[name].tasks
        return index if n is None else self._shuffled(name, n, index // n)[index % n]

    def _seed_at(self, name: str, index: int) -> int | None:
        """Seed of the task at ``index``, counted from the first; None: it is not for training."""
        own, seed = self._splits.get(name, {}), self._environments[name].seed + index
        if TRAIN in own:
            seed = own[TRAIN][seed % len(own[TRAIN])]
        return None if is_held_out(own, seed) else seed

    def state(self) -> dict[str, Any]:
        """JSON that :meth:`__init__` takes back."""
        state: dict[str, Any] = {"drawn": dict(self._drawn), "base": dict(self._base), "weights": self._weights}
        own = {name: source.fingerprint for name, source in self._sources.items()}
        if sources := self._fingerprints | own:
            state["sources"] = sources
        return state

    def _size(self, name: str) -> int | None:
        return len(self._sources[name]) if name in self._sources else self._environments[name].tasks

    def _spent(self) -> set[str]:
        """Environments that had all their passes; none when that is every one."""
        spent = {
            name
            for name, source in self._sources.items()
            if source.tasks_max is not None and self._drawn[name] >= source.tasks_max
        }
        if len(spent) < len(self._environments):
            return spent
        if not self._all_spent:
            log.warning("all tasks_from.epochs are used up (groups were cancelled or skipped): another pass begins")
        self._all_spent = True
        return set()

    def _compare(self, before: Mapping[str, str]) -> None:
        """Refuse data other than that which the positions were counted in."""
        for name, source in self._sources.items():
            if self._drawn[name] and before.get(name) != source.fingerprint:
                raise ConfigurationError(
                    f"environments.{name}.tasks_from: expected the data that this run began with, got other rows, "
                    f"another order or another content in {source.where}: it was changed, or filter, columns, limit, "
                    "splits or shuffle were. Restore it, or start a new run (another run.name, or --fresh)"
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
