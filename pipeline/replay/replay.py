"""Experience replay of one stage behind one class: pool, difficulty, selection and mixing.

*consumes* admissions, finished and cancelled groups, updates of the learner; *produces* planned groups and the rows
that changed. All state follows from (entries, tasks, state) as :meth:`Replay.take_changes` gave them: an object
built from these continues with the same draws.

A replay group is a task, its candidate stored trajectories, and their weights.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Any

from pipeline.config import RunConfig
from pipeline.errors import ConfigurationError
from pipeline.replay.difficulty import Difficulty
from pipeline.replay.mixing import DeferredTasks, Mixing, next_factor
from pipeline.replay.pool import Pool, TaskEntries
from pipeline.replay.priorities import Priorities
from pipeline.replay.selection import (
    Draws,
    TaskIndex,
    choose,
    draw_normal,
    draw_uniform,
    log_priority,
    sampling_correction,
)
from pipeline.replay.stored_groups import StoredGroups
from pipeline.schema import Task
from pipeline.store.replay_records import (
    Candidate,
    Outcome,
    Planned,
    PoolEntry,
    ReplayChanges,
    StoredGroup,
    TaskRecord,
)
from pipeline.tasks.sampler import TaskSampler


class Planner:
    """Draws from ``pool`` and ``difficulty``."""

    def __init__(self, config: RunConfig, pool: Pool, difficulty: Difficulty, draws: Draws) -> None:
        self._replay = config.replay
        self._n = config.groups.n_rollout
        self._environments = config.trained_environments
        self._pool = pool
        self._difficulty = difficulty
        self._draws = draws
        self._index = TaskIndex()
        self._priorities = Priorities()
        self._by_priority = config.replay.task_sampling == "priority"
        self._held_out: Callable[[Task], bool] = lambda task: False

    def learn(self, held_out: Callable[[Task], bool]) -> None:
        """``held_out`` tells which tasks are not for training: those of imports may be."""
        self._held_out = held_out
        self._pool.touched.update(entry.task.task_id for entry in self._pool)
        self.reindex()

    def reindex(self) -> None:
        """Bring the index up to date with the tasks that changed; ``difficulty`` forgets those without entries."""
        for task_id in sorted(self._pool.touched):
            task_entries = self._pool.task_entries(task_id)
            self._difficulty.settle(task_id, pooled=task_entries is not None)
            if task_entries is None or not self._trains(task_entries.entries[0].task):
                self._index.discard(task_id)
                self._priorities.discard(task_id)
            elif self._by_priority:
                born, priority = task_entries.mean_version, self._replay.priority
                log_weight = log_priority(self._difficulty.records[task_id].variance, priority.alpha)
                log_weight += (born or 0.0) / priority.tau
                self._priorities.put(task_id, log_weight, decays=born is not None)
            else:
                self._index.put(task_id, self._difficulty.bucket(task_id))
        self._pool.touched.clear()

    def _trains(self, task: Task) -> bool:
        return task.environment in self._environments and not self._held_out(task)

    def retired(self, batch: Collection[str]) -> Task | None:
        """A retired task that is not in this batch; None when there is none."""
        if not self._difficulty.retired:
            return None
        task_id = draw_uniform(self._difficulty.retired, batch, self._draws.next("retest"))
        return None if task_id is None else self._difficulty.records[task_id].task

    def replay_group(self, batch: Collection[str], progress: float, version: int) -> Planned | None:
        """A group with replays of a task that is not in this batch; None when nothing is valid."""
        drawn = self._draw_task(batch, progress, version)
        if drawn is None:
            return None
        task_entries = self._pool.task_entries(drawn[0])
        assert task_entries is not None, f"{drawn[0]} is indexed without entries"
        k = min(self._replay.trajectories_per_task, len(task_entries.entries))
        return Planned(task_entries.entries[0].task, k, self.candidates(task_entries, k, drawn[1]))

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

    def candidates(self, task_entries: TaskEntries, k: int, correction: float = 1.0) -> tuple[Candidate, ...]:
        """The k that are replayed, first; behind them, if the learner chooses, the others."""
        replay = self._replay
        n = len(task_entries.entries) if replay.entropy == "current" and replay.select != "random" else k
        chosen = choose(task_entries.entries, n, replay.select, partial(self._draws.next, "trajectory"))
        return tuple(Candidate(e, correction * self._bias(e)) for e in chosen)

    def _bias(self, entry: PoolEntry) -> float:
        return entry.success_rate if self._replay.bias_correction and entry.success_rate is not None else 1.0


@dataclass(slots=True)
class UpdateEffects:
    """State before an update, and the entries that it used."""

    update: int
    factor: float
    """The guard's."""
    started: bool
    """True if mixing had begun."""
    used: list[int] = field(default_factory=list)
    """``row_id`` of each entry that was trained as a replay."""
    entropies: list[tuple[int, float | None, int | None]] = field(default_factory=list)
    """``row_id`` of each entry that got another entropy, and the one before with its version."""


