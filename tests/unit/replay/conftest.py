"""A stage's view of the replay pool, played from a list of numbers: what is stored, drawn, and must hold."""

from __future__ import annotations

import copy
import itertools
import json
import math
from collections import Counter
from dataclasses import dataclass, field, replace
from types import SimpleNamespace

import pytest

from pipeline.config import RunConfig
from pipeline.replay.replay import Replay
from pipeline.schema import Task
from pipeline.store.replay_records import PoolEntry, TaskRecord
from pipeline.tasks.sampler import TaskSampler


def make_config(*, n=4, batch=4, tasks=None, staleness=1, seed=0, environments=None, **replay) -> RunConfig:
    return RunConfig.model_validate(
        {
            "run": {"seed": seed},
            "groups": {"n_rollout": n, "groups_per_step": batch},
            "staleness": {"max": staleness},
            "environments": environments or {"a": {"tasks": tasks}},
            "replay": {"enabled": True, "mode": "mix", "start_ratio": 0.0, "entropy": "stored", "retest_ratio": 0.0}
            | replay,
        }
    )


def make_task(i: int, environment: str = "a") -> Task:
    return Task(f"{environment}/{i}", environment, i)


def make_entry(row_id: int, task: int | Task = 0, **values) -> PoolEntry:
    known = dict(
        row_id=row_id, trajectory_id=f"t{row_id}", task=task if isinstance(task, Task) else make_task(task),
        saved=row_id, reward=1.0, n_turns=1, n_tokens=10, n_sampled=5, n_bytes=100, version_min=0,
        version_max=0, duration_seconds=1.0,
    )  # fmt: skip
    return PoolEntry(**(known | values))


def make_fresh(
    row_id: int, reward: float, task: int | Task = 0, *, version: int = 0, entropy: float | None = 1.0, **values
) -> PoolEntry:
    known = dict(
        saved=-1, reward=reward, n_turns=1 + row_id % 3, n_bytes=100 + row_id, version_min=version,
        version_max=version, entropy=entropy,
    )  # fmt: skip
    return make_entry(row_id, task, **(known | values))


def play(experience: Replay, task: int | Task, successes: int, n: int, first_seq: int, **values):
    """Finish a pure fresh group of ``task``; ``values`` go to each rollout."""
    task = task if isinstance(task, Task) else make_task(task)
    fresh = [make_fresh(first_seq + i, float(i < successes), task, **values) for i in range(n)]
    return experience.finished(task, fresh, version=values.get("version", 0))


def own(record: TaskRecord) -> TaskRecord:
    """A copy that does not change with the original."""
    return replace(record)


