"""Admission of trajectories that arrive: expected ones are stored and scored, all others are acknowledged or refused.

*consumes* TRAJECTORY messages and verdicts; *produces* acknowledgements, refusals, :class:`Score` effects. The bytes of
a trajectory are decoded and validated once. The queue between the loop and the scorer is bounded by admission.
"""

from __future__ import annotations

import logging
from collections import OrderedDict, deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Generic, TypeVar

import anyio

from pipeline.errors import LimitExceeded, SchemaError, VersionMismatch, WireError
from pipeline.runtime.disk import when_room
from pipeline.schema import Task, Trajectory, TrajectoryStatus
from pipeline.schema.codec import Limits, decode_trajectory
from pipeline.schema.counters import Count
from pipeline.schema.record_file import Buffer, Frames
from pipeline.scorer.scorer import Scorer
from pipeline.scorer.verdict import Verdict
from pipeline.stage.group_records import SharedState, StagePart
from pipeline.stage.groups import Groups
from pipeline.stage.leases import Leases
from pipeline.store.effects import Score, UntrainedRollout
from pipeline.store.records import Drop, Facts, OrderKey, OrderRecord, OrderState, TrajectoryRecord, facts_of, group_id
from pipeline.store.store import ReplayStore

log = logging.getLogger(__name__)

REWARD_BYTES = 32
"""Bytes of a number in a header, with what separates it from the next."""


@dataclass(frozen=True, slots=True)
class Arrival:
    """A valid trajectory. ``drop``: the reason for which it is not trained, if any."""

    trajectory: Trajectory
    facts: Facts
    drop: Drop | None = None


@dataclass(frozen=True, slots=True)
class Unreadable:
    """Bytes that are not the ordered trajectory, or cannot be one of this run."""

    drop: Drop
    reason: str


def examine(frames: Sequence[Buffer], limits: Limits, key: OrderKey, task: Task) -> Arrival | Unreadable:
    """Decode and validate once; arrays stay views on ``frames``, laid out as in ``schema.codec``."""
    try:
        trajectory = decode_trajectory(frames, limits)
    except (SchemaError, VersionMismatch) as error:
        return Unreadable(Drop.SCHEMA, str(error))
    except (WireError, LimitExceeded) as error:
        return Unreadable(Drop.CORRUPT, str(error))
    signals = sum(len(name) + REWARD_BYTES for name in trajectory.rewards)
    if signals > limits.header_bytes_max // 2:
        reason = f"expected rewards that fit DELIVERY's header of {limits.header_bytes_max} bytes, got {signals} bytes"
        return Unreadable(Drop.CORRUPT, reason)
    expected = (key.text, group_id(key.group), task.task_id)
    came = (trajectory.trajectory_id, trajectory.group_id, trajectory.task.task_id)
    if came != expected:
        return Unreadable(Drop.CORRUPT, f"expected trajectory, group and task {expected}, got {came}")
    facts = facts_of(trajectory, frames)
    aborted = trajectory.status is TrajectoryStatus.ABORTED
    return Arrival(trajectory, facts, Drop.ABORTED if aborted else None if trajectory.usable else Drop.FAILED)


ScoreNow = Callable[[Trajectory], Verdict]

_ENDED = {OrderState.EXPIRED: Drop.EXPIRED, OrderState.CANCELLED: Drop.CANCELLED}

_UNREADABLE = (f"{Drop.CORRUPT}: ", f"{Drop.SCHEMA}: ", f"{Drop.UNPUBLISHED}: ")


