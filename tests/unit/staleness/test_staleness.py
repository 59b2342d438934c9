"""Random histories of admission, completion, cancellation, restarts and rollbacks."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.stage.staleness import StalenessLedger, StalenessRule


class History:
    """A learner and players that behave, driven by random choices."""

    def __init__(self, bound: int, groups_per_step: int) -> None:
        self.batches = StalenessLedger(StalenessRule(bound, groups_per_step), live=0)
        self.admitted: dict[int, int] = {}
        self.playing: list[int] = []
        self.trained: dict[int, int] = {}
        self.serial = 0

    def admit(self) -> bool:
        if self.batches.capacity() < 1:
            return False
        self.admitted[self.serial] = self.batches.admit(self.serial)
        self.playing.append(self.serial)
        self.serial += 1
        return True

    def finish(self, pick: int) -> bool:
        if not self.playing:
            return False
        self.batches.complete(self.playing.pop(pick % len(self.playing)))
        return True

    def place(self) -> bool:
        placement = self.batches.place_next()
        if placement is None:
            return False
        bound = self.batches.rule.bound
        assert placement.update <= self.admitted[placement.group] + bound
        assert not placement.late
        return True

    def consume(self) -> bool:
        update = self.batches.consumed
        members = [g for g, u in self.batches.placed.items() if u == update]
        assert len(members) <= self.batches.rule.groups_per_step
        if len(members) < self.batches.rule.groups_per_step:
            return False
        self.batches.consume(update, members)
        self.trained |= dict.fromkeys(members, update)
        return True

    def publish(self) -> bool:
        if self.batches.live == self.batches.consumed:
            return False
        self.batches.live = self.batches.consumed
        return True

    def cancel(self, pick: int) -> bool:
        if not self.playing:
            return False
        self.batches.cancel(self.playing.pop(pick % len(self.playing)))
        return True

    def restart_stage(self) -> bool:
        old = self.batches
        self.batches = StalenessLedger(old.rule, old.consumed, old.live)
        for group, update in old.placed.items():
            self.batches.restore_placed(group, update)
        for group in sorted(old._deadline):
            self.batches.restore(group, self.admitted[group], ready=group not in self.playing)
        assert self.batches.open == old.open
        return True

    def roll_back(self, pick: int) -> bool:
        updates = max(0, self.batches.consumed - pick % 3)
        again = {g: u for g, u in self.trained.items() if u >= updates}
        self.trained = {g: u for g, u in self.trained.items() if u < updates}
        self.batches.roll_back(updates, again)
        return True

    def step(self, choice: int, pick: int) -> bool:
        actions = [
            self.admit, self.admit, self.admit, lambda: self.finish(pick), lambda: self.finish(pick),
            self.place, self.place,
            self.consume, self.publish, lambda: self.cancel(pick), self.restart_stage, lambda: self.roll_back(pick),
        ]  # fmt: skip
        return actions[choice % len(actions)]()


choices = st.lists(st.tuples(st.integers(0, 11), st.integers(0, 50)), max_size=150)


@settings(max_examples=300, deadline=None)
@given(st.integers(0, 4), st.integers(1, 4), choices)
def test_no_group_is_trained_later_than_its_bound(
    bound: int, groups_per_step: int, script: list[tuple[int, int]]
) -> None:
    history = History(bound, groups_per_step)
    for choice, pick in script:
        history.step(choice, pick)
        assert (
            history.batches.open + history.batches.consumed * groups_per_step
            <= (max(history.batches.live or 0, *history.admitted.values(), 0) + bound + 1) * groups_per_step
        )
    for group, update in history.trained.items():
        assert update <= history.admitted[group] + bound


@settings(max_examples=200, deadline=None)
@given(st.integers(0, 4), st.integers(1, 4), choices)
def test_newest_version_counts_each_update_that_has_groups_once(
    bound: int, groups_per_step: int, script: list[tuple[int, int]]
) -> None:
    history = History(bound, groups_per_step)
    for choice, pick in script:
        history.step(choice, pick)
        batches = history.batches
        unannounced = batches.consumed - (batches.live or 0) + len(set(batches.placed.values()))
        assert batches.version_max == batches.policy_version + unannounced + batches.learner_starts


@settings(max_examples=200, deadline=None)
@given(st.integers(0, 4), st.integers(1, 4), choices)
def test_the_rule_never_blocks_for_ever(bound: int, groups_per_step: int, script: list[tuple[int, int]]) -> None:
    history = History(bound, groups_per_step)
    for choice, pick in script:
        history.step(choice, pick)
    before = history.batches.consumed
    for _ in range(200):
        moved = [history.publish(), history.admit(), history.finish(0), history.place(), history.consume()]
        assert any(moved)
    assert history.batches.consumed > before


@settings(max_examples=100, deadline=None)
@given(st.integers(1, 4), choices)
def test_bound_zero_alternates_play_and_training_strictly(groups_per_step: int, script: list[tuple[int, int]]) -> None:
    history = History(0, groups_per_step)
    for choice, pick in script:
        if choice % 12 == 11:
            continue
        history.step(choice, pick)
        for group in history.playing:
            assert history.admitted[group] == history.batches.consumed
        if history.batches.consumed != history.batches.live:
            assert not history.playing and not history.batches.capacity()


def test_a_young_group_leaves_the_places_of_older_ones() -> None:
    batches = StalenessLedger(StalenessRule(bound=2, groups_per_step=1), live=0)
    for group in range(3):
        batches.admit(group)
    batches.complete(0)
    assert batches.place_next() is not None
    batches.consume(0, [0])
    batches.live = 1
    batches.admit(3)
    batches.complete(3)
    assert batches.place_next() is None, "groups 1 and 2 are due at update 2: updates 1 and 2 belong to them"
    batches.complete(1)
    placement = batches.place_next()
    assert placement is not None and (placement.group, placement.update) == (1, 1)


def test_no_group_is_admitted_beyond_the_end_of_the_run() -> None:
    batches = StalenessLedger(StalenessRule(bound=5, groups_per_step=2, updates_max=3), live=0)
    assert batches.capacity() == 6


def test_nothing_is_admitted_before_the_first_version() -> None:
    assert StalenessLedger(StalenessRule(3, 3)).capacity() == 0