class UpdateHistory:
    """The effects of the latest updates, the oldest first: what is undone when a learner resumes from before them.

    ``changed`` is reset by its reader.
    """

    def __init__(self, kept: int, state: Iterable[Mapping[str, Any]] | None = None) -> None:
        self._kept = kept
        self._effects = [UpdateEffects(**effects) for effects in state or ()]
        self.changed = False

    def add(self, effects: UpdateEffects) -> None:
        self._effects.append(effects)
        self.changed = True

    def covered(self, updates: int) -> None:
        """The learner has a checkpoint of so many updates, and older ones of at most ``kept`` updates before it."""
        self._effects = [e for e in self._effects if e.update >= updates - self._kept]
        self.changed = True

    def take_back(self, updates: int) -> list[UpdateEffects]:
        """The effects of all updates from number ``updates`` on, the latest first. They are forgotten here."""
        taken = [e for e in reversed(self._effects) if e.update >= updates]
        self._effects = [e for e in self._effects if e.update < updates]
        self.changed = True
        return taken

    def state(self) -> list[dict[str, Any]]:
        """JSON that :meth:`__init__` takes back."""
        return [asdict(effects) for effects in self._effects]


class Replay:
    """Pool, difficulty, selection and mixing of one stage (docs/REPLAY.md).

    ``entries``, ``groups`` and ``tasks`` are the rows as last written, ``state`` and ``updates`` the last ones taken.
    With ``replay.enabled`` false what is given is held and nothing else happens: groups come straight from the sampler.
    ``sizes``: tasks of each environment (None: without end), where its data was opened.
    """

    def __init__(
        self,
        config: RunConfig,
        *,
        entries: Iterable[PoolEntry] = (),
        groups: Iterable[StoredGroup] = (),
        tasks: Iterable[TaskRecord] = (),
        state: Mapping[str, Any] | None = None,
        updates: Iterable[Mapping[str, Any]] | None = None,
        sizes: Mapping[str, int | None] | None = None,
    ) -> None:
        state = state or {}
        replay = config.replay
        self._replay = replay
        self._enabled = replay.enabled
        self._n = config.groups.n_rollout
        self.pool = Pool(replay, config.staleness.max, entries, int(state.get("next_saved", 0)))
        finite = sizes if sizes is not None else _sizes(config)
        self.difficulty = Difficulty(config, finite, tasks)
        self._draws = Draws(config.run.seed, state.get("draws"))
        self._planner = Planner(config, self.pool, self.difficulty, self._draws)
        self._mixing = Mixing(replay, config.groups.groups_per_step, state.get("mixing"))
        self._deferred = DeferredTasks(config.environments, state.get("deferred"))
        self.factor = float(state.get("factor", 1.0)) if replay.ess_guard.enabled else 1.0
        """Share of ``task_ratio`` that the guard leaves, 0 to 1."""
        self._updates = UpdateHistory(config.checkpoint.keep * config.checkpoint.every, updates)
        self.groups = StoredGroups(
            replay,
            config.groups.n_rollout,
            config.staleness.max,
            config.trained_environments,
            groups,
            int(state.get("next_saved_group", 0)),
        )
        self._state_changed = False
        for entry in self.pool:
            self.difficulty.meet(entry.task)
        self._planner.reindex()

    def learn(self, sampler: TaskSampler) -> None:
        """The sampler knows the splits of environments: no held-out task is trained, and retired tasks that are not
        trained are not retested. Call it before anything is drawn."""
        self.difficulty.learn(sampler.trains)
        self._planner.learn(sampler.holds_out)

    @property
    def share(self) -> float:
        """The share of groups that are to be replay groups now; 0 before mixing has begun."""
        return self._replay.task_ratio * self.factor if self._enabled and self._mixing.started else 0.0

    @property
    def oldest_version(self) -> int | None:
        """Smallest policy version among recorded entries and stored groups."""
        found = (self.pool.oldest_version, self.groups.oldest_version)
        return min((version for version in found if version is not None), default=None)

    @property
    def bytes(self) -> int:
        """Bytes of the payloads of all entries and of all members of stored groups."""
        return self.pool.bytes + self.groups.bytes

    def age_to(self, version: int) -> None:
        """Weights are live as this version: entries that can never be used again leave the pool."""
        if self._enabled:
            self.pool.age_to(version)
            self.groups.age_to(version)
            self._planner.reindex()

    def next_group(self, sampler: TaskSampler, *, progress: float, version: int) -> Planned:
        """Plan the group to admit now.

        ``progress``: share of the run that is done, 0 to 1; ``version``: newest policy version.
        The sampler is drawn unless this is a replay group or a retest.
        """
        if not self._enabled:
            return Planned(sampler.draw())
        self._state_changed = True
        self.age_to(version)
        self._mixing.begin(progress, self.factor)
        batch = self._mixing.tasks
        if self._mixing.retest_due and (task := self._planner.retired(batch)) is not None:
            self._mixing.admitted(task.task_id, retest=True)
            return Planned(task)
        if self._mixing.replay_due:
            whole = self._replay.mode == "groups"
            planned = (
                self._stored_group(batch, version) if whole else self._planner.replay_group(batch, progress, version)
            )
            if planned is not None:
                self._mixing.admitted(planned.task.task_id, replay=True)
                return planned
        task = self._fresh(sampler)
        self._mixing.admitted(task.task_id)
        return Planned(task)

    def finished(self, task: Task, fresh: Sequence[PoolEntry], *, version: int) -> Outcome:
        """All ``fresh`` rollouts of a group are scored: retirement, then the bucket, then saving, then eviction."""
        if not self._enabled or not fresh:
            return Outcome()
        successes = [f for f in fresh if f.reward >= self._replay.success_threshold]
        self._state_changed = True
        self._deferred.finished(task.task_id)
        self.pool.age_to(version)
        retired, returned = self.difficulty.finished(task, len(successes), len(fresh))
        saved: list[PoolEntry] = []
        if self.difficulty.is_retired(task.task_id):
            self.pool.retire(task.task_id)
            self.groups.retire(task.task_id)
        elif self._replay.mode == "mix" and 0 < len(successes) < len(fresh):
            rate = self.difficulty.rate_when_stored(task.task_id, len(fresh))
            saved = self.pool.save(replace(f, success_rate=rate) for f in successes if f.replayable)
        self.pool.touched.add(task.task_id)
        self._planner.reindex()
        return Outcome(tuple(saved), retired, returned)

    def trained(self, group_number: int, task: Task, fresh: Sequence[PoolEntry]) -> StoredGroup | None:
        """A group without replays was trained. Returns it where it was stored, to come back whole."""
        if not (self._enabled and self._replay.mode == "groups" and all(f.replayable for f in fresh)):
            return None
        if self.difficulty.is_retired(task.task_id):
            return None
        rate = sum(f.reward >= self._replay.success_threshold for f in fresh) / len(fresh)
        group = StoredGroup(group_number, task, tuple(replace(f, success_rate=rate) for f in fresh))
        self._state_changed = True
        return group if self.groups.save(group) else None

    def consumed(
        self,
        *,
        update: int,
        used: Sequence[int],
        ess: Mapping[str, float | None],
        entropies: Mapping[int, float],
        version: int,
        solve_rate: float | None,
    ) -> None:
        """The update with this number was made, from weights of ``version``.

        ``used``: entries that it trained as replays, by ``row_id``. ``ess``: of its tokens, 0 to 1; the guard goes by
        ``carried`` or, where that is missing, by ``replay``. ``entropies``: means that it measured, nats, by
        ``row_id``. ``solve_rate``: share of its fresh rollouts that succeeded.
        """
        if not self._enabled:
            return
        self._state_changed = True
        effects = UpdateEffects(update, self.factor, self._mixing.started)
        for row_id in used:
            if (entry := self.pool.get(row_id)) is not None:
                effects.used.append(row_id)
                entry.uses += 1
                self.pool.change(entry)
        for row_id, entropy in entropies.items():
            if math.isfinite(entropy) and (entry := self.pool.get(row_id)) is not None:
                effects.entropies.append((row_id, entry.entropy, entry.entropy_version))
                entry.entropy, entry.entropy_version = entropy, version
                self.pool.change(entry)
        self._updates.add(effects)
        carried = ess.get("carried")
        ess_replay = ess.get("replay") if carried is None else carried
        self.factor = next_factor(self._replay.ess_guard, self.factor, ess_replay)
        if solve_rate is not None:
            self._mixing.solved(solve_rate)

    def cancelled(self, task: Task) -> None:
        """A planned group ended without result: its task is drawn again, once."""
        if self._enabled:
            self._state_changed = True
            self._deferred.give_back(task)

    def covered(self, updates: int) -> None:
        """The learner has a checkpoint of so many updates."""
        if self._enabled:
            self._updates.covered(updates)

    def roll_back(self, updates: int) -> None:
        """The learner continues from weights of so many updates: take back what :meth:`consumed` did for later ones.
        Entries that have left the pool since stay away."""
        if not self._enabled:
            return
        for effects in self._updates.take_back(updates):
            for row_id, entropy, version in effects.entropies:
                if (entry := self.pool.get(row_id)) is not None:
                    entry.entropy, entry.entropy_version = entropy, version
                    self.pool.change(entry)
            for row_id in effects.used:
                if (entry := self.pool.get(row_id)) is not None:
                    entry.uses -= 1
                    self.pool.change(entry)
            self.factor = effects.factor if self._replay.ess_guard.enabled else 1.0
            self._mixing.started = effects.started
        self._state_changed = True

    def import_entries(self, entries: Sequence[PoolEntry], *, version: int = 0) -> list[PoolEntry]:
        """Add demonstrations (``saved`` is set here). Returns those that were saved.

        Passed over: what is held already (by id), failures, what has no sampled token, what is too old at ``version``
        (the newest policy version), and retired tasks. Raises :class:`ConfigurationError` where replay is off.
        """
        if not self._enabled:
            raise ConfigurationError("expected replay.enabled to import experience, got false: set it to true")
        self._state_changed = True
        self.pool.age_to(version)
        threshold, is_retired = self._replay.success_threshold, self.difficulty.is_retired
        saved = self.pool.save(e for e in entries if e.reward >= threshold and not is_retired(e.task.task_id))
        for entry in saved:
            self.difficulty.meet(entry.task)
        self._planner.reindex()
        return saved

    def take_changes(self) -> ReplayChanges:
        """Rows that changed since the last call."""
        if not self._enabled:
            return ReplayChanges()
        entries, removed = self.pool.take()
        groups, removed_groups = self.groups.take()
        changes = ReplayChanges(
            entries=entries,
            removed=removed,
            groups=groups,
            removed_groups=removed_groups,
            tasks=list(self.difficulty.changed.values()),
            forgotten_tasks=sorted(self.difficulty.forgotten),
            state=self._state() if self._state_changed else None,
            updates=self._updates.state() if self._updates.changed else None,
        )
        self._state_changed = self._updates.changed = False
        self.difficulty.changed, self.difficulty.forgotten = {}, set()
        return changes

    def _state(self) -> dict[str, Any]:
        return {
            "draws": self._draws.state(),
            "mixing": self._mixing.state(),
            "deferred": self._deferred.state(),
            "factor": self.factor,
            "next_saved": self.pool.next_saved,
            "next_saved_group": self.groups.next_saved,
        }

    def _stored_group(self, batch: Collection[str], version: int) -> Planned | None:
        group = self.groups.draw(batch, version, self._draws.next("group"))
        if group is None:
            return None
        return Planned(group.task, len(group.members), tuple(map(Candidate, group.members)))

    def _fresh(self, sampler: TaskSampler) -> Task:
        task = self._deferred.draw(sampler, self._mixing.tasks, self.difficulty.is_retired, self.difficulty.exhausted)
        return task or self._deferred.take() or self._planner.retired(self._mixing.tasks) or sampler.draw()


def _sizes(config: RunConfig) -> dict[str, int | None]:
    """Tasks of each environment by the configuration, which does not hold the size of a data set."""
    return {
        name: sys.maxsize if section.tasks_from is not None else section.tasks
        for name, section in config.environments.items()
    }
