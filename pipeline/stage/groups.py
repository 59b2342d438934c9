"""Groups from admission to completion: slots that need an order, answers, scores, and the outcome of a complete group.

*consumes* admissions, answers, scores; *produces* slots to order, complete groups, cancelled groups. *waits for*:
nothing. A complete group whose rewards have zero variance is trained, dropped or replaced (``groups.zero_variance``).
While groups are cancelled because their rollouts fail, admission backs off, so that a broken environment does not cause
a flood of orders.
"""

from __future__ import annotations

import heapq
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from pipeline.schema.counters import Count
from pipeline.schema.record_file import Frames
from pipeline.stage.evaluation_rollouts import EvaluationRollouts
from pipeline.stage.group_records import RolloutOutcomes, SharedState, StagePart
from pipeline.stage.replay_groups import ReplayGroups
from pipeline.store.effects import Finished, GivenUp
from pipeline.store.records import (
    CancelReason,
    Drop,
    Facts,
    GroupRecord,
    GroupState,
    OrderRecord,
    OrderState,
    Slot,
    TrajectoryRecord,
    TrajectoryState,
)
from pipeline.store.replay_records import EQUAL_REWARDS, Planned

log = logging.getLogger(__name__)

REASON_CHARACTERS_MAX = 2000
"""Part of the reason of a failed rollout that is logged and stored."""


class GroupOutcome(StrEnum):
    """Decision about a finished group."""

    TRAIN = "train"
    DROP = "drop"
    REFILL = "refill"


class ZeroVarianceFilter(StagePart):
    """Bounds the groups that ``refill`` replaces: ``refill_max`` times ``groups_per_step`` groups for one update.

    A group is counted for the update that it would have gone to. Counts of updates to come are kept over restarts.
    """

    def __init__(self, shared: SharedState, refilled: Mapping[str, int] | None = None) -> None:
        super().__init__(shared)
        self._refilled = {int(update): count for update, count in (refilled or {}).items()}

    def decide(self, group: GroupRecord) -> GroupOutcome:
        """Decide, once, about a group that has just become complete. Decisions about zero variance are counted."""
        rule = self._config.groups
        estimator = self._config.advantage.estimator.name
        with_baseline = estimator == "remax" or ":" in estimator
        if not zero_variance(group, with_baseline=with_baseline):
            return GroupOutcome.TRAIN
        if rule.zero_variance == "drop":
            self._journal.count(Count.GROUPS_ZERO_VARIANCE_DROPPED)
            return GroupOutcome.DROP
        if rule.zero_variance == "refill" and self._may_refill():
            self._journal.count(Count.GROUPS_ZERO_VARIANCE_REFILLED)
            return GroupOutcome.REFILL
        self._journal.count(Count.GROUPS_ZERO_VARIANCE_KEPT)
        return GroupOutcome.TRAIN

    def _may_refill(self) -> bool:
        update, most = (
            self._staleness.update_ahead,
            self._config.groups.refill_max * self._staleness.rule.groups_per_step,
        )
        if self._refilled.get(update, 0) + 1 > most:
            return False
        self._refilled = {u: n for u, n in self._refilled.items() if u >= self._staleness.consumed}
        self._refilled[update] = self._refilled.get(update, 0) + 1
        self._journal.meta("refilled", {str(u): n for u, n in self._refilled.items()})
        return True


def zero_variance(group: GroupRecord, *, with_baseline: bool) -> bool:
    """True if all rewards that ``group`` may be trained with are equal: of fresh rollouts, of the stored trajectories
    it may be completed with, and of the greedy rollout where it is compared with that. One alone has none to be equal
    to."""
    rewards = [slot.trajectory.reward for slot in group.slots if slot.trajectory is not None]
    rewards += [replay.entry.reward for replay in group.replays]
    rewards += [group.baseline] if with_baseline and group.baseline is not None else []
    scored = [reward for reward in rewards if reward is not None]
    return len(scored) > 1 and max(scored) - min(scored) <= EQUAL_REWARDS


GROUPS_FREE = 4
"""Groups that may be given up one after another before new ones have to wait."""
WAIT_SECONDS = 0.25
WAIT_SECONDS_MAX = 15.0


@dataclass(slots=True)
class AdmissionBackoff:
    """Delays admission after failed groups. Pure; times are seconds of the caller's clock."""

    failures: int = 0
    """Groups given up since the last one that was completed."""
    until: float = 0.0
    reason: str = ""
    """Failure of the last rollout."""

    def failed(self, now: float) -> None:
        """A group was given up because its rollouts fail."""
        self.failures += 1
        if self.failures > GROUPS_FREE:
            doublings = min(self.failures - GROUPS_FREE - 1, 16)
            self.until = now + min(WAIT_SECONDS * 2.0**doublings, WAIT_SECONDS_MAX)

    def succeeded(self) -> None:
        """A group was completed."""
        self.failures, self.until = 0, 0.0

    def holds(self, now: float) -> bool:
        """True if new groups have to wait."""
        return now < self.until


