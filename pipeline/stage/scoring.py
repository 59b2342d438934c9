"""Queue between the loop and the scorer, and the gate that holds trajectories until their group is complete.

Bounded by admission. The gate is used where a reward function must see all trajectories of a group.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Generic, TypeVar

import anyio

from pipeline.runtime.disk_wait import when_room
from pipeline.schema import Trajectory
from pipeline.scorer.scorer import Scorer
from pipeline.scorer.verdict import Verdict
from pipeline.store.journal import Score
from pipeline.store.records import TrajectoryRecord
from pipeline.store.store import ReplayStore
from pipeline.transport.codec import decode_trajectory
from pipeline.transport.messages import Limits

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


Deliver = Callable[[Sequence[tuple[TrajectoryRecord, Verdict]]], Awaitable[None]]


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

    def __init__(self, scorer: Scorer, store: ReplayStore, limits: Limits, concurrency: int, deliver: Deliver) -> None:
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
