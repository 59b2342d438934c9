"""What the groups of an earlier process are worth to this one, whose run file may be another."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from pipeline.replay.dispatch import Dispatch
from pipeline.replay.groups import Groups
from pipeline.replay.journal import Score
from pipeline.replay.records import CancelReason, GroupRecord, GroupState, Slot
from pipeline.replay.state import StageState

Cancel = Callable[[GroupRecord, CancelReason], None]


def restore_batches(state: StageState) -> None:
    """Groups take the places in updates that they had."""
    for group in state.groups.values():
        if group.state is GroupState.PLACED:
            assert group.update is not None
            state.batches.restore_placed(group.number, group.update)
        elif group.open:
            state.batches.restore(group.number, group.admitted_update, ready=group.state is GroupState.READY)


def reconcile(
    state: StageState, meta: Mapping[str, Any], groups: Groups, learner: Dispatch, cancel: Cancel, *, lost: bool
) -> None:
    """Cancel what cannot be trained any more, and have scored what has no reward yet.

    ``lost``: the stage went back to an older copy, so what became of open groups is not known."""
    config = state.config
    shape = {"n_rollout": config.groups.n_rollout, "groups_per_step": config.groups.groups_per_step}
    if meta.get("shape") not in (None, shape):
        _reshape(state, learner, cancel, all_groups=meta["shape"]["groups_per_step"] != shape["groups_per_step"])
    if meta.get("shape") != shape:
        state.journal.meta("shape", shape)
    for group in [g for g in state.groups.values() if g.open]:
        without = config.advantage.orders_greedy and group.greedy is None
        if lost:
            cancel(group, CancelReason.LOST)
        elif group.task.environment not in config.environments:
            cancel(group, CancelReason.RECONFIGURED)
        elif without and group.state is GroupState.PLAYING:
            group.greedy = Slot()
            groups.want(group, group.greedy_index)
        elif without:
            cancel(group, CancelReason.RECONFIGURED)
    for group in state.groups.values():
        for slot in group.places:
            if slot.trajectory is not None and slot.trajectory.reward is None:
                state.journal.effect(Score(slot.trajectory, members=groups.unscored(slot.trajectory)))


def _reshape(state: StageState, learner: Dispatch, cancel: Cancel, *, all_groups: bool) -> None:
    """The run file changed what a batch is: groups of the old kind cannot be trained any more."""
    for group in list(state.groups.values()):
        if all_groups or group.n_rollout != state.config.groups.n_rollout:
            if group.open:
                cancel(group, CancelReason.RECONFIGURED)
            elif group.consumed:
                learner.forget(group)