class Groups(StagePart):
    """Every slot of an open group is in exactly one of: wants an order (pending), ordered (leased), answered."""

    def __init__(
        self,
        shared: SharedState,
        replays: ReplayGroups,
        zero_variance: ZeroVarianceFilter,
        evaluation: EvaluationRollouts,
        next_row_id: int,
    ) -> None:
        super().__init__(shared)
        self._replays, self._zero_variance, self._evaluation = replays, zero_variance, evaluation
        self._next_row_id = next_row_id
        self.outcomes = RolloutOutcomes(shared)
        self._pending: list[tuple[int, int, int]] = []
        self.given_up: list[tuple[GroupRecord, CancelReason]] = []
        """Groups to cancel, and why; the core empties it."""
        self.backoff = AdmissionBackoff()
        self.paused = ""
        """The reason for which no group is admitted; empty: none."""

    def restore(self) -> None:
        """Rebuild what is derived, from the groups in memory."""
        for group in self._records.values():
            if group.state is GroupState.COLLECTING:
                self._want_all(group)

    def plan(self, planned: Planned) -> GroupRecord:
        """Admit a new group (the caller has checked the capacity)."""
        number = self._records.take_number()
        admitted = self._staleness.admit(number)
        slots = [Slot() for _ in range(self._config.groups.n_rollout - planned.k)]
        group = self._records[number] = GroupRecord(number, planned.task, admitted, self._clock.wall, slots)
        self._replays.pin(group, planned.candidates, planned.k)
        if self._config.advantage.orders_greedy:
            group.greedy = Slot()
        self._journal.group(group)
        self._journal.count(Count.GROUPS_PLANNED)
        if group.slots:
            self._want_all(group)
        else:  # a stored group that came back whole
            group.state = GroupState.READY
            self._settle(group)
        return group

    def _want_all(self, group: GroupRecord) -> None:
        for index, slot in enumerate(group.slots):
            if not slot.leased and slot.trajectory is None:
                self.enqueue_slot(group, index)
        if group.greedy is not None and not group.greedy.leased and group.greedy.trajectory is None:
            self.enqueue_slot(group, group.greedy_index)

    def enqueue_slot(self, group: GroupRecord, slot: int) -> None:
        """The slot needs an order. Older groups are served first."""
        heapq.heappush(self._pending, (group.admitted_update, group.group_number, slot))

    def cancel_unplaced(self) -> None:
        """The store is an older copy: open groups that are not placed in an update yet may have been, and trained."""
        for group in self._records.values():
            if group.state in (GroupState.COLLECTING, GroupState.READY):
                self.given_up.append((group, CancelReason.RESTORED))

    def next_slot(self) -> tuple[GroupRecord, int] | None:
        """The most urgent slot that needs an order, or None."""
        while self._pending:
            _, number, index = heapq.heappop(self._pending)
            group = self._records.get(number)
            if group is not None and group.state is GroupState.COLLECTING:
                slot = group.slot(index)
                if not slot.leased and slot.trajectory is None:
                    return group, index
        return None

    def answered(self, order: OrderRecord, facts: Facts, frames: Frames, late: bool) -> TrajectoryRecord:
        """A usable trajectory came: hold it until it is scored."""
        group = self._records[order.key.group]
        record = self._record(order, facts)
        group.slot(order.key.slot).trajectory = record
        group.late |= late
        self._records.end_order(order, OrderState.DELIVERED)
        self._journal.trajectory(record, frames)
        self._journal.count(Count.TRAJECTORIES_HELD)
        self._payloads.arrived(record.row_id, facts.n_bytes)
        self._journal.group(group)
        if group.evaluation:
            self._evaluation.answered(group, record, frames)
        return record

    def scored(
        self,
        record: TrajectoryRecord,
        reward: float | None,
        rewards: Mapping[str, float | None],
        reason: str = "",
        cause: str = "",
    ) -> None:
        """The scorer's verdict on a held trajectory. ``reason``: why it has no reward; ``cause``: what is counted."""
        group = self._records.get(record.key.group)
        if group is None or record.state is not TrajectoryState.HELD or record.reward is not None:
            return
        record.reward, record.rewards = reward, dict(rewards)
        if reward is None:
            self.outcomes.failed(group.task.environment, reason, f"score: {cause or reason}")
            slot = group.slot(record.key.slot)
            slot.trajectory = None
            slot.failures += 1
            order = group.orders[record.key]
            order.failure = True
            self._journal.order(order)
            self._drop(record, Drop.UNSCORED)
            self._again(order)
            return
        self.outcomes.succeeded(group.task.environment)
        if group.evaluation:
            self._evaluation.scored(group, record)
            return
        if group.is_greedy(record.key):
            self._end_held(record, TrajectoryState.BASELINE)  # only its reward is kept
        self._journal.trajectory(record)
        if group.state is GroupState.COLLECTING and group.complete:
            group.state = GroupState.READY
            self.backoff.succeeded()
            self._replays.finished(group)
            self._settle(group)

    def _settle(self, group: GroupRecord) -> None:
        """A group is complete: it is trained, unless its rewards have zero variance."""
        outcome = self._zero_variance.decide(group)
        if outcome is GroupOutcome.REFILL:
            self.cancel(group, CancelReason.ZERO_VARIANCE)
            return
        if outcome is GroupOutcome.DROP:  # it stays assigned, so that its update is made without it
            self._replays.dropped(group)
            self._drop_held(group, Drop.ZERO_VARIANCE)
            group.dropped = True
        elif self._config.lessons.enabled and group.slots:
            self._journal.effect(Finished(group.group_id, tuple(t for slot in group.slots if (t := slot.trajectory))))
        self._journal.group(group)
        self._staleness.complete(group.group_number)

    def failed(self, order: OrderRecord, drop: Drop, facts: Facts | None, reason: str) -> None:
        """The rollout gave nothing to train; its slot is ordered again, or the group given up."""
        reason = reason[:REASON_CHARACTERS_MAX]
        aborted = drop is Drop.ABORTED
        if not aborted and not self._records[order.key.group].evaluation:
            self.backoff.reason = reason
        if not aborted:
            log.warning("rollout %s failed: %s", order.key.text, reason)
            self.outcomes.failed(self._records[order.key.group].task.environment, reason)
        if facts is not None:
            record = self._record(order, facts)
            record.state, record.reason = TrajectoryState.DROPPED, drop.value
            self._journal.trajectory(record)
        self._journal.count(Count(f"trajectories.dropped.{drop}"))
        self._records.end_order(
            order, OrderState.ABORTED if aborted else OrderState.FAILED, reason, failure=not aborted
        )
        self._again(order)

    def lost(self, order: OrderRecord, reason: str, *, failure: bool) -> None:
        """No answer will come to this order."""
        if failure:
            self.outcomes.failed(self._records[order.key.group].task.environment, reason)
        self._records.end_order(order, OrderState.EXPIRED, reason, failure=failure)
        self._again(order)

    def unscored(self, record: TrajectoryRecord) -> int:
        """Fresh slots of its group without a reward, its own and the open ones included."""
        group = self._records[record.key.group]
        return sum(
            slot.trajectory is None or slot.trajectory.reward is None
            for slot in group.slots
            if not (group.evaluation and slot.trajectory is None and self._evaluation.given_up(slot))
        )

    def cancel(self, group: GroupRecord, reason: CancelReason) -> list[OrderRecord]:
        """Give up an open group; returns the orders that actors must stop."""
        assert group.open, group
        self._replays.cancelled(group, finished=group.state is not GroupState.COLLECTING)
        group.state, group.reason, group.ended_at = GroupState.CANCELLED, reason.value, self._clock.wall
        group.dropped = False
        self._staleness.cancel(group.group_number)
        self._journal.group(group)
        self._journal.count(Count(f"groups.cancelled.{reason}"))
        stopped = self._records.cancel_orders(group, reason.value)
        if self._config.scorer.by_group:
            self._journal.effect(GivenUp(group.group_number))
        zero_variance = reason is CancelReason.ZERO_VARIANCE
        if zero_variance:
            self._replays.count_dropped(group)
        self._drop_held(group, Drop.ZERO_VARIANCE if zero_variance else Drop.CANCELLED)
        return stopped

    def _drop_held(self, group: GroupRecord, drop: Drop) -> None:
        for slot in group.all_slots:
            if slot.trajectory is not None and slot.trajectory.state is TrajectoryState.HELD:
                self._drop(slot.trajectory, drop)
                slot.trajectory = None

    def _again(self, order: OrderRecord) -> None:
        group = self._records[order.key.group]
        if group.evaluation:
            self._evaluation.again(order)
        if group.state is not GroupState.COLLECTING:
            return
        failures = group.slot(order.key.slot).failures
        if failures < self._config.groups.attempts_max:
            self.enqueue_slot(group, order.key.slot)
        else:
            log.warning("group %s: slot %d failed %d times; the group is cancelled", group.group_id, order.key.slot,
                        failures)  # fmt: skip
            self.given_up.append((group, CancelReason.ATTEMPTS))
            self.backoff.failed(self._clock.now)

    def _record(self, order: OrderRecord, facts: Facts) -> TrajectoryRecord:
        record = TrajectoryRecord(self._next_row_id, order.key, facts, self._clock.wall)
        record.age_insert = max(0, self._staleness.policy_version - facts.version_min) if facts.n_sampled else 0
        self._next_row_id += 1
        return record

    def _drop(self, record: TrajectoryRecord, drop: Drop) -> None:
        self._end_held(record, TrajectoryState.DROPPED, drop.value)
        if drop is Drop.ZERO_VARIANCE and record.reward is not None:
            facts = record.facts
            self._journal.audit("zero_variance", reward=record.reward, tokens=facts.n_sampled,
                                duration_seconds=facts.duration_seconds, age_versions=record.age_insert)  # fmt: skip
