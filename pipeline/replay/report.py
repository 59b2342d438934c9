"""The experience of a run in numbers: buckets, pool, ages, terminal states, guard, bias audit. Read from the rows."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import orjson

from pipeline.config import RunConfig
from pipeline.store.queries import meta, reading
from pipeline.store.records import TrainedVersions

AGES = (0, 1, 2, 4, 8, 16, 32, 64, 128)
"""Lower bounds of the age classes, in versions."""
_FACTS = "group_number, n_sampled, duration_seconds, reward"
_LIVE = "group_number IN (SELECT group_number FROM groups)"
"""Groups whose rows are not rolled up: of others only what is in the pool is left, which are successes."""
_POPULATION = {
    "sampled": f"SELECT {_FACTS}, age_insert FROM trajectories WHERE {_LIVE} AND reward IS NOT NULL",
    "stored": f"SELECT {_FACTS}, age_insert FROM trajectories WHERE saved IS NOT NULL",
    "trained": f"SELECT {_FACTS}, 0 AS age_insert FROM trajectories WHERE {_LIVE} AND state = 'trained'",
    "replayed": "SELECT r.group_number, t.n_sampled, t.duration_seconds, t.reward, r.age AS age_insert "
    "FROM group_replays r JOIN trajectories t USING (row_id) WHERE r.chosen = 1",
    "zero_variance": f"SELECT {_FACTS}, age_insert FROM trajectories WHERE state = 'dropped' AND "
    "reason = 'zero_variance'",
}
"""The populations of the selection-bias audit. Age: versions that its oldest token was behind the newest one when
it came (sampled, stored, zero_variance), or behind the weights that were updated when it was trained (trained,
replayed). ``zero_variance``: left out because all rewards of its group were equal."""
_TRAINED_AGES = """
SELECT g.update_number, t.version_min, count(*), total(t.age_insert) FROM trajectories t
JOIN groups g ON g.group_number = t.group_number WHERE t.state = 'trained' GROUP BY 1, 2"""


@dataclass(frozen=True, slots=True)
class TaskReport:
    """One task of the pool."""

    task_id: str
    trajectories: int
    n_bytes: int
    bucket: int | None
    visits: int


@dataclass(slots=True)
class Population:
    """Sums over one population."""

    count: int = 0
    tokens: float = 0.0
    """Sampled tokens."""
    seconds: float = 0.0
    reward: float = 0.0
    age: float = 0.0
    tasks: int = 0
    """Different tasks that trajectories of it are of; those of imports are not known."""
    tasks_effective: float | None = None
    """Kish's effective number of tasks, ``1 / Σ share²`` over their shares of the trajectories: ``tasks`` where each
    has as many."""

    def json(self) -> dict[str, float | int | None]:
        """Means, and the tasks."""
        n = self.count
        values = {"tokens": self.tokens, "seconds": self.seconds, "reward": self.reward, "age": self.age}
        means = {name: value / n if n else None for name, value in values.items()}
        return {"count": n, **means, "tasks": self.tasks, "tasks_effective": self.tasks_effective}


@dataclass(slots=True)
class ReplayReport:
    """Summary of the experience in the store of a run."""

    policy_version: int = -1
    updates: int = 0
    buckets: Counter[int] = field(default_factory=Counter)
    """Tasks by successes of a group at their success rate; retired ones are apart."""
    retired: list[str] = field(default_factory=list)
    entries: int = 0
    n_bytes: int = 0
    unrecorded: int = 0
    """Entries without recorded log-probabilities."""
    uses: int = 0
    ages: Counter[int] = field(default_factory=Counter)
    """Entries by lower bound of their age class."""
    pooled_tasks: list[TaskReport] = field(default_factory=list)
    stored_groups: int = 0
    stored_uses: int = 0
    trajectories: Counter[str] = field(default_factory=Counter)
    groups: Counter[str] = field(default_factory=Counter)
    orders: Counter[str] = field(default_factory=Counter)
    counters: Counter[str] = field(default_factory=Counter)
    """``pool.*``, ``stored_groups.*``, ``replays.*`` and ``tasks.*`` of the ledger."""
    started: bool = False
    """True if mixing has begun."""
    factor: float = 1.0
    """Share of ``task_ratio`` that the guard leaves."""
    audit: dict[str, Population] = field(default_factory=lambda: {name: Population() for name in _POPULATION})

    def json(self, config: RunConfig) -> dict[str, Any]:
        """For machines."""
        mixing = self.started and config.replay.enabled
        return {
            "enabled": config.replay.enabled,
            "policy_version": self.policy_version,
            "updates": self.updates,
            "buckets": {str(k): v for k, v in sorted(self.buckets.items())},
            "retired": sorted(self.retired),
            "pool": {
                "trajectories": self.entries,
                "capacity": config.replay.capacity,
                "capacity_bytes": config.replay.capacity_bytes,
                "tasks": len(self.pooled_tasks),
                "bytes": self.n_bytes,
                "unrecorded": self.unrecorded,
                "uses": self.uses,
                "ages": {str(k): v for k, v in sorted(self.ages.items())},
                "by_task": [
                    {"task_id": s.task_id, "trajectories": s.trajectories, "bytes": s.n_bytes, "bucket": s.bucket,
                     "visits": s.visits}
                    for s in self.pooled_tasks
                ],
            },
            "stored_groups": {
                "groups": self.stored_groups,
                "capacity": config.replay.groups.capacity,
                "uses": self.stored_uses,
            },
            "states": {
                "trajectories": dict(self.trajectories),
                "groups": dict(self.groups),
                "orders": dict(self.orders),
            },
            "counters": dict(self.counters),
            "guard": {
                "enabled": config.replay.ess_guard.enabled,
                "mixing": mixing,
                "factor": self.factor,
                "share": config.replay.task_ratio * self.factor if mixing else 0.0,
            },
            "audit": {name: population.json() for name, population in self.audit.items()},
        }  # fmt: skip


def examine_run(path: Path) -> ReplayReport:
    """Read the store in one read-only transaction; a run may be using it.

    Raises :class:`StoreError` when it is missing or not ours.
    """
    with reading(path) as connection:
        state = meta(connection)
        read = connection.execute
        version = state.get("policy_version", -1)
        found = ReplayReport(policy_version=version, updates=state.get("consumed", 0))
        replay = state.get("replay") or {}
        found.started = bool((replay.get("mixing") or {}).get("started", False))
        found.factor = float(replay.get("factor", 1.0))
        tasks = {}
        for task_id, bucket, retired, visits in read("SELECT task_id, bucket, retired, visits FROM tasks"):
            tasks[task_id] = (bucket, visits)
            if retired:
                found.retired.append(task_id)
            elif bucket is not None:
                found.buckets[bucket] += 1
        pool = "FROM pool p JOIN trajectories t USING (row_id)"
        for task_id, count, n_bytes in read(f"SELECT p.task_id, count(*), sum(t.n_bytes) {pool} GROUP BY 1"):
            found.pooled_tasks.append(TaskReport(task_id, count, n_bytes, *tasks.get(task_id, (None, 0))))
            found.entries += count
            found.n_bytes += n_bytes
        found.pooled_tasks.sort(key=lambda task: (-task.trajectories, task.task_id))
        for version_min, recorded, uses in read(f"SELECT t.version_min, p.recorded, p.uses {pool}"):
            age = max(0, version - version_min) if recorded else 0
            found.ages[max(bound for bound in AGES if bound <= age)] += 1
            found.unrecorded += not recorded
            found.uses += uses
        found.stored_groups, found.stored_uses = read(
            "SELECT count(*), coalesce(sum(uses), 0) FROM stored_groups"
        ).fetchone()
        ended = "CASE WHEN state IN ('dropped', 'cancelled') THEN state || '.' || reason ELSE state END"
        for table, counts in (("trajectories", found.trajectories), ("groups", found.groups)):
            counts.update(dict(read(f"SELECT {ended}, count(*) FROM {table} GROUP BY 1")))
        found.orders.update(dict(read("SELECT state, count(*) FROM orders GROUP BY 1")))
        for name, value in read("SELECT name, value FROM counters"):
            if name.startswith(("pool.", "stored_groups.", "replays.", "tasks.", "groups.zero_variance_")):
                found.counters[name] += value
        for name, query in _POPULATION.items():
            count, tokens, seconds, reward, age = read(
                "SELECT count(*), total(n_sampled), total(duration_seconds), total(reward), total(age_insert) "
                f"FROM ({query})"
            ).fetchone()
            of_tasks = f"SELECT count(*) FROM ({query}) JOIN groups USING (group_number) GROUP BY groups.task"
            sizes = [int(size) for (size,) in read(of_tasks)]
            effective = sum(sizes) ** 2 / sum(size**2 for size in sizes) if sizes else None
            found.audit[name] = Population(count, tokens, seconds, reward, age, len(sizes), effective)
        versions = TrainedVersions(state.get("trained_versions"))
        for update, version_min, count, age_insert in read(_TRAINED_AGES):
            at = versions.at(update) if update is not None else None
            # of updates that an older Afterplay recorded only the age at arrival is known
            found.audit["trained"].age += age_insert if at is None else count * max(0, at - version_min)
        return found


def dumps(found: ReplayReport, config: RunConfig) -> str:
    """JSON text."""
    return orjson.dumps(found.json(config), option=orjson.OPT_INDENT_2).decode()
