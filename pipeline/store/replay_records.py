"""Data types that the replay pool and the stage share."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import orjson

from pipeline.schema import Task
from pipeline.schema.orders import decode_task, task_header

EQUAL_REWARDS = 1e-9
"""Rewards closer than this are equal: advantages of groups so narrow are noise of the scorer's arithmetic."""


class Eviction(StrEnum):
    """Reason for which a stored trajectory left the pool."""

    FULL = "full"
    """Its task has ``max_trajectories_per_task`` others."""
    CAPACITY = "capacity"
    """The pool has ``capacity`` others."""
    BYTES = "bytes"
    """The pool is over ``capacity_bytes``."""
    RETIRED = "retired"
    """Its task was solved by every fresh rollout."""
    AGE = "age"
    """The entry is older than ``max_age`` allows."""
    USES = "uses"
    """A stored group was replayed ``groups.uses_max`` times."""
    RECONFIGURED = "reconfigured"
    """A stored group has another size than ``groups.n_rollout`` is now."""


@dataclass(slots=True)
class PoolEntry:
    """One trajectory that is or may be stored, without its payload (that is in the store under ``row_id``)."""

    row_id: int
    trajectory_id: str
    task: Task
    saved: int
    """Number of the save, which orders entries. It only increases. -1: not saved."""
    reward: float
    n_turns: int
    n_tokens: int
    n_sampled: int
    n_bytes: int
    version_min: int
    version_max: int
    duration_seconds: float
    entropy: float | None = None
    """Mean over sampled tokens, nats: at collection ``-mean(log mu)``, which estimates it without bias, later the exact
    one that the learner measured last. None: unknown, which ranks worst."""
    entropy_version: int | None = None
    """Policy version that the learner measured ``entropy`` with; None: it did not."""
    success_rate: float | None = None
    """Success rate of the policy that sampled it on its task, estimated when it was saved; None: unknown (a
    demonstration)."""
    recorded: bool = True
    """True if its log-probabilities were recorded."""
    uses: int = 0
    """Times it was trained as a replay."""
    replayable: bool = True
    """False where its training prompt is not that of the rollout (lessons discarded)."""

    def age(self, version: int) -> int:
        """Versions since its oldest token was sampled; 0 for one that no policy of this run sampled."""
        return max(0, version - self.version_min) if self.recorded else 0

    def entropy_age(self, version: int) -> int | None:
        """Versions since ``entropy`` was measured, or estimated at collection; None where it is unknown."""
        if self.entropy is None:
            return None
        at = self.version_max if self.entropy_version is None else self.entropy_version
        return max(0, version - at)


@dataclass(slots=True)
class StoredGroup:
    """A trained group that may come back whole."""

    group_number: int
    task: Task
    members: tuple[PoolEntry, ...]
    """All its rollouts, as they were when fresh."""
    saved: int = -1
    """Number of the save, which orders stored groups."""
    uses: int = 0
    """Times a replay of it was planned."""

    @property
    def version_min(self) -> int:
        """Oldest policy version that sampled a token of it."""
        return min(entry.version_min for entry in self.members)

    @property
    def spread(self) -> float:
        """``Σ|A|`` over its members, A being reward minus mean reward."""
        rewards = [entry.reward for entry in self.members]
        mean = sum(rewards) / len(rewards)
        return sum(abs(reward - mean) for reward in rewards)

    @property
    def informative(self) -> bool:
        """True if its rewards differ and every member has a sampled token."""
        rewards = [entry.reward for entry in self.members]
        return max(rewards) - min(rewards) > EQUAL_REWARDS and all(entry.n_sampled for entry in self.members)


@dataclass(slots=True)
class Candidate:
    """A stored trajectory that a group may be completed with; its payload is kept while the group may be trained."""

    entry: PoolEntry
    weight: float = 1.0
    """Multiplies the loss of its tokens: bias correction and importance correction of the sampling."""
    chosen: bool = False
    """True if the learner trained it with the group."""
    age: int = 0
    """Versions it was old when it was trained; before that, when it was sent last."""


@dataclass(frozen=True, slots=True)
class Planned:
    """A group to admit: ``n_rollout - k`` fresh orders, and ``k`` of the candidates, best first."""

    task: Task
    k: int = 0
    candidates: tuple[Candidate, ...] = ()


@dataclass(frozen=True, slots=True)
class Outcome:
    """Changes that a finished group made."""

    saved: tuple[PoolEntry, ...] = ()
    retired: bool = False
    """The task is retired from here on."""
    returned: bool = False
    """The task left retirement."""


@dataclass(slots=True)
class ReplayChanges:
    """Rows that changed since they were last taken, for one transaction."""

    entries: list[PoolEntry] = field(default_factory=list)
    """Saved or changed."""
    removed: list[tuple[PoolEntry, Eviction]] = field(default_factory=list)
    """Entries that left, and why."""
    groups: list[StoredGroup] = field(default_factory=list)
    """Stored or used."""
    removed_groups: list[tuple[StoredGroup, Eviction]] = field(default_factory=list)
    """Stored groups that left, and why."""
    tasks: list[TaskRecord] = field(default_factory=list)
    forgotten_tasks: list[str] = field(default_factory=list)
    state: Mapping[str, Any] | None = None
    """Counters of the draws, latch of the start, guard: small, JSON, replaces the one before."""
    updates: list[dict[str, Any]] | None = None
    """Changes that the latest updates made, so that they can be undone: JSON, replaces the one before."""

    def __bool__(self) -> bool:
        rows = self.entries or self.removed or self.groups or self.removed_groups or self.tasks or self.forgotten_tasks
        return bool(rows or self.state is not None or self.updates is not None)


@dataclass(slots=True)
class TaskRecord:
    """State of a task, kept while it is pooled or retired, and in environments with an end.

    >>> TaskRecord.of(Task("arithmetic/17", "arithmetic", 17)).task.seed
    17
    """

    task_id: str
    encoded_task: bytes
    """The task as JSON: there may be millions of records, and few of their tasks are played again."""
    bucket: int | None = None
    """Successes that a group of ``n_rollout`` would have at its success rate; None: retired, or no finished group."""
    successes: float = 0.0
    """Among the fresh rollouts of its finished groups, older ones counting less."""
    failures: float = 0.0
    """The same of failures: the posterior of its success rate is ``Beta(1 + successes, 1 + failures)``."""
    solved: int = 0
    """Fresh rollouts of its latest groups without a failure."""
    retired: bool = False
    visits: int = 0
    """Finished groups."""

    @classmethod
    def of(cls, task: Task) -> TaskRecord:
        """A record of a task without a finished group."""
        return cls(task.task_id, orjson.dumps(task_header(task)))

    @property
    def task(self) -> Task:
        return decode_task(self.encoded_task)

    @property
    def success_rate(self) -> float:
        """Mode of the posterior: the success rate of the only group where there was one, 0.5 where there was none."""
        counted = self.successes + self.failures
        return self.successes / counted if counted else 0.5

    @property
    def variance(self) -> float:
        """Posterior mean of ``p (1 - p)``, the variance of a success."""
        a, b = 1 + self.successes, 1 + self.failures
        return a * b / ((a + b) * (a + b + 1))
