"""The learner's side of the stage: assigns groups to updates, sends them, and records what was trained or rolled back.

*consumes* what the learner tells (``pipeline.stage.learner_control``) and complete groups; *produces* PLAN, DELIVERY
and CANCEL.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from pipeline.schema.counters import Count
from pipeline.schema.orders import encode_request
from pipeline.stage.group_records import SharedState, StagePart
from pipeline.stage.groups import Groups
from pipeline.stage.replay_groups import ReplayGroups, UpdateReport
from pipeline.store.effects import Send
from pipeline.store.records import (
    CancelReason,
    CoveredGroup,
    GroupRecord,
    GroupState,
    TrainedVersions,
    TrajectoryState,
    group_id,
    parse_group_id,
)
from pipeline.transport.messages import Kind

log = logging.getLogger(__name__)


class Dispatch(StagePart):
    """At most ``credit`` groups are at the learner and not consumed; a group keeps the update it was promised to.

    ``holds_back``: whether an update must wait although its groups are there (``evaluation.strict``).
    """

    def __init__(
        self,
        shared: SharedState,
        groups: Groups,
        replays: ReplayGroups,
        holds_back: Callable[[int], bool],
        meta: Mapping[str, Any],
    ) -> None:
        super().__init__(shared)
        self._groups, self._replays, self._holds_back = groups, replays, holds_back
        self.peer: str | None = None
        """Name of the learner that is connected."""
        self.durable_updates: int = meta.get("durable_updates", 0)
        self.checkpoints: list[int] = meta.get("checkpoints", [])
        """Updates of the newest ``checkpoint.keep`` checkpoints, which the learner keeps, oldest first."""
        self._versions = TrainedVersions(meta.get("trained_versions"))
        self.credit = 0
        self.sent: set[int] = set()
        """Groups that the connected learner has."""
        self._starved_since: float | None = None

    def up(self, name: str, credit_groups: int) -> None:
        """The learner is connected; until :meth:`hold` it is not known what it has."""
        self.peer, self.sent, self._starved_since = name, set(), None
        self.credit = max(credit_groups, self._staleness.rule.groups_per_step)

    def hold(self, groups: Iterable[int]) -> set[int]:
        """The learner has these groups; returns those that it should keep. The others are sent again or not at all."""
        self.sent = {number for number in groups if number in self._staleness.placed}
        return self.sent

    def down(self, name: str) -> None:
        if name == self.peer:
            self.peer, self.sent, self._starved_since = None, set(), None

    def version(self, policy_version: int, updates: int) -> None:
        """Weights with ``updates`` updates are live as ``policy_version``: this is what admits new groups."""
        if policy_version < self._staleness.policy_version:
            log.warning(
                "VERSION %d after %d is ignored: versions only increase", policy_version, self._staleness.policy_version
            )
            return
        self._staleness.policy_version, self._staleness.live = policy_version, updates
        self._staleness.learner_starts = 0
        self._journal.meta("policy_version", policy_version)
        self._journal.meta("live", updates)
        self._replays.published()

    def send_groups(self) -> list[GroupRecord]:
        """Send groups while credits last; returns groups that are too late and must be dropped."""
        if self.peer is None:
            return []
        for number, _ in sorted(
            ((n, u) for n, u in self._staleness.placed.items() if n not in self.sent), key=lambda p: (p[1], p[0])
        ):
            if len(self.sent) >= self.credit:
                return []
            if self._holds_back(self._staleness.placed[number]):
                break
            self._send(self._records[number])
        dropped = []
        while len(self.sent) < self.credit and (placement := self._staleness.place_next()) is not None:
            group = self._records[placement.group]
            group.state, group.update = GroupState.PLACED, placement.update
            group.late |= placement.late
            self._journal.group(group)
            if group.late and not group.dropped:
                self._journal.count(Count.GROUPS_LATE)
                self._journal.count(Count.TRAJECTORIES_LATE, group.n_fresh)
                if self._config.staleness.late == "drop":
                    self._journal.count(Count.TRAJECTORIES_STALE, group.n_fresh)
                    dropped.append(group)
                    continue
            if not self._holds_back(placement.update):
                self._send(group)
        if len(self.sent) < self.credit and self._starved_since is None:
            self._starved_since = self._clock.now
        return dropped

    def _send(self, group: GroupRecord) -> None:
        assert self.peer is not None
        self.sent.add(group.group_number)
        waited = 0.0 if self._starved_since is None else self._clock.now - self._starved_since
        self._journal.observe("sample_wait_seconds", waited)
        self._starved_since = None
        self._journal.effect(Send(self.peer, Kind.PLAN, {**encode_request(group.plan()), "update": group.update}))
        if group.dropped:
            return
        for index, record in enumerate(self._members(group)):
            record.samples += 1
            self._journal.trajectory(record)
            about = {"trajectory_id": record.key.text, "reward": record.reward, "rewards": dict(record.rewards)}
            self._deliver(group, index, record.row_id, about)
            self._journal.observe("item_age_seconds", self._clock.wall - record.received_at)
            staleness = max(0, self._staleness.policy_version - record.facts.version_min)
            self._journal.observe("staleness_versions", staleness, "sample")
        for index, replay in enumerate(group.replays, group.n_fresh):
            about = {"trajectory_id": replay.entry.trajectory_id, "reward": replay.entry.reward, "rewards": {}}
            self._deliver(group, index, replay.entry.row_id, {**about, "replay": self._replays.sent(replay)})
        if group.replays:
            self._journal.replays(group)

    def _deliver(self, group: GroupRecord, index: int, row_id: int, about: dict[str, Any]) -> None:
        assert self.peer is not None
        header = {"group_id": group.group_id, "index": index, **about}
        self._journal.effect(Send(self.peer, Kind.DELIVERY, header, payload=row_id))
        self._journal.count(Count.TRAJECTORIES_SENT)

    def _members(self, group: GroupRecord) -> list[Any]:
        records = [slot.trajectory for slot in group.slots]
        assert all(r is not None for r in records), group
        return records

    def consumed(self, update: int, ids: Sequence[str], report: UpdateReport) -> None:
        """The learner made ``update`` from these groups. Repeating it changes nothing."""
        named = {number for text in ids if (number := parse_group_id(text)) is not None}
        members = [
            g
            for n in named
            if (g := self._records.get(n)) is not None and g.state is GroupState.PLACED and g.update == update
        ]
        self._train(members, report)
        # a checkpoint may name updates that were acknowledged after it was written, and their groups are not kept
        forgotten = update < self.durable_updates
        strange = [
            n for n in named if not (g.consumed and g.update == update if (g := self._records.get(n)) else forgotten)
        ]
        if strange:
            self._journal.count(Count.LEARNER_CONSUMED_UNKNOWN, len(strange))
            log.warning("update %d was made from unplanned groups: %s", update, list(map(group_id, strange)))
        if update >= self._staleness.consumed:
            placed = [self._records[n] for n, u in self._staleness.placed.items() if u == update]
            for group in placed:
                if group.state is GroupState.PLACED:
                    self._groups.cancel(group, CancelReason.UNTRAINED)
                    self.cancelled(group)
        self._made(update, [g.group_number for g in members])

    def _made(self, update: int, groups: list[int]) -> None:
        self._staleness.consume(update, groups)
        self.sent.difference_update(groups)
        self._journal.meta("consumed", self._staleness.consumed)

    def _train(self, groups: Sequence[GroupRecord], report: UpdateReport) -> None:
        """One update was made from ``groups``."""
        if not groups:
            return
        update = groups[0].update
        assert update is not None, groups[0]
        version = self._staleness.policy_version if report.policy_version is None else report.policy_version
        if self._versions.note(update, version):
            self._journal.meta("trained_versions", self._versions.state())
        for group in [g for g in groups if g.dropped]:
            group.state, group.ended_at = GroupState.ZERO_VARIANCE, self._clock.wall
            self._journal.group(group)
            self._journal.count(Count.GROUPS_ZERO_VARIANCE)
        groups = [g for g in groups if not g.dropped]
        for group in groups:
            group.state, group.ended_at = GroupState.TRAINED, self._clock.wall
            self._journal.group(group)
            self._journal.count(Count.GROUPS_TRAINED)
            for record in self._members(group):
                record.state = TrajectoryState.TRAINED
                self._journal.trajectory(record)
                facts, age = record.facts, max(0, version - record.facts.version_min)
                self._journal.audit("trained", reward=record.reward, tokens=facts.n_sampled,
                                    duration_seconds=facts.duration_seconds, age_versions=age)  # fmt: skip
            self._journal.count(Count.TRAJECTORIES_HELD, -group.n_fresh)
            self._journal.count(Count.TRAJECTORIES_TRAINED, group.n_fresh)
        self._replays.trained(update, groups, report, version)

    def checkpointed(self, updates: int) -> None:
        """Everything before update ``updates`` is safe at the learner: forget it, but for ``replay.keep_trained``."""
        self.durable_updates = max(self.durable_updates, updates)
        self._journal.meta("durable_updates", self.durable_updates)
        self._replays.replay.covered(updates)
        known = sorted({*self.checkpoints, updates})
        self.checkpoints = known[-self._config.checkpoint.keep :]
        self._journal.meta("checkpoints", self.checkpoints)
        for group in list(self._records.values()):
            if group.state is GroupState.CANCELLED and group.admitted_update < updates:
                self.forget(group)
        self.free_covered(self._config.replay.keep_trained)

    def free_covered(self, keep_updates: int) -> bool:
        """Forget groups that a checkpoint covers, but those of at least ``keep_updates`` updates before it, back to an
        older checkpoint that the learner can begin with, up to ``replay.capacity_bytes``. True where some were."""
        begun = self.durable_updates <= keep_updates + self._config.checkpoint.every  # so the initial model may do
        starts = [0, *self.checkpoints] if begun else self.checkpoints
        old_enough = [start for start in starts if start <= self.durable_updates - keep_updates]
        oldest = max(old_enough, default=min(starts, default=0))
        covered: dict[int, list[GroupRecord]] = {}
        for group in self._records.values():
            if group.consumed and group.update is not None and group.update < self.durable_updates:
                covered.setdefault(group.update, []).append(group)
        n_bytes, freed = 0, False
        for update, groups in sorted(covered.items(), reverse=True):
            n_bytes += sum(group.n_bytes for group in groups)
            if update < oldest or n_bytes > self._config.replay.capacity_bytes:
                freed = True
                for group in groups:
                    self.forget(group)
        return freed

    def cancelled(self, group: GroupRecord) -> None:
        """A group that the learner may have was cancelled."""
        if group.group_number in self.sent:
            self.sent.discard(group.group_number)
            if self.peer is not None:
                header = {"group_ids": [group.group_id], "reason": group.reason}
                self._journal.effect(Send(self.peer, Kind.CANCEL, header))

    def cancel_placed(self) -> None:
        """The store is an older copy that does not know the learner: placed groups may have been trained as part of
        other updates than it says. They are given up."""
        for number in list(self._staleness.placed):
            group = self._records[number]
            if group.state is GroupState.PLACED:
                log.warning("group %s is given up: it may have been trained since the store was copied", group.group_id)
                self._groups.cancel(group, CancelReason.RESTORED)
                self.cancelled(group)

    def agree(self, updates: int) -> None:
        """A new learner process starts from weights of ``updates`` updates."""
        self._staleness.learner_starts += 1
        if updates > self._staleness.consumed:
            log.warning("the learner has made %d updates, the store knows %d: it is an older copy. Groups that may "
                        "have been trained since are given up", updates, self._staleness.consumed)  # fmt: skip
            self._groups.cancel_unplaced()
        done: dict[int, list[GroupRecord]] = {}
        for number, update in self._staleness.placed.items():
            if update < updates:
                done.setdefault(update, []).append(self._records[number])
        for update, groups in sorted(done.items()):
            self._train(groups, UpdateReport())
            self._made(update, [group.group_number for group in groups])
        again = {}
        for group in self._records.values():
            if group.consumed and group.update is not None and group.update >= updates:
                self._untrain(group)
                again[group.group_number] = group.update
        if self._staleness.consumed > updates:
            log.warning("the learner continues from %d updates, %d were made: %d groups are trained again",
                        updates, self._staleness.consumed, len(again))  # fmt: skip
            self._replays.replay.roll_back(updates)
        lost = {number: group for number, group in self._records.covered.items() if group.update >= updates}
        for number, covered in lost.items():
            self._lose(number, covered)
        if lost:
            log.warning("%d groups were freed when a checkpoint covered them, and it is not there any more: others are "
                        "played in their place", len(lost))  # fmt: skip
        self._staleness.roll_back(updates, again)
        self._close_gaps()
        self.durable_updates = min(self.durable_updates, updates)
        self.checkpoints = [made for made in self.checkpoints if made <= updates]
        self._journal.meta("consumed", self._staleness.consumed)
        self._journal.meta("live", self._staleness.live)

    def _close_gaps(self) -> None:
        """Groups placed behind an update whose own groups are not known any more (the store is an older copy) are free
        for that update."""
        gap = self._staleness.first_gap
        for number, update in list(self._staleness.placed.items()):
            if gap is not None and update > gap:
                group = self._records[number]
                group.state, group.update = GroupState.READY, None
                self._staleness.cancel(number)
                self._staleness.restore(number, group.admitted_update, ready=True)
                self._journal.group(group)

    def _untrain(self, group: GroupRecord) -> None:
        self._journal.count(Count.GROUPS_ZERO_VARIANCE if group.dropped else Count.GROUPS_TRAINED, -1)
        group.state, group.ended_at = GroupState.PLACED, None
        self._journal.group(group)
        self._journal.count(Count.GROUPS_ROLLED_BACK)
        if group.dropped:
            return
        for record in self._members(group):
            record.state = TrajectoryState.HELD
            self._journal.trajectory(record)
        self._journal.count(Count.TRAJECTORIES_HELD, group.n_fresh)
        self._journal.count(Count.TRAJECTORIES_TRAINED, -group.n_fresh)
        self._journal.count(Count.TRAJECTORIES_ROLLED_BACK, group.n_fresh)
        self._replays.untrained(group)

    def _lose(self, number: int, group: CoveredGroup) -> None:
        """No weights have a group any more that a checkpoint covered: it does not count as trained."""
        del self._records.covered[number]
        self._journal.lose_group(number)
        self._journal.count(Count.GROUPS_ZERO_VARIANCE if group.dropped else Count.GROUPS_TRAINED, -1)
        self._journal.count(Count.GROUPS_ROLLED_BACK)
        self._journal.count(Count.GROUPS_CANCELLED_LOST)
        if not group.dropped:
            self._journal.count(Count.TRAJECTORIES_TRAINED, -group.n_fresh)
            self._journal.count(Count.TRAJECTORIES_ROLLED_BACK, group.n_fresh)
            self._journal.count(Count.TRAJECTORIES_DROPPED_CANCELLED, group.n_fresh)
            self._journal.count(Count.REPLAYS_TRAINED, -group.k)
            self._journal.count(Count.REPLAYS_ROLLED_BACK, group.k)

    def forget(self, group: GroupRecord) -> None:
        """Free what is kept of an ended group."""
        for slot in group.slots:
            if slot.trajectory is not None:
                self._payloads.release(slot.trajectory.row_id, slot.trajectory.facts.n_bytes)
                self._journal.observe("item_samples", slot.trajectory.samples)
        if group.state is GroupState.TRAINED:
            self._replays.unpin(group)
        if group.consumed and group.update is not None:
            covered = CoveredGroup(group.update, group.dropped, group.n_fresh, group.k)
            self._records.covered[group.group_number] = covered
        self._journal.forget_group(group.group_number)
        del self._records[group.group_number]
