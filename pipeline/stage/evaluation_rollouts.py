"""Held-out tasks of an evaluation and their rollouts: one group in state ``evaluating`` or ``evaluated`` for each task.

*consumes* answers and scores of its orders; *produces* slots to order, summaries. A rollout that failed is ordered
again, up to ``groups.attempts_max`` times in all; after that it counts as missing. The tasks are the same in every
evaluation of a run and are read when they are ordered.
"""

from __future__ import annotations

import hashlib
import heapq
import logging
from collections.abc import Mapping, Sequence

from pipeline.config import RunConfig
from pipeline.schema import Task
from pipeline.schema.counters import Count
from pipeline.schema.record_file import Frames
from pipeline.stage.group_records import SharedState, StagePart
from pipeline.store.effects import GivenUp, UntrainedRollout
from pipeline.store.evaluation_results import Summary, TaskResult, summarise
from pipeline.store.records import (
    Drop,
    GroupRecord,
    GroupState,
    OrderRecord,
    Slot,
    TrajectoryRecord,
    TrajectoryState,
)
from pipeline.tasks.source import TaskSplit
from pipeline.tasks.splits import SeedSplit, Splits, evaluated_environments

log = logging.getLogger(__name__)


Split = TaskSplit | SeedSplit


class HeldOut:
    """``sources``: the evaluated split of environments with ``tasks_from`` that have it. ``own``: splits that the
    environments have themselves. Raises :class:`ConfigurationError` where a split is missing."""

    def __init__(self, config: RunConfig, sources: Mapping[str, TaskSplit], own: Mapping[str, Splits]) -> None:
        section = config.evaluation
        found = {name: self._split(config, name, sources, own.get(name, {})) for name in config.environments}
        wanted = evaluated_environments(config, {name for name, split in found.items() if split is not None}, own)
        self.splits: dict[str, Split] = {name: split for name in wanted if (split := found[name]) is not None}
        self._tasks_at = [
            (name, index * len(split) // n)
            for name, split in self.splits.items()
            for n in (min(section.tasks, len(split)),)
            for index in range(n)
        ]

    def __len__(self) -> int:
        return len(self._tasks_at)

    def __getitem__(self, index: int) -> Task:
        name, index = self._tasks_at[index]
        return self.splits[name][index]

    def environment(self, index: int) -> str:
        return self._tasks_at[index][0]

    @property
    def fingerprint(self) -> str:
        """Changes with anything that changes which tasks these are."""
        digest = hashlib.blake2b(digest_size=16)
        for name, index in self._tasks_at:
            digest.update(f"{self.splits[name].task_id(index)}\n".encode())
        return digest.hexdigest()

    @staticmethod
    def _split(config: RunConfig, name: str, sources: Mapping[str, TaskSplit], own: Splits) -> Split | None:
        section, split = config.environments[name], config.evaluation.split
        if section.tasks_from is not None:
            return sources.get(name)
        if split in own:
            return SeedSplit(name, split, own[split]) if len(own[split]) else None
        return SeedSplit.held_out(name, section, split) if split in section.held_out else None


class EvaluationRollouts(StagePart):
    """Groups and orders of the evaluation that is running; empty between two."""

    def __init__(self, shared: SharedState) -> None:
        super().__init__(shared)
        self._section = self._config.evaluation
        self._attempts_max = self._config.groups.attempts_max
        self.stopped: list[OrderRecord] = []
        """Orders that ended here and that their actors must stop; the core empties it."""
        self._tasks: HeldOut | None = None
        self._updates = 0
        self._waiting: list[int] = []
        """Indices of tasks that have no group yet, the next one last."""
        self._wants: list[tuple[int, int]] = []
        """Group number and slot to order."""

    @property
    def groups(self) -> list[GroupRecord]:
        return [g for g in self._records.values() if g.evaluation]

    @property
    def in_flight(self) -> int:
        """Slots of actors that it has."""
        return sum(slot.leased for g in self.groups if g.state is GroupState.EVALUATING for slot in g.slots)

    @property
    def ended(self) -> int:
        """Tasks of which there is all that there will be."""
        return sum(g.state is GroupState.EVALUATED for g in self.groups)

    @property
    def done(self) -> bool:
        return not self._waiting and all(g.state is GroupState.EVALUATED for g in self.groups)

    def begin(self, tasks: HeldOut, updates: int) -> None:
        """All ``tasks``, with the weights that contain ``updates`` updates."""
        self._tasks, self._updates = tasks, updates
        self._waiting, self._wants = list(reversed(range(len(tasks)))), []

    def resume(self, tasks: HeldOut, updates: int) -> None:
        """After a restart: ``tasks`` without a group are still to be planned."""
        self.begin(tasks, updates)
        planned = {group.task_index for group in self.groups}
        self._waiting = [index for index in self._waiting if index not in planned]
        self._wants = [
            (group.group_number, index)
            for group in self.groups
            for index in range(len(group.slots))
            if self._open(group, index)
        ]
        heapq.heapify(self._wants)
        for group in self.groups:
            self._settle(group)

    def take(self) -> tuple[GroupRecord, int] | None:
        """The next slot to order; None when all are ordered."""
        while True:
            while self._wants:
                number, index = heapq.heappop(self._wants)
                group = self._records.get(number)
                if group is not None and self._open(group, index):
                    return group, index
            if not self._waiting:
                return None
            self._plan(self._waiting.pop())

    def again(self, order: OrderRecord) -> None:
        """An order gave nothing: it is given again, or its rollout stays missing."""
        group = self._records[order.key.group]
        if group.state is not GroupState.EVALUATING:
            return
        if group.slots[order.key.slot].failures < self._attempts_max:
            heapq.heappush(self._wants, (group.group_number, order.key.slot))
            return
        log.warning("evaluation: rollout %d of %s failed %d times and is excluded", order.key.slot,
                    group.task.task_id, self._attempts_max)  # fmt: skip
        if self._config.scorer.needs_group(group.task.environment):
            # a function that must see all of them never will
            reason = "a rollout failed, and a reward function needs all"
            self._end(group, GroupState.EVALUATED, Count.EVALUATIONS_TASKS_ENDED, reason)
        self._settle(group)

    def answered(self, group: GroupRecord, record: TrajectoryRecord, frames: Frames) -> None:
        """A rollout came. Some are handed out for people to look at, before the score: the store has that."""
        if group.task_index is not None and self._is_shown(group.task_index, record.key.slot):
            self._journal.effect(UntrainedRollout(record.key.text, frames, record.received_at, evaluated=True))

    def scored(self, group: GroupRecord, record: TrajectoryRecord) -> None:
        """A rollout has its reward: that is all that is needed of it."""
        self._end_held(record, TrajectoryState.EVALUATED)
        self._settle(group)

    def given_up(self, slot: Slot) -> bool:
        return slot.failures >= self._attempts_max and not slot.leased

    def summaries(self, pass_at: Sequence[int], threshold: float) -> dict[str, Summary]:
        """Results by environment, in the order of the tasks; tasks that were never ordered count as missing."""
        results = {index: _of(group) for group in self.groups if (index := group.task_index) is not None}
        if self._tasks is not None:
            for index in self._waiting:
                results.setdefault(index, TaskResult(self._tasks.environment(index), (), missing=self._section.samples))
        return summarise([results[index] for index in sorted(results)], pass_at, threshold)

    @property
    def versions(self) -> tuple[int, int] | None:
        """Oldest and newest policy version that sampled a token of it; None: nothing was scored."""
        records = [slot.trajectory for group in self.groups for slot in group.slots if slot.trajectory is not None]
        sampled = [r.facts for r in records if r.reward is not None and r.facts.n_sampled]
        return (min(f.version_min for f in sampled), max(f.version_max for f in sampled)) if sampled else None

    def end(self, reason: str) -> None:
        """Forget all groups; those still open are cancelled."""
        for group in self.groups:
            if group.state is GroupState.EVALUATING:
                self._end(group, GroupState.CANCELLED, Count.EVALUATIONS_TASKS_CANCELLED, reason)
            self._journal.forget_group(group.group_number)
            del self._records[group.group_number]
        self._tasks, self._waiting, self._wants = None, [], []

    def _plan(self, index: int) -> None:
        assert self._tasks is not None
        number = self._records.take_number()
        slots = [Slot() for _ in range(self._section.samples)]
        group = GroupRecord(
            number,
            self._tasks[index],
            self._updates,
            self._clock.wall,
            slots,
            GroupState.EVALUATING,
            self._updates,
            index,
        )
        self._records[number] = group
        self._journal.group(group)
        self._journal.count(Count.EVALUATIONS_TASKS_PLANNED)
        for slot in range(len(slots)):
            heapq.heappush(self._wants, (number, slot))

    def _is_shown(self, index: int, slot: int) -> bool:
        """``traces.evaluated`` rollouts: spread over the tasks, and the first of a task before its second."""
        tasks = 0 if self._tasks is None else len(self._tasks)
        whole, rest = divmod(self._config.traces.evaluated, tasks) if tasks else (0, 0)
        return slot < whole or (slot == whole and index * rest % tasks < rest)

    def _open(self, group: GroupRecord, index: int) -> bool:
        slot = group.slots[index]
        free = not slot.leased and slot.trajectory is None and slot.failures < self._attempts_max
        return free and group.state is GroupState.EVALUATING

    def _settle(self, group: GroupRecord) -> None:
        """A group ends when each of its rollouts has a reward or was given up."""
        if group.state is not GroupState.EVALUATING:
            return
        if all(
            self.given_up(slot) if slot.trajectory is None else slot.trajectory.reward is not None
            for slot in group.slots
        ):
            self._end(group, GroupState.EVALUATED, Count.EVALUATIONS_TASKS_ENDED)

    def _end(self, group: GroupRecord, state: GroupState, count: Count, reason: str = "") -> None:
        """End a group, take back its orders and drop what waits for a score."""
        group.state, group.reason, group.ended_at = state, reason, self._clock.wall
        self._journal.group(group)
        self._journal.count(count)
        self.stopped += self._records.cancel_orders(group, reason or "the evaluation ended")
        for slot in group.slots:
            record = slot.trajectory
            if record is not None and record.state is TrajectoryState.HELD:
                slot.trajectory = None
                self._end_held(record, TrajectoryState.DROPPED, Drop.CANCELLED.value)
        if self._config.scorer.by_group:
            self._journal.effect(GivenUp(group.group_number))


def _of(group: GroupRecord) -> TaskResult:
    records = [s.trajectory for s in group.slots if s.trajectory is not None and s.trajectory.reward is not None]
    return TaskResult(
        group.task.environment,
        tuple(r.reward for r in records if r.reward is not None),
        truncated=sum(r.facts.status == "truncated" for r in records),
        failed=sum(order.failure for order in group.orders.values()),
        missing=len(group.slots) - len(records),
        tokens=sum(r.facts.n_sampled for r in records),
    )