class Ingest(StagePart):
    """Counts every arriving trajectory once as received, and once by its outcome."""

    def __init__(self, shared: SharedState, groups: Groups, leases: Leases, score_now: ScoreNow | None) -> None:
        super().__init__(shared)
        self._groups, self._leases, self._score_now = groups, leases, score_now
        self._limits = Limits.of(self._config)

    def accept(self, actor: str, trajectory_id: object, frames: Frames) -> None:
        """One TRAJECTORY message."""
        self._journal.count(Count.TRAJECTORIES_RECEIVED)
        key = OrderKey.parse(trajectory_id)
        order = self._records.find_order(key) if key else None
        name = str(trajectory_id)
        if order is None or order.state is not OrderState.LEASED or order.actor != actor:
            self._unexpected(actor, name, key, order)
            return
        seen = examine(frames, self._limits, order.key, self._records[order.key.group].task)
        self._leases.ended([order])
        if isinstance(seen, Arrival) and seen.facts.version_max > self._staleness.version_max:
            seen = Unreadable(
                Drop.UNPUBLISHED,
                f"expected policy versions up to {self._staleness.version_max}, got tokens of "
                f"{seen.facts.version_max}: no learner of this run can have published it",
            )
        if isinstance(seen, Unreadable):
            reason = f"{seen.drop.value}: {seen.reason}"
            self._journal.refuse(actor, name, reason)
            self._groups.failed(order, seen.drop, None, reason)
            return
        self._journal.ack(actor, name)
        self._leases.answered(actor)
        if seen.drop is not None:
            failure = seen.trajectory.failure
            reason = (
                f"{failure.boundary}: {failure.kind}: {failure.message}" if failure else "nothing to train was sampled"
            )
            self._groups.failed(order, seen.drop, seen.facts, reason)
            self._journal.effect(UntrainedRollout(name, frames, self._clock.wall))
        else:
            if late := seen.facts.version_min < order.policy_version:
                log.warning("trajectory %s was sampled by version %d, ordered from %d on", name,
                            seen.facts.version_min, order.policy_version)  # fmt: skip
            self._hold(seen.trajectory, self._groups.answered(order, seen.facts, frames, late))

    def scored(self, record: TrajectoryRecord, verdict: Verdict) -> None:
        """The scorer's answer to a :class:`Score` effect."""
        reason = cause = ""
        if verdict.reward is not None:
            if not self._excluded_from_audit(record):
                self._journal.audit("sampled", reward=verdict.reward)
        else:
            reason = "; ".join(f.details for f in verdict.failures) or "no value"
            cause = verdict.failures[0].cause if verdict.failures else ""
            log.warning("trajectory %s has no reward: %s: %s", record.key.text, cause, reason)
            if not self._excluded_from_audit(record):
                self._groups.backoff.reason = f"score: {cause}: {reason}"
        self._groups.scored(record, verdict.reward, verdict.rewards, reason, cause)

    def _hold(self, trajectory: Trajectory, record: TrajectoryRecord) -> None:
        self._journal.inserted(trajectory.task.environment)
        if not self._excluded_from_audit(record):
            facts = record.facts
            staleness = max(0, self._staleness.policy_version - facts.version_min)
            self._journal.observe("staleness_versions", staleness, "insert")
            self._journal.audit("sampled", tokens=facts.n_sampled, duration_seconds=facts.duration_seconds,
                                age_versions=record.age_insert)  # fmt: skip
        if self._score_now is not None:
            self.scored(record, self._score_now(trajectory))
        else:
            self._journal.effect(Score(record, trajectory, self._groups.unscored(record)))

    def _excluded_from_audit(self, record: TrajectoryRecord) -> bool:
        """Greedy rollouts and evaluations are never meant to be trained: the bias audit does not compare with them."""
        group = self._records.get(record.key.group)
        return group is not None and (group.evaluation or group.is_greedy(record.key))

    def _unexpected(self, actor: str, trajectory_id: str, key: OrderKey | None, order: OrderRecord | None) -> None:
        """An answer to an order that is not open, or another actor's: acknowledged again if it is here, refused
        otherwise."""
        drop = self._why_unexpected(key, order)
        self._journal.count(Count(f"trajectories.dropped.{drop}"))
        if drop is Drop.DUPLICATE:
            self._journal.ack(actor, trajectory_id)
        else:
            self._journal.refuse(actor, trajectory_id, drop.value)

    def _why_unexpected(self, key: OrderKey | None, order: OrderRecord | None) -> Drop:
        if order is not None and order.state is OrderState.LEASED:
            return Drop.UNKNOWN
        if order is not None:
            if order.state is OrderState.FAILED and order.reason.startswith(_UNREADABLE):
                return Drop(order.reason.split(":")[0])
            return _ENDED.get(order.state, Drop.DUPLICATE)
        forgotten = key is not None and key.group < self._records.next_group and key.group not in self._records
        return Drop.ENDED if forgotten else Drop.UNKNOWN


T = TypeVar("T")

