"""Assembly of groups from PLAN, DELIVERY and CANCEL messages: a pure state machine without sockets or clocks.

*consumes* plans and scored trajectories in any order of arrival inside a connection, repeated after a reconnection;
*produces* the ``groups_per_step`` groups of each update once, with all candidates that the plan names; *waits for* the
missing deliveries, or a CANCEL and the plan of another group.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from learner.data.groups import Group, StoredRollout
from pipeline.errors import TrainingError
from pipeline.schema import GroupPlan, Trajectory


@dataclass(frozen=True, slots=True)
class Progress:
    """Groups and trajectories that an update has, and needs."""

    update: int
    complete: int
    """Groups that hold all of their trajectories."""
    needed: int
    trajectories: int
    """Trajectories held for the update, those of complete groups included."""


@dataclass(slots=True)
class _PlannedGroup:
    plan: GroupPlan
    update: int
    members: dict[int, Trajectory] = field(default_factory=dict)
    stored_rollouts: dict[str, StoredRollout] = field(default_factory=dict)
    in_training: bool = False

    @property
    def complete(self) -> bool:
        return len(self.members) == self.plan.delivered

    def planned(self, index: int) -> str | None:
        """The id that the plan names for this index; None: any fresh trajectory."""
        pool = self.plan.candidates or self.plan.replay_ids
        return None if index < self.plan.n_fresh else pool[index - self.plan.n_fresh]


class GroupAssembler:
    """Collects the groups of coming updates."""

    def __init__(self, groups_per_step: int) -> None:
        self._groups_per_step = groups_per_step
        self._groups: dict[str, _PlannedGroup] = {}

    def plan(self, plan: GroupPlan, update: int) -> None:
        """Add a planned group of ``update``. A repeated plan changes nothing but its update, which the stage decides.

        Raises :class:`TrainingError` when another plan is known under the same id, or the update has its groups
        already.
        """
        group = self._groups.get(plan.group_id)
        if group is not None:
            if group.plan.n_rollout != plan.n_rollout or group.plan.task.task_id != plan.task.task_id:
                raise TrainingError(f"expected one plan under the id {plan.group_id}, got {group.plan} and then {plan}")
            if not group.in_training:
                group.update = update
            return
        if len(self._of(update)) >= self._groups_per_step:
            raise TrainingError(
                f"expected {self._groups_per_step} groups for update {update}, got one more ({plan.group_id}): "
                "learner and replay stage must read the same run file"
            )
        self._groups[plan.group_id] = _PlannedGroup(plan, update)

    def deliver(
        self,
        group_id: str,
        index: int,
        trajectory: Trajectory,
        reward: float | None,
        rewards: Mapping[str, float | None],
        stored: StoredRollout | None = None,
    ) -> bool:
        """One scored trajectory of a planned group. True when it completes the group. ``reward`` is what counts, for
        replayed ones the stored one.

        A trajectory that is held already, or whose group is not awaited, is ignored.
        Raises :class:`TrainingError` for a trajectory that cannot be trained, or a second one of the same index.
        """
        group = self._groups.get(group_id)
        if group is None:
            return False
        name = trajectory.trajectory_id
        held = {t.trajectory_id: i for i, t in group.members.items()}
        if name in held:
            return False
        if not 0 <= index < group.plan.delivered:
            raise TrainingError(
                f"expected an index in 0..{group.plan.delivered - 1} for {name} of {group_id}, got {index}"
            )
        if index in group.members:
            other = group.members[index].trajectory_id
            raise TrainingError(f"expected one trajectory at index {index} of {group_id}, got {other} and then {name}")
        if (expected := group.planned(index)) is not None and expected != name:
            raise TrainingError(f"expected the stored {expected} at index {index} of {group_id}, got {name}")
        if reward is None or not trajectory.usable:
            raise TrainingError(
                f"expected a scored, finished trajectory with sampled tokens, got {name} "
                f"(status {trajectory.status}, reward {reward}, {trajectory.n_sampled} sampled tokens)"
            )
        group.members[index] = trajectory.scored(reward, rewards)
        if group.planned(index) is not None:
            group.stored_rollouts[name] = stored or StoredRollout()
        return group.complete

    def cancel(self, group_ids: Iterable[str]) -> None:
        """Forget groups that will not be completed. A group that is in training already stays."""
        for group_id in group_ids:
            group = self._groups.get(group_id)
            if group is not None and not group.in_training:
                del self._groups[group_id]

    def keep(self, group_ids: Iterable[str]) -> None:
        """Drop all groups but these and those in training: after a reconnection the stage says which it counts as held,
        and sends the others again or has cancelled them."""
        kept = set(group_ids)
        self._groups = {
            name: group
            for name, group in self._groups.items()
            if group.in_training or (group.complete and name in kept)
        }

    def ready(self, update: int) -> bool:
        """True where all groups of ``update`` are complete."""
        groups = self._of(update)
        return len(groups) == self._groups_per_step and all(g.complete for g in groups)

    def progress(self, update: int) -> Progress:
        groups = self._of(update)
        return Progress(
            update, sum(g.complete for g in groups), self._groups_per_step, sum(len(g.members) for g in groups)
        )

    def take(self, update: int) -> tuple[Group, ...]:
        """The groups that ``update`` is made from, ordered by id so that the order of arrival changes nothing; those
        that the stage left out (equal rewards) are not among them. All stay in ``holding`` until ``consumed``.

        Raises :class:`TrainingError` when the update is not ready.
        """
        groups = self.peek(update)
        for group in self._of(update):
            group.in_training = True
        return groups

    def peek(self, update: int) -> tuple[Group, ...]:
        """The groups that :meth:`take` would return now; nothing changes. Raises :class:`TrainingError` as that
        does."""
        if not self.ready(update):
            raise TrainingError(f"expected all groups of update {update}, got {self.progress(update)}")
        return self.complete(update)

    def complete(self, update: int) -> tuple[Group, ...]:
        """The groups of ``update`` that are complete, as :meth:`take` returns them."""
        groups = sorted((g for g in self._of(update) if g.complete), key=lambda g: g.plan.group_id)
        return tuple(
            Group(g.plan, tuple(g.members[i] for i in range(g.plan.delivered)), dict(g.stored_rollouts))
            for g in groups
            if not g.plan.left_out
        )

    def consumed(self, update: int) -> list[str]:
        """Forget the groups of a trained update; their ids."""
        done = sorted(name for name, group in self._groups.items() if group.update == update)
        for name in done:
            del self._groups[name]
        return done

    def holding(self) -> list[str]:
        """Ids of groups that need not be sent again: complete, or in training."""
        return sorted(name for name, group in self._groups.items() if group.complete)

    def _of(self, update: int) -> list[_PlannedGroup]:
        return [group for group in self._groups.values() if group.update == update]
