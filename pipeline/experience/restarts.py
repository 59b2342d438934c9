"""Restarts: the turn of a stored success after which the policy continues (``replay.mode: restart``).

A task that succeeds too rarely from its start is restarted from one stored success of it. Success becomes more common
the later the policy takes over, so the turn is found by bisection between one after which it was too rare (``low``) and
one after which it was too common (``high``). It stays while the rate is between the two bounds. The policy changes
meanwhile: where nothing is left between the bounds, the older one is forgotten.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from pipeline.config.replay import ReplayConfig
from pipeline.experience.difficulty import Difficulty
from pipeline.experience.pool import Pool
from pipeline.experience.selection import Draws, choose
from pipeline.store.experience_records import Candidate, PoolEntry, RestartSearch, TaskRecord


def begun(row_id: int, n_turns: int) -> RestartSearch:
    """The search in a stored success of ``n_turns`` turns (2 or more) whose task succeeds too rarely from its start.

    >>> begun(7, 6).turn
    3
    """
    return _between(RestartSearch(row_id, n_turns, high=n_turns))


def observed(search: RestartSearch, turn: int, rate: float, rate_min: float, rate_max: float) -> RestartSearch:
    """The search after a group that began with ``turn`` turns and succeeded at this rate. Its turn becomes 0 where no
    turn is left: the last one is too rare, or the first too common.

    >>> search = begun(7, 8)
    >>> [search := observed(search, search.turn, rate, 0.2, 0.8) for rate in (0.0, 1.0, 0.5)][-1].turn
    5
    """
    low, high, n = search.low, search.high, search.n_turns
    if rate <= rate_min:
        low = max(low, turn)
        high = high if high > low + 1 else n
    elif rate >= rate_max:
        high = min(high, turn)
        low = low if low < high - 1 else 0
    else:
        return replace(search, low=min(low, turn - 1), high=max(high, turn + 1), turn=turn)
    return _between(replace(search, low=low, high=high))


def _between(search: RestartSearch) -> RestartSearch:
    """With the turn in the middle of its bounds."""
    middle = (search.low + search.high) // 2
    return replace(search, turn=middle if search.low < middle else 0)


class Restarts:
    """Restarts of all tasks. Their searches are in the records of ``difficulty``; what becomes valid, or no longer
    is, is named in ``pool.touched``.

    A restarted group says nothing about the success rate of its task, and its rollouts are not stored.
    """

    def __init__(self, replay: ReplayConfig, pool: Pool, difficulty: Difficulty, draws: Draws) -> None:
        self._on = replay.enabled and replay.mode == "restart"
        self._replay = replay
        self._pool = pool
        self._difficulty = difficulty
        self._draws = draws
        self._environments: frozenset[str] = frozenset()

    def learn(self, environments: Collection[str]) -> None:
        """The sections whose episodes can be played again; none before this is called."""
        if self._on and frozenset(environments) != self._environments:
            self._environments = frozenset(environments)
            self._pool.touched.update(self._pool.shelves)

    def candidate(self, task_id: str) -> Candidate | None:
        """The stored success to begin with, and after how many of its turns; None: the task is not restarted now."""
        record = self._difficulty.records.get(task_id)
        search = record.restart if record is not None else None
        if record is None or search is None or search.refused or not search.turn:
            return None
        if record.retired or record.task.environment not in self._environments:
            return None
        source = next((entry for entry in self._usable(task_id) if entry.row_id == search.row_id), None)
        return None if source is None else Candidate(source, turn=search.turn)

    def played(self, task_id: str) -> None:
        """A group that began at the start was scored."""
        record = self._difficulty.records.get(task_id)
        if not self._on or record is None or (record.restart is not None and record.restart.refused):
            return
        search = record.restart
        if record.success_rate > self._replay.restart.rate_min:
            if search is not None and search.turn:
                self._set(record, replace(search, turn=0))
        elif search is None or not search.turn:
            self._begin(record)

    def restarted(self, task_id: str, row_id: int, turn: int, rate: float) -> None:
        """A group that began with ``turn`` turns of the stored success ``row_id`` was scored."""
        record = self._difficulty.records.get(task_id)
        search = record.restart if record is not None else None
        if record is None or search is None or search.refused or not search.turn or search.row_id != row_id:
            return
        rule = self._replay.restart
        self._set(record, observed(search, turn, rate, rule.rate_min, rule.rate_max))

    def refuse(self, task_id: str) -> None:
        """The environment did not answer the stored turns as it did before."""
        record = self._difficulty.records.get(task_id)
        if record is not None and record.restart is not None:
            self._set(record, replace(record.restart, refused=True))

    def settle(self, task_id: str) -> None:
        """Stored trajectories of the task came or left: where its success has left, the search begins in another."""
        record = self._difficulty.records.get(task_id)
        search = record.restart if record is not None else None
        if not self._on or record is None or search is None or search.refused or not search.turn:
            return
        if all(entry.row_id != search.row_id for entry in self._usable(task_id)):
            self._begin(record)

    def _begin(self, record: TaskRecord) -> None:
        """Begin in the success that ``replay.select`` puts first; without one of two turns the task is not
        restarted."""
        entries = [entry for entry in self._usable(record.task.task_id) if entry.n_turns > 1]
        if entries:
            rng = self._draws.next("restart")
            chosen = choose(entries, 1, self._replay.select, rng)[0]
            self._set(record, begun(chosen.row_id, chosen.n_turns))
        elif record.restart is not None and record.restart.turn:
            self._set(record, replace(record.restart, turn=0))

    def _usable(self, task_id: str) -> tuple[PoolEntry, ...]:
        shelf = self._pool.shelf(task_id)
        return shelf.usable if shelf is not None else ()

    def _set(self, record: TaskRecord, search: RestartSearch) -> None:
        self._difficulty.restart(record, search)
        self._pool.touched.add(record.task.task_id)
