"""Orders for actors that have room: rollouts of held-out tasks in their share, then what training waits for."""

from __future__ import annotations

import heapq

from pipeline.replay.evaluation.evaluations import Evaluations
from pipeline.replay.groups import Groups
from pipeline.replay.leases import Leases
from pipeline.replay.records import GroupRecord
from pipeline.replay.replays import Replays
from pipeline.replay.state import StageState


class Ordering:
    """*consumes* pending slots, new groups and free places; *produces* leases."""

    def __init__(
        self, state: StageState, leases: Leases, groups: Groups, replays: Replays, evaluations: Evaluations
    ) -> None:
        self._s = state
        self._leases = leases
        self._groups = groups
        self._replays = replays
        self._evaluations = evaluations

    def order(self) -> None:
        """Give free actors what is to be played: pending slots first, then new groups as far as admission allows."""
        s = self._s
        if s.policy_version < 0:
            return
        free = [(-actor.free, actor.name) for actor in self._leases.actors.values() if actor.free > 0]
        heapq.heapify(free)
        self._order_evaluation(free)
        if s.batches.finished or s.config.evaluation.only:
            return
        while free:
            pending = self._groups.take_pending()
            if pending is None:
                if s.batches.capacity() < 1 or self._groups.brake.holds(s.now):
                    break
                self._groups.plan(self._replays.next())
                continue
            self._give(free, *pending)
        if self._evaluations.holds_back(s.batches.consumed):
            self._order_evaluation(free, share=False)

    def _order_evaluation(self, free: list[tuple[int, str]], *, share: bool = True) -> None:
        """They come first, in their ``share`` of the places; all places that are left where training waits for them."""
        evaluations = self._evaluations
        if evaluations.active is None:
            return
        places = sum(actor.slots for actor in self._leases.actors.values() if actor.down_since is None)
        room = (evaluations.may_hold(places) if share else places) - evaluations.playing.in_flight
        while free and room > 0 and (wanted := evaluations.take()) is not None:
            self._give(free, *wanted, version=evaluations.policy_version())
            room -= 1

    def _give(self, free: list[tuple[int, str]], group: GroupRecord, index: int, version: int | None = None) -> None:
        """An order for the actor with the most free places."""
        name = free[0][1]
        actor = self._leases.actors[name]
        self._leases.issue(group, index, actor, version)
        heapq.heapreplace(free, (-actor.free, name)) if actor.free else heapq.heappop(free)