@dataclass
class History:
    """Applies numbered operations to an :class:`Replay` and keeps the rows a store would hold."""

    config: RunConfig
    restarts: bool = True
    rows: dict = field(default_factory=dict)
    groups: dict = field(default_factory=dict)
    tasks: dict = field(default_factory=dict)
    state: dict | None = None
    update_records: list | None = None
    plans: list = field(default_factory=list)
    playing: list = field(default_factory=list)
    row_id: int = 0
    version: int = 0
    updates: int = 0
    saved: int = 0
    left: int = 0
    groups_saved: int = 0
    groups_left: int = 0
    finished: int = 0
    reasons: Counter = field(default_factory=Counter)
    batch: list = field(default_factory=list)
    outcomes: dict = field(default_factory=dict)
    """Of each task, (successes, fresh rollouts) of its groups."""

    def __post_init__(self) -> None:
        self.replay = Replay(self.config)
        self.sampler = TaskSampler(self.config.environments, self.config.run.seed)

    def apply(self, operation: int, x: int) -> None:
        """``operation`` 0-3 admit, 4-6 finish, 7 cancel, 8 update, 9 restart; ``x`` decides everything else."""
        if operation <= 3:
            self.admit(x)
        elif operation <= 6 and self.playing:
            self.finish(self.playing.pop(x % len(self.playing)), x)
        elif operation == 7 and self.playing:
            self.replay.cancelled(self.playing.pop(x % len(self.playing)).task)
        elif operation == 8:
            self.update(x)
            self.age()
        self.write()
        if operation == 9 and self.restarts:
            self.restart()
        self.check()

    def admit(self, x: int) -> None:
        planned = self.replay.next_group(self.sampler, progress=(x % 11) / 10, version=self.version)
        self.check_plan(planned)
        self.plans.append(planned)
        self.playing.append(planned)

    def finish(self, planned, x: int) -> None:
        n = self.config.groups.n_rollout - planned.k
        self.finished += 1
        if not n:
            return
        kind, x = x % 4, x // 4
        rewards = {0: [1.0] * n, 1: [0.0] * n}.get(kind, [float(x >> i & 1) for i in range(n)])
        fresh = []
        for i, reward in enumerate(rewards):
            entropy = None if (x >> i) % 5 == 0 else ((x >> i) % 7) / 2
            version = max(0, self.version - (x >> i) % 3)
            fresh.append(make_fresh(self.row_id, reward, planned.task, version=version, entropy=entropy))
            self.row_id += 1
        outcome = self.replay.finished(planned.task, fresh, version=self.version)
        self.outcomes.setdefault(planned.task.task_id, []).append((int(sum(rewards)), n))
        self.saved += len(outcome.saved)
        if not planned.k and x % 3:
            self.groups_saved += self.replay.trained(self.finished, planned.task, fresh) is not None

    def age(self) -> None:
        self.version += 1
        self.replay.age_to(self.version)

    def update(self, x: int) -> None:
        held = [entry.row_id for entry in self.replay.pool]
        used = held[x % 3 :: 3]
        ess = {"all": 0.5, "fresh": 1.0, "replay": (None, 0.1, 0.9, math.nan)[x % 4]}
        entropies = {row_id: ((row_id * 7 + x) % 13) / 3 for row_id in held[::2]}
        about = {"used": used, "ess": ess, "entropies": entropies, "solve_rate": (x % 10) / 10}
        self.replay.consumed(update=self.updates, version=self.version, **about)
        self.updates += 1

    def write(self) -> None:
        changes = self.replay.take_changes()
        self.rows.update({entry.row_id: copy.copy(entry) for entry in changes.entries})
        for entry, _ in changes.removed:
            self.rows.pop(entry.row_id, None)
        self.groups.update({group.group_number: copy.copy(group) for group in changes.groups})
        for group, _ in changes.removed_groups:
            self.groups.pop(group.group_number, None)
        self.groups_left += len(changes.removed_groups)
        self.left += len(changes.removed)
        self.reasons.update(reason for _, reason in [*changes.removed, *changes.removed_groups])
        self.tasks.update({record.task.task_id: own(record) for record in changes.tasks})
        for task_id in changes.forgotten_tasks:
            self.tasks.pop(task_id, None)
        if changes.state is not None:
            self.state = json.loads(json.dumps(changes.state))
        if changes.updates is not None:
            self.update_records = json.loads(json.dumps(changes.updates))
        assert not self.replay.take_changes()

    def restart(self) -> None:
        entries = sorted(map(copy.copy, self.rows.values()), key=lambda e: e.saved)
        tasks = sorted(map(own, self.tasks.values()), key=lambda r: r.task.task_id, reverse=True)
        self.replay = Replay(
            self.config,
            entries=entries,
            groups=[copy.copy(group) for group in reversed(self.groups.values())],
            tasks=tasks,
            state=self.state,
            updates=self.update_records,
        )
        self.sampler = TaskSampler(self.config.environments, self.config.run.seed, self.sampler.state())
        assert not self.replay.take_changes()

    def check_plan(self, planned) -> None:
        replay, size = self.config.replay, self.config.groups.groups_per_step
        target = math.ceil(size * replay.task_ratio - 1e-9)
        if planned.k:
            assert planned.task.task_id not in [p.task.task_id for p in self.batch]
            whole = planned.k == self.config.groups.n_rollout
            assert whole or planned.k <= replay.trajectories_per_task
            assert whole == (replay.mode == "groups")
            assert sum(p.k > 0 for p in self.batch) < target
            assert len(planned.candidates) >= planned.k
            if whole:
                assert len({c.entry.reward for c in planned.candidates}) == 2
                self.check_ages(c.entry for c in planned.candidates)
            else:
                self.check_candidates(planned.candidates)
        self.batch = [*self.batch, planned] if len(self.batch) + 1 < size else []

    def check_candidates(self, candidates) -> None:
        ids = [candidate.entry.trajectory_id for candidate in candidates]
        assert len(ids) == len(set(ids))
        for candidate in candidates:
            entry = candidate.entry
            assert entry.row_id in self.replay.pool
            assert 0 <= candidate.weight <= 1
        self.check_ages(candidate.entry for candidate in candidates)

    def check_ages(self, entries) -> None:
        if self.config.replay.max_age is not None:
            ages = [entry.age(self.version) for entry in entries]
            assert max(ages, default=0) + self.config.staleness.max <= self.config.replay.max_age

    def check_rates(self) -> None:
        """Difficulty again from every rollout, slowly. A task that was forgotten begins anew."""
        n, replay = self.config.groups.n_rollout, self.config.replay
        half_life = n * replay.difficulty_half_life
        for task_id, record in self.replay.difficulty.records.items():
            if not record.visits:
                continue
            groups = self.outcomes[task_id][-record.visits :]
            since, good, bad = 0, 0.0, 0.0
            for s, fresh in reversed(groups):
                weight = 0.5 ** (since / half_life) if half_life else not since
                good, bad, since = good + weight * s, bad + weight * (fresh - s), since + fresh
            assert (record.successes, record.failures) == pytest.approx((good, bad), abs=1e-9)
            solved = [fresh for s, fresh in itertools.takewhile(lambda g: g[0] == g[1], reversed(groups))]
            assert record.solved == sum(solved)
            if record.retired:
                assert solved
            else:
                assert replay.retire_after is None or sum(solved) < replay.retire_after * n
                successes = n * good / (good + bad)
                assert abs(record.bucket - successes) <= 0.5 + 1e-9

    def check(self) -> None:
        x, replay = self.replay, self.config.replay
        entries, tasks = list(x.pool), x.difficulty.records
        stored = Counter(entry.task.task_id for entry in entries)
        assert len(x.pool) == len(entries) == self.saved - self.left <= replay.capacity
        members = [entry for group in x.groups for entry in group.members]
        assert len(x.groups) == self.groups_saved - self.groups_left <= replay.groups.capacity
        assert {group.group_number: group for group in x.groups} == self.groups
        assert all(group.uses < replay.groups.uses_max for group in x.groups)
        assert not {group.task.task_id for group in x.groups} & {t for t, record in tasks.items() if record.retired}
        pooled = sum(entry.n_bytes for entry in entries)
        assert pooled <= replay.capacity_bytes and x.bytes == pooled + sum(entry.n_bytes for entry in members)
        assert max(stored.values(), default=0) <= replay.max_trajectories_per_task
        assert len({entry.trajectory_id for entry in entries}) == len(entries)
        assert [entry.saved for entry in entries] == sorted({entry.saved for entry in entries})
        retired = {task_id for task_id, record in tasks.items() if record.retired}
        assert len(retired) == len(x.difficulty.retired) and not retired & set(stored)
        assert all(record.bucket is None for task_id, record in tasks.items() if task_id in retired)
        self.check_rates()
        buckets = Counter(record.bucket for record in tasks.values() if record.bucket is not None)
        assert dict(buckets) == x.difficulty.buckets
        for task_id, record in tasks.items():
            finite = self.config.environments[record.task.environment].tasks is not None
            assert finite or task_id in stored or task_id in retired
        assert set(stored) <= set(tasks)
        self.check_ages(entries)
        assert x.oldest_version == min((e.version_min for e in [*entries, *members] if e.recorded), default=None)
        assert 0 <= x.share <= replay.task_ratio
        assert {entry.row_id: entry for entry in entries} == self.rows
        assert tasks == self.tasks


@pytest.fixture(scope="session")
def make() -> SimpleNamespace:
    """Makers of configurations, rows and histories."""
    return SimpleNamespace(
        config=make_config, task=make_task, entry=make_entry, fresh=make_fresh, play=play, history=History
    )