ENDED_MAX = 65_536
"""Ended groups that are remembered, so that what still comes of them is not kept."""


class GroupGate(Generic[T]):
    """*consumes* members; *produces* a group's members once all are here. Bounded by what admission lets in."""

    def __init__(self) -> None:
        self._groups: dict[int, dict[int, T]] = {}
        self._ended: OrderedDict[int, None] = OrderedDict()

    def __len__(self) -> int:
        """Members that wait."""
        return sum(map(len, self._groups.values()))

    def put(self, group: int, row_id: int, member: T, n: int) -> list[T] | None:
        """Keep one; all members, by ``row_id``, once there are ``n``."""
        if group in self._ended:
            return None
        members = self._groups.setdefault(group, {})
        members[row_id] = member
        return [members[s] for s in sorted(members)] if len(members) >= n else None

    def drop(self, group: int, row_ids: set[int]) -> None:
        """These members have failed: others will replace them."""
        members = self._groups.get(group, {})
        for row_id in row_ids & members.keys():
            del members[row_id]

    def end(self, group: int) -> None:
        """The group is scored, or was given up."""
        self._groups.pop(group, None)
        self._ended[group] = None
        while len(self._ended) > ENDED_MAX:
            self._ended.popitem(last=False)


Verdicts = Sequence[tuple[TrajectoryRecord, Verdict]]
"""Verdicts that are committed together."""


@dataclass(frozen=True, slots=True)
class _Member:
    record: TrajectoryRecord
    trajectory: Trajectory
    verdict: Verdict


class Scoring:
    """*consumes* :class:`Score` effects; *produces* verdicts through ``deliver``; ``concurrency`` at once.

    Where a function must see a whole group, its verdicts are delivered together, once all of them are numbers: what is
    delivered together is committed together, so a restart finds a group scored or not.
    """

    def __init__(
        self,
        scorer: Scorer,
        store: ReplayStore,
        limits: Limits,
        concurrency: int,
        deliver: Callable[[Verdicts], Awaitable[None]],
    ) -> None:
        self._scorer, self._store, self._limits, self._deliver = scorer, store, limits, deliver
        self._slots = anyio.CapacityLimiter(concurrency)
        self._gate: GroupGate[_Member] = GroupGate()
        self._queue: deque[Score] = deque()
        self._wake = anyio.Event()

    def put(self, effect: Score) -> None:
        self._queue.append(effect)
        self._wake.set()

    def forget(self, group: int) -> None:
        """The group was given up."""
        self._gate.end(group)

    async def run(self) -> None:
        """Until cancelled; what is not scored then is scored by the next process."""
        async with anyio.create_task_group() as group:
            while True:
                if not self._queue:
                    self._wake = anyio.Event()
                    await self._wake.wait()
                effect = self._queue.popleft()
                await self._slots.acquire_on_behalf_of(effect.record.row_id)
                group.start_soon(self._one, effect)

    async def _one(self, effect: Score) -> None:
        try:
            trajectory = effect.trajectory
            if trajectory is None:
                read = partial(self._store.payloads, [effect.record.row_id])
                frames = await when_room(read, self._store.path, "the scoring of a rollout")
                if effect.record.row_id not in frames:
                    return
                trajectory = decode_trajectory(frames[effect.record.row_id], self._limits)
            verdict = await self._scorer.score(trajectory)
        finally:
            self._slots.release_on_behalf_of(effect.record.row_id)
        if verdict.reward is None or not self._scorer.needs_group(trajectory.task.environment):
            await self._deliver([(effect.record, verdict)])
            return
        member = _Member(effect.record, trajectory, verdict)
        members = self._gate.put(effect.record.key.group, effect.record.row_id, member, effect.members)
        if members is not None:
            await self._together(effect.record.key.group, members)

    async def _together(self, group: int, members: Sequence[_Member]) -> None:
        verdicts = await self._scorer.score_group([m.trajectory for m in members], [m.verdict for m in members])
        scored = [(member.record, verdict) for member, verdict in zip(members, verdicts, strict=True)]
        failed = [(record, verdict) for record, verdict in scored if verdict.reward is None]
        if failed:
            self._gate.drop(group, {record.row_id for record, _ in failed})
            await self._deliver(failed)
        else:
            self._gate.end(group)
            await self._deliver(scored)
