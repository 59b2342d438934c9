"""What enters and leaves the pool, and which rows that changes.

*consumes* entries to save, the version, retirement; *produces* what was saved, what left and why. Every change of the
pool goes through here, so that :meth:`Keeper.take` gives a store exactly what it lacks.
"""

from __future__ import annotations

from collections.abc import Iterable

from pipeline.replay.experience.difficulty import Difficulty
from pipeline.replay.experience.pool import Pool
from pipeline.replay.experience.records import Leave, PoolEntry

Left = list[tuple[PoolEntry, Leave]]


class Keeper:
    """Writes to ``pool``, and forgets tasks of ``difficulty`` of which nothing is left.

    ``next_saved``: number of the next save.
    """

    def __init__(self, pool: Pool, difficulty: Difficulty, next_saved: int = 0) -> None:
        self._pool = pool
        self._difficulty = difficulty
        last = max((entry.saved for entry in pool), default=-1)
        self.next_saved = max(next_saved, last + 1)
        self._changed: dict[int, PoolEntry] = {}
        self._removed: dict[int, Leave] = {}
        self._trimmed = False

    def save(self, entries: Iterable[PoolEntry]) -> list[PoolEntry]:
        """Store what is not held yet, has a sampled token and is young enough; returns it, ``saved`` set. Bounds are
        kept by :meth:`trim`."""
        saved = []
        for entry in entries:
            useless = entry.n_sampled < 1 or entry.n_turns < 1 or self._pool.too_old(entry)
            if useless or self._pool.has_trajectory(entry.trajectory_id):
                continue
            entry.saved = self.next_saved
            self.next_saved += 1
            self._pool.add(entry)
            self._changed[entry.seq] = entry
            self._removed.pop(entry.seq, None)
            saved.append(entry)
        return saved

    def change(self, entry: PoolEntry) -> None:
        """A mark of a held entry was changed."""
        self._changed[entry.seq] = entry

    def age_to(self, version: int) -> Left:
        """The policy is at this version: what can never be used again leaves."""
        return [(entry, Leave.AGE) for entry in self._pool.age_to(version)]

    def retire(self, task_id: str) -> Left:
        """The task is retired."""
        return [(entry, Leave.RETIRED) for entry in self._pool.purge(task_id)]

    def trim(self, saved: Iterable[PoolEntry]) -> Left:
        """Keep the bounds after these were saved."""
        return self._pool.trim(dict.fromkeys(entry.task.task_id for entry in saved))

    def trim_all(self) -> Left:
        """Once: the run file of a resumed run may have smaller bounds than its rows were kept under."""
        left = [] if self._trimmed else self._pool.trim()
        self._trimmed = True
        return left

    def gone(self, left: Left) -> None:
        """Record what :meth:`age_to`, :meth:`retire` and the trims took out."""
        for entry, reason in left:
            self._changed.pop(entry.seq, None)
            self._removed[entry.seq] = reason
            if self._pool.shelf(entry.task.task_id) is None:
                self._difficulty.settle(entry.task.task_id, pooled=False)

    def take(self) -> tuple[list[PoolEntry], dict[int, Leave]]:
        """Entries that were saved or changed since the last call, and by ``seq`` those that left."""
        taken = list(self._changed.values()), dict(sorted(self._removed.items()))
        self._changed, self._removed = {}, {}
        return taken
