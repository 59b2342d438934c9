"""Whose turn it is, whatever engines and learner do, in any order."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from learner.weights.colocated import DeviceTurns, Holder, Order

ENGINES = ("a", "b")


class AnyOrder(RuleBasedStateMachine):
    """Beside the machine, what is really so: which engine sleeps, as it last said."""

    def __init__(self) -> None:
        super().__init__()
        self.turns = DeviceTurns(ENGINES)
        self.now = 0.0
        self.asleep: dict[str, float] = {}
        self.slept = self.told = 0.0
        self.requested = 0

    @rule(seconds=st.floats(0, 100))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds

    @rule()
    def request(self) -> None:
        had = self.turns.granted
        if self.turns.holder is Holder.ENGINES:
            self.requested += 1
        granted = self.turns.request()
        assert granted == self.turns.granted
        if granted and not had:
            assert set(self.asleep) == set(ENGINES)

    @rule()
    def withdraw(self) -> None:
        had = self.turns.granted
        self.turns.withdraw()
        assert self.turns.granted == had

    @rule(engine=st.sampled_from(ENGINES))
    def falls_asleep(self, engine: str) -> None:
        had = self.turns.granted
        granted = self.turns.fell_asleep(engine, self.now)
        self.asleep.setdefault(engine, self.now)
        if granted and not had:
            assert set(self.asleep) == set(ENGINES)

    @rule(engine=st.sampled_from(ENGINES))
    def wakes_or_restarts(self, engine: str) -> None:
        had, intruders = self.turns.granted, self.turns.intruders
        self.told += self.turns.woke(engine, self.now)
        was_asleep = engine in self.asleep
        self.slept += self.now - self.asleep.pop(engine, self.now)
        assert self.turns.granted == had
        assert self.turns.intruders == intruders + (had and was_asleep)

    @rule()
    def give_back(self) -> None:
        had = self.turns.granted
        assert self.turns.give_back() is had
        assert self.turns.holder is Holder.ENGINES

    @invariant()
    def every_grant_follows_a_request_and_ends_once(self) -> None:
        assert self.turns.returns <= self.turns.grants <= self.requested
        assert self.turns.grants - self.turns.returns == self.turns.granted

    @invariant()
    def no_engine_serves_while_the_learner_holds_or_asks(self) -> None:
        assert (self.turns.order() is Order.SERVE) == (self.turns.holder is Holder.ENGINES)

    @invariant()
    def time_asleep_is_counted_once(self) -> None:
        assert self.told == pytest.approx(self.slept)

    @invariant()
    def the_learner_waits_only_for_engines_that_are_awake(self) -> None:
        assert set(self.turns.awake) == set(ENGINES) - set(self.asleep)
        assert self.turns.holder is not Holder.ASKED or self.turns.awake


TestAnyOrder = AnyOrder.TestCase


def test_the_last_engine_to_fall_asleep_gives_the_device() -> None:
    turns = DeviceTurns(ENGINES)
    assert not turns.request()
    assert not turns.fell_asleep("a", 1.0)
    assert turns.fell_asleep("b", 2.0)
    assert turns.give_back()
    assert (turns.woke("a", 5.0), turns.woke("b", 5.0)) == (4.0, 3.0)
    assert not turns.granted


@given(st.lists(st.sampled_from(ENGINES), max_size=8))
def test_an_engine_that_never_answers_blocks_the_grant(answers: list[str]) -> None:
    turns = DeviceTurns((*ENGINES, "silent"))
    turns.request()
    for engine in answers:
        assert not turns.fell_asleep(engine, 0.0)
    assert turns.holder is Holder.ASKED


def test_an_intruder_is_told_to_sleep_and_takes_nothing_back() -> None:
    turns = DeviceTurns(("a",))
    turns.request()
    turns.fell_asleep("a", 0.0)
    turns.woke("a", 1.0)
    assert (turns.granted, turns.intruders, turns.order()) == (True, 1, Order.SLEEP)
