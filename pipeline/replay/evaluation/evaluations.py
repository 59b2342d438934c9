"""When which weights are evaluated, and with which rollouts: at most one evaluation at a time.

*consumes* versions, answers and scores of its rollouts; *produces* slots to order, results. Its groups have the state
``evaluating`` and are in no batch, pool, difficulty or admission. Everything is derived from rows that are written
anyway: after a restart the tasks without a group are planned, and those that had one go on.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping
from typing import Any

from pipeline.replay.evaluation.held_out import HeldOut
from pipeline.replay.evaluation.result import Result, TaskResult, summarise
from pipeline.replay.journal import Evaluated, GivenUp
from pipeline.replay.records import (
    Drop,
    GroupRecord,
    GroupState,
    OrderRecord,
    OrderState,
    Slot,
    TrajectoryRecord,
    TrajectoryState,
)
from pipeline.replay.state import StageState, log
from pipeline.tasks.source import TaskSplit
from pipeline.tasks.splits import Splits

Active = dict[str, Any]
JUMP = 1000
"""More evaluations than there are between two copies of a store in memory."""


class Evaluations:
    """``meta``: what an earlier process has written; ``sources``: held-out rows of environments with data."""

    def __init__(self, state: StageState, meta: Mapping[str, Any], sources: Mapping[str, TaskSplit]) -> None:
        self._s = state
        self._section = state.config.evaluation
        self._sources = sources
        kept = meta.get("evaluation") or {}
        self._next: int = kept.get("next", 0)
        self._begun: int = kept.get("begun", -1)
        self.active: Active | None = kept.get("active")
        self.last: dict[str, Any] | None = kept.get("last")
        """The newest result."""
        self._bests: list[dict[str, Any]] = kept.get("bests", [])
        """Each better than the one before: a learner that goes back takes the last ones with it."""
        if self._bests and self._bests[-1]["metric"] != self._section.metric:
            self._bests = []
        self.tasks: HeldOut | None = None
        self._waiting: list[int] = []
        self._wants: list[tuple[int, int]] = []
        self._told: object = None

    @property
    def best(self) -> dict[str, Any] | None:
        """Number, updates, version and value of the best complete one, by ``evaluation.metric``."""
        return self._bests[-1] if self._bests else None

    @property
    def on(self) -> bool:
        """Only the first of several stages evaluates: held-out tasks belong to nobody's share."""
        return self._section.on and self._s.shard.index == 0

    def learn(self, own: Mapping[str, Splits]) -> None:
        """What splits the environments have: now the tasks are known. Raises :class:`ConfigurationError`."""
        if self.on and self.tasks is None:
            self.tasks = HeldOut(self._s.config, self._sources, own)
            self._resume()

    def restore(self, *, lost: bool) -> list[OrderRecord]:
        """After a restart; ``lost``: orders given since the copy are not known, so no open group goes on. Returns
        orders that are to be taken back."""
        stopped: list[OrderRecord] = []
        if lost and self._section.on:
            # results since the copy may have been told under the next numbers
            self._next += JUMP
            if self.active is not None:
                self.active["number"] = self._next
                self._next += 1
            self._write()
        for group in self._groups():
            if group.state is GroupState.EVALUATING and (lost or self.active is None):
                stopped += self._cancel(group, "lost")
                self._forget(group)
        return stopped

    def may_hold(self, places: int) -> int:
        """How many of the actors' ``places`` evaluation may have now."""
        if self._s.batches.finished or self._section.only or self._section.strict:
            return places
        return max(1, int(self._section.slots * places))

    @property
    def in_flight(self) -> int:
        """Places that it has."""
        return sum(slot.leased for g in self._groups() if g.state is GroupState.EVALUATING for slot in g.slots)

    def holds_back(self, update: int) -> bool:
        """Whether ``update`` must wait for an evaluation of the weights before it (``evaluation.strict``)."""
        if not (self.on and self._section.strict):
            return False
        total = self._s.config.run.total_steps
        due = self.active["updates"] if self.active else self._section.next_due(self._begun + 1, total)
        return due is not None and update >= due

    def take(self) -> tuple[GroupRecord, int] | None:
        """The next slot to order; the caller checks :meth:`may_hold`."""
        if self.active is None or self.tasks is None:
            return None
        while self._wants:
            number, index = heapq.heappop(self._wants)
            group = self._s.groups.get(number)
            if group is not None and self._open(group, index):
                return group, index
        if not self._waiting:
            return None
        self._plan(self._waiting.pop())
        return self.take()

    def policy_version(self) -> int:
        """That engines must have at least."""
        assert self.active is not None
        return int(self.active["policy_version"])

    def again(self, order: OrderRecord) -> None:
        """An order gave nothing: it is given again, or its rollout stays missing."""
        group = self._s.groups[order.key.group]
        if group.state is not GroupState.EVALUATING:
            return
        if group.slots[order.key.slot].failures < self._section.attempts_max:
            heapq.heappush(self._wants, (group.number, order.key.slot))
            return
        log.warning("evaluation: rollout %d of %s failed %d times and is left out", order.key.slot,
                    group.task.task_id, self._section.attempts_max)  # fmt: skip
        if self._s.config.scorer.by_group:
            # a function that must see all of them never will
            self._s.stopped += self._end_group(group, "a rollout failed, and a reward function needs all")
        self._settle(group)

    def scored(self, group: GroupRecord, record: TrajectoryRecord) -> None:
        """A rollout has its reward: that is all that is needed of it."""
        s = self._s
        record.state = TrajectoryState.EVALUATED
        s.journal.trajectory(record)
        s.payloads.release(record.seq, record.facts.n_bytes)
        s.journal.count("trajectories.held", -1)
        s.journal.count("trajectories.evaluated")
        self._settle(group)

    def given_up(self, slot: Slot) -> bool:
        return slot.failures >= self._section.attempts_max and not slot.leased

    def plan(self) -> list[OrderRecord]:
        """Begin and end what is due. Returns orders that actors must be told to stop."""
        s, section = self._s, self._section
        if not self.on:
            return self._end("abandoned") if self.active is not None else []
        stopped: list[OrderRecord] = []
        live = s.batches.live
        if live is not None and live < self._begun:
            # the learner went back to a checkpoint: those weights are gone
            if self.active is not None:
                stopped += self._end("abandoned")
            self._begun = live
            while self._bests and self._bests[-1]["updates"] > live:
                # had its checkpoint been durable, the learner would not have gone back behind it
                self._bests.pop()
            self._write()
        if self.active is not None and self.tasks is not None:
            if self._done():
                stopped += self._end("complete")
            elif s.wall >= self.active["started_at"] + section.seconds_max:
                stopped += self._end("timed_out")
        free = self.active is None and self.tasks is not None
        if free and live is not None and live > self._begun and section.is_due(live, s.config.run.total_steps):
            self._begin(live)
        return stopped

    def next_deadline(self) -> float | None:
        """On the clock of ``now``."""
        if self.active is None or self.tasks is None:
            return None
        left: float = self.active["started_at"] + self._section.seconds_max - self._s.wall
        return self._s.now + max(0.0, left)

    def header(self) -> dict[str, Any]:
        """What the learner is told."""
        brief = None
        if self.last is not None:
            brief = {key: self.last[key] for key in ("evaluation", "updates", "policy_version", "status", "score")}
            brief["environments"] = {name: e["score"] for name, e in self.last["environments"].items()}
        return {
            "evaluating": None if self.active is None else self.active["updates"],
            "begun": self._begun,
            "last": brief,
            "best": self.best,
        }

    def news(self) -> dict[str, Any] | None:
        """:meth:`header` if it has changed since the last call."""
        header = self.header()
        if not self.on or header == self._told:
            return None
        self._told = header
        return header

    @property
    def progress(self) -> str:
        """For people: ``12 of 64 tasks``; empty when nothing plays."""
        if self.active is None:
            return ""
        ended = sum(g.state is GroupState.EVALUATED for g in self._groups())
        return f"{ended} of {self.active['total']} held-out tasks, weights of {self.active['updates']} updates"

    def _groups(self) -> list[GroupRecord]:
        return [g for g in self._s.groups.values() if g.evaluation]

    def _begin(self, live: int) -> None:
        s, section, tasks = self._s, self._section, self.tasks
        assert tasks is not None
        total = s.config.run.total_steps
        reason = "command" if section.only else "start" if live == 0 else "end" if live >= total else "schedule"
        step = section.every or 1
        passed = [u for u in range(max(0, self._begun + 1), live) if u % step == 0 and section.is_due(u, total)]
        self.active = {
            "number": self._next, "updates": live, "policy_version": s.policy_version, "reason": reason,
            "started_at": s.wall, "total": len(tasks), "skipped": len(passed) if self._next else 0,
            "shape": self._shape(),
        }  # fmt: skip
        self._next += 1
        self._begun = live
        self._waiting = list(reversed(range(len(tasks))))
        self._wants = []
        s.journal.count("evaluations.begun")
        s.journal.count("evaluations.skipped", self.active["skipped"])
        self._write()
        log.info("evaluation %d: %d tasks with the weights of %d updates (version %d)", self._next - 1, len(tasks),
                 live, s.policy_version)  # fmt: skip

    def _resume(self) -> None:
        """Go on with what an earlier process was playing, if it would be the same today."""
        if self.active is None or self.tasks is None:
            return
        if self.active["shape"] != self._shape():
            log.warning("the run file changed what is evaluated: the evaluation under way is given up")
            self._s.stopped += self._end("abandoned")
            return
        planned = {group.place_in_evaluation for group in self._groups()}
        self._waiting = [i for i in reversed(range(len(self.tasks))) if i not in planned]
        self._wants = [
            (group.number, index)
            for group in self._groups()
            if group.state is GroupState.EVALUATING
            for index in range(len(group.slots))
            if self._open(group, index)
        ]
        heapq.heapify(self._wants)
        for group in self._groups():
            self._settle(group)

    def _shape(self) -> dict[str, Any]:
        assert self.tasks is not None
        return {"tasks": self.tasks.fingerprint, **self._settings()}

    def _settings(self) -> dict[str, Any]:
        section = self._section
        temperature = section.temperature or self._s.config.sampling.temperature
        return {
            "split": section.split,
            "samples": section.samples,
            "greedy": section.greedy,
            "temperature": 0.0 if section.greedy else temperature,
        }

    def _plan(self, place: int) -> None:
        s, active, tasks = self._s, self.active, self.tasks
        assert active is not None and tasks is not None
        number = s.next_group
        s.next_group += s.shard.count
        slots = [Slot() for _ in range(self._section.samples)]
        group = GroupRecord(number, tasks[place], place, s.wall, slots, GroupState.EVALUATING, active["updates"])
        s.groups[number] = group
        s.journal.group(group)
        s.journal.meta("next_group", s.next_group)
        s.journal.count("evaluations.tasks_planned")
        for index in range(len(slots)):
            heapq.heappush(self._wants, (number, index))

    def _open(self, group: GroupRecord, index: int) -> bool:
        slot = group.slots[index]
        free = not slot.leased and slot.trajectory is None and slot.failures < self._section.attempts_max
        return free and group.state is GroupState.EVALUATING

    def _settle(self, group: GroupRecord) -> None:
        """A group ends when each of its rollouts has a reward or was given up."""
        if group.state is not GroupState.EVALUATING:
            return
        if all(
            self.given_up(slot) if slot.trajectory is None else slot.trajectory.reward is not None
            for slot in group.slots
        ):
            self._end_group(group, "")

    def _end_group(self, group: GroupRecord, reason: str) -> list[OrderRecord]:
        s = self._s
        group.state, group.reason, group.ended_at = GroupState.EVALUATED, reason, s.wall
        s.journal.group(group)
        s.journal.count("evaluations.tasks_ended")
        return self._stop(group, reason)

    def _cancel(self, group: GroupRecord, reason: str) -> list[OrderRecord]:
        s = self._s
        group.state, group.reason, group.ended_at = GroupState.CANCELLED, reason, s.wall
        s.journal.group(group)
        s.journal.count("evaluations.tasks_cancelled")
        return self._stop(group, reason)

    def _stop(self, group: GroupRecord, reason: str) -> list[OrderRecord]:
        """Take back its orders and drop what waits for a score."""
        s = self._s
        stopped = [order for order in group.orders.values() if order.state is OrderState.LEASED]
        for order in stopped:
            s.end_order(order, OrderState.CANCELLED, reason or "the evaluation ended")
        for slot in group.slots:
            record = slot.trajectory
            if record is not None and record.state is TrajectoryState.HELD:
                record.state, record.reason, slot.trajectory = TrajectoryState.DROPPED, Drop.CANCELLED.value, None
                s.journal.trajectory(record)
                s.payloads.release(record.seq, record.facts.n_bytes)
                s.journal.count("trajectories.held", -1)
                s.journal.count(f"trajectories.dropped.{Drop.CANCELLED.value}")
        if s.config.scorer.by_group:
            s.journal.effect(GivenUp(group.number))
        return stopped

    def _done(self) -> bool:
        return not self._waiting and all(g.state is GroupState.EVALUATED for g in self._groups())

    def _end(self, status: str) -> list[OrderRecord]:
        s, active = self._s, self.active
        assert active is not None
        groups = self._groups()
        result = self._result(active, groups, status)
        stopped: list[OrderRecord] = []
        for group in groups:
            if group.state is GroupState.EVALUATING:
                stopped += self._cancel(group, status)
            self._forget(group)
        self.active, self._waiting, self._wants = None, [], []
        self.last = result.as_json()
        value = result.value(self._section.metric)
        if self.best is not None and status == "complete" and self.best["of"] != active["shape"]:
            # other tasks, or played otherwise: not to be compared
            self._bests = []
        if status == "complete" and value is not None and (self.best is None or value > self.best["value"]):
            best = {
                "evaluation": result.number, "updates": result.updates, "policy_version": result.policy_version,
                "metric": self._section.metric, "value": value, "of": active["shape"],
            }  # fmt: skip
            self._bests.append(best)
        s.journal.count(f"evaluations.{status}")
        s.journal.effect(Evaluated(self.last))
        self._write()
        log.info("evaluation %d %s: score %s", result.number, status, result.score)
        return stopped

    def _result(self, active: Active, groups: list[GroupRecord], status: str) -> Result:
        threshold = self._section.success_threshold
        if threshold is None:
            threshold = self._s.config.replay.success_threshold
        played = {group.place_in_evaluation: _of(group) for group in groups}
        if self.tasks is not None and active["shape"] == self._shape():
            for place in self._waiting:
                played.setdefault(place, TaskResult(self.tasks.environment(place), (), missing=self._section.samples))
        records = [slot.trajectory for group in groups for slot in group.slots if slot.trajectory is not None]
        sampled = [r.facts for r in records if r.reward is not None and r.facts.n_sampled]
        return Result(
            active["number"],
            active["updates"],
            active["policy_version"],
            active["reason"],
            status,
            summarise([played[place] for place in sorted(played)], self._section.pass_at, threshold),
            (min(f.version_min for f in sampled), max(f.version_max for f in sampled)) if sampled else None,
            active["started_at"],
            self._s.wall,
            active["skipped"],
            {"success_threshold": threshold, **{k: v for k, v in active["shape"].items() if k != "tasks"}},
        )

    def _forget(self, group: GroupRecord) -> None:
        self._s.journal.forget_group(group.number)
        del self._s.groups[group.number]

    def _write(self) -> None:
        state = {
            "next": self._next, "begun": self._begun, "active": self.active, "last": self.last, "bests": self._bests,
        }  # fmt: skip
        self._s.journal.meta("evaluation", state)


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
