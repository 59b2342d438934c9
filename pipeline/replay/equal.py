"""What becomes of a finished group whose rewards are all equal (``groups.equal_rewards``): it teaches nothing.

*consumes* finished groups and the place they would take; *produces* the decision to train, drop or replace each, and
its count. *waits for*: nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum

from pipeline.replay.records import GroupRecord
from pipeline.replay.state import StageState

TOLERANCE = 1e-9
"""Rewards closer than this are equal: advantages of groups so narrow are noise of the scorer's arithmetic."""


class Fate(StrEnum):
    """What becomes of a finished group."""

    TRAIN = "train"
    DROP = "drop"
    REFILL = "refill"


class EqualRewards:
    """Bounds what ``refill`` replaces: ``refill_max`` times ``groups_per_step`` groups for one update.

    A group is counted for the update that it would have gone to. Counts of updates to come are kept over restarts.
    """

    def __init__(self, state: StageState, refilled: Mapping[str, int] | None = None) -> None:
        self._s = state
        self._refilled = {int(update): count for update, count in (refilled or {}).items()}

    def fate(self, group: GroupRecord) -> Fate:
        """Decide, once, about a group that has just become complete. Counts what it decides about equal rewards."""
        s = self._s
        rule = s.config.groups
        with_baseline = s.config.advantage.estimator == "remax" or ":" in s.config.advantage.estimator
        if not equal(group, with_baseline=with_baseline):
            return Fate.TRAIN
        if rule.equal_rewards == "drop":
            s.journal.count("groups.equal_dropped")
            return Fate.DROP
        if rule.equal_rewards == "refill" and self._may_refill():
            s.journal.count("groups.equal_refilled")
            return Fate.REFILL
        s.journal.count("groups.equal_kept")
        return Fate.TRAIN

    def _may_refill(self) -> bool:
        s = self._s
        update, most = s.batches.update_ahead, s.config.groups.refill_max * s.batches.rule.groups_per_step
        if self._refilled.get(update, 0) + 1 > most:
            return False
        self._refilled = {u: n for u, n in self._refilled.items() if u >= s.batches.consumed}
        self._refilled[update] = self._refilled.get(update, 0) + 1
        s.journal.meta("refilled", {str(u): n for u, n in self._refilled.items()})
        return True


def equal(group: GroupRecord, *, with_baseline: bool) -> bool:
    """Whether all rewards that ``group`` may be trained with are equal: of fresh rollouts, of the stored trajectories
    it may be completed with, and of the greedy rollout where it is compared with that. One alone has none to be equal
    to."""
    rewards = [slot.trajectory.reward for slot in group.slots if slot.trajectory is not None]
    rewards += [replay.candidate.entry.reward for replay in group.replays]
    rewards += [group.baseline] if with_baseline and group.baseline is not None else []
    known = [reward for reward in rewards if reward is not None]
    return len(known) > 1 and max(known) - min(known) <= TOLERANCE
