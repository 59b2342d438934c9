"""Admission of groups and their placement in updates under the staleness bound: arithmetic only, no clock, no I/O.

Legend: ``G`` groups per update, ``η`` bound, ``a`` updates whose weights were live when a group was admitted,
``d = a + η`` its deadline (the last update that may train it), ``c`` updates made so far.

Admission is AReaL's rule (Fu et al. 2025, arXiv:2505.24298, section 5.1), counted in groups::

    c·G + open + 1  <=  (η + live + 1)·G          open: admitted, not cancelled, not yet consumed

Refusing admission is enough to keep *averages* fresh, not each group: a young group that finishes early must not take
the slot of an older one that still collects. So a slot in update ``u`` is given to a finished group only if afterwards
every group that is not placed yet can still meet its deadline::

    for all d' in u .. d-1:   #{unplaced groups with deadline <= d'}  <=  slots left in updates u .. d'  - 1

By induction this always holds for the unplaced group with the earliest deadline, so the rule never blocks for good:
when no rollout is running, something can be placed; and admission alone allows the ``G`` groups that an update needs.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StalenessRule:
    """Constants of the rule. ``updates_max`` is the length of the run: no group is admitted that it does not need."""

    bound: int
    groups_per_step: int
    updates_max: int | None = None

    def deadline(self, admitted_update: int) -> int:
        """Number of the last update that may train a group admitted when ``admitted_update`` updates were live."""
        return admitted_update + self.bound

    def capacity(self, live: int, consumed: int, open_groups: int) -> int:
        """Groups that may be admitted now (0 or more)."""
        limit = (self.bound + live + 1) * self.groups_per_step
        if self.updates_max is not None:
            limit = min(limit, self.updates_max * self.groups_per_step)
        return max(0, limit - consumed * self.groups_per_step - open_groups)


@dataclass(frozen=True, slots=True)
class Placement:
    """A finished group was assigned to ``update``. ``late``: that is after its deadline (only after a restart)."""

    group: int
    update: int
    late: bool


class StalenessLedger:
    """State of the rule over the groups of a run, by group number.

    *consumes* admissions, completions, cancellations, updates and versions; *produces* admission capacity and
    placements. A placement is kept until the update is consumed or the group cancelled, so a learner that
    starts again from an older checkpoint repeats the same updates.
    """

    def __init__(
        self, rule: StalenessRule, consumed: int = 0, live: int | None = None, policy_version: int = -1
    ) -> None:
        self.rule = rule
        self.consumed = consumed
        """Updates the learner has made."""
        self.live = live
        """Updates contained in the newest weights that are live; None before the first VERSION."""
        self.policy_version = policy_version
        """Version of these weights; -1 before the first."""
        self.learner_starts = 1
        """Starts of a learner since that version was announced, at most; each may skip one version."""
        self.placed: dict[int, int] = {}
        """Group to update, for updates not consumed yet."""
        self._filled: Counter[int] = Counter()
        self._deadline: dict[int, int] = {}
        self._unplaced: Counter[int] = Counter()
        self._ready: list[tuple[int, int]] = []
        self._ready_set: set[int] = set()

    @property
    def open(self) -> int:
        """Groups that are admitted and neither consumed nor cancelled."""
        return len(self._deadline) + len(self.placed)

    @property
    def version_max(self) -> int:
        """Newest version that an engine may serve already: after the newest one announced, one for each update that the
        learner has made or has groups for, and one for each of its starts."""
        unannounced = self.consumed - (self.live or 0) + sum(n > 0 for n in self._filled.values())
        return self.policy_version + unannounced + self.learner_starts

    @property
    def ready(self) -> int:
        """Finished groups without an update."""
        return len(self._ready_set)

    @property
    def update_ahead(self) -> int:
        """The update that one more finished group would go to, were all that wait placed first."""
        return self.consumed + (len(self.placed) + self.ready) // self.rule.groups_per_step

    @property
    def first_gap(self) -> int | None:
        """The first update that lacks groups while a later one has some; None where the batches are filled in order."""
        last = max((update for update in self.placed.values()), default=self.consumed)
        gaps = (u for u in range(self.consumed, last) if self._filled[u] < self.rule.groups_per_step)
        return next(gaps, None)

    @property
    def finished(self) -> bool:
        """True if the run has made all its updates."""
        return self.rule.updates_max is not None and self.consumed >= self.rule.updates_max

    def capacity(self) -> int:
        """Groups that may be admitted now; 0 before the first version."""
        return 0 if self.live is None else self.rule.capacity(self.live, self.consumed, self.open)

    def admit(self, group: int) -> int:
        """Charge a slot for a new group; returns its ``admitted_update``. The caller has checked :meth:`capacity`."""
        if self.live is None or self.capacity() < 1:
            raise ValueError(
                f"group {group}: no admission capacity (live {self.live}, consumed {self.consumed}, open {self.open})"
            )
        self.restore(group, self.live)
        return self.live

    def restore(self, group: int, admitted_update: int, *, ready: bool = False) -> None:
        """Put back an unplaced group that was admitted earlier (after a restart of the stage)."""
        deadline = self.rule.deadline(admitted_update)
        self._deadline[group] = deadline
        self._unplaced[deadline] += 1
        if ready:
            self.complete(group)

    def complete(self, group: int) -> None:
        """All rollouts of the group are there: it may be placed."""
        self._ready_set.add(group)
        heapq.heappush(self._ready, (self._deadline[group], group))

    def place_next(self) -> Placement | None:
        """Assign the most urgent finished group to an update, if the rule allows it."""
        while self._ready and self._ready[0][1] not in self._ready_set:
            heapq.heappop(self._ready)
        if not self._ready:
            return None
        deadline, group = self._ready[0]
        update = self._first_free()
        if update is None or not self._leaves_room(update, deadline):
            return None
        heapq.heappop(self._ready)
        self._ready_set.discard(group)
        del self._deadline[group]
        self._unplaced[deadline] -= 1
        self.restore_placed(group, update)
        return Placement(group, update, late=update > deadline)

    def _first_free(self) -> int | None:
        update = self.consumed
        while self._filled[update] >= self.rule.groups_per_step:
            update += 1
        if self.rule.updates_max is not None and update >= self.rule.updates_max:
            return None
        return update

    def _leaves_room(self, update: int, deadline: int) -> bool:
        """The condition of the module docstring for a group with ``deadline`` placed in ``update``."""
        room = -1
        unplaced = sum(count for due, count in self._unplaced.items() if due < update)
        for due in range(update, deadline):
            room += self.rule.groups_per_step - self._filled[due]
            unplaced += self._unplaced[due]
            if unplaced > room:
                return False
        return True

    def restore_placed(self, group: int, update: int) -> None:
        """Put back a group with the update it had (after a restart of the stage, or of the learner)."""
        self.placed[group] = update
        self._filled[update] += 1

    def consume(self, update: int, groups: Iterable[int]) -> None:
        """The learner has made ``update`` from these groups."""
        for group in groups:
            if self.placed.pop(group, None) is not None:
                self._filled[update] -= 1
        self.consumed = max(self.consumed, update + 1)
        self._unplaced, self._filled = +self._unplaced, +self._filled  # without what no group has any more

    def cancel(self, group: int) -> None:
        """The group will not be trained; its slot is free again. Unknown groups are ignored."""
        if group in self.placed:
            self._filled[self.placed.pop(group)] -= 1
        elif group in self._deadline:
            self._unplaced[self._deadline.pop(group)] -= 1
            self._ready_set.discard(group)

    def roll_back(self, updates: int, groups: dict[int, int]) -> None:
        """The learner continues from weights of ``updates`` updates; ``groups`` (group: update) are trained again."""
        self.consumed = updates
        if self.live is not None:
            self.live = min(self.live, updates)
        for group, update in groups.items():
            self.restore_placed(group, update)
