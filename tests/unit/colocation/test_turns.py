"""Arbitration of a shared device, under any order of events from engines and learner."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from learner.weights.colocated import DeviceArbiter, Holder

ENGINES = ("a", "b")


class AnyOrder(RuleBasedStateMachine):
    """Beside the machine, what is really so: which engine sleeps, and which has said so since the request."""

    def __init__(self) -> None:
        super().__init__()
        self.arbiter = DeviceArbiter(ENGINES)
        self.now = 0.0
        self.asleep: dict[str, float] = {}
        self.said: set[str] = set()
        self.slept = self.reported = 0.0
        self.requested = self.grants = self.releases = 0

    @rule(seconds=st.floats(0, 100))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds

    @rule()
    def request(self) -> None:
        had = self.arbiter.granted
        if self.arbiter.holder is Holder.ENGINES:
            self.requested += 1
            self.said.clear()
        granted = self.arbiter.request()
        assert granted == self.arbiter.granted
        if granted and not had:
            self.grants += 1
            assert self.said == set(ENGINES)

    @rule()
    def withdraw(self) -> None:
        had = self.arbiter.granted
        self.arbiter.withdraw()
        assert self.arbiter.granted == had

    @rule(engine=st.sampled_from(ENGINES))
    def falls_asleep(self, engine: str) -> None:
        had = self.arbiter.granted
        granted = self.arbiter.fell_asleep(engine, self.now)
        self.asleep.setdefault(engine, self.now)
        self.said.add(engine)
        if granted and not had:
            self.grants += 1
            assert self.said == set(ENGINES)

    @rule(engine=st.sampled_from(ENGINES))
    def wakes_or_restarts(self, engine: str) -> None:
        had = self.arbiter.granted
        self.reported += self.arbiter.woke(engine, self.now)
        self.slept += self.now - self.asleep.pop(engine, self.now)
        self.said.discard(engine)
        assert self.arbiter.granted == had

    @rule()
    def release(self) -> None:
        had = self.arbiter.granted
        assert self.arbiter.release() is had
        self.releases += had
        assert self.arbiter.holder is Holder.ENGINES

    @invariant()
    def every_grant_follows_a_request_and_ends_once(self) -> None:
        assert self.releases <= self.grants <= self.requested
        assert self.grants - self.releases == self.arbiter.granted

    @invariant()
    def no_engine_serves_while_the_learner_holds_or_asks(self) -> None:
        assert self.arbiter.engines_sleep == (self.arbiter.holder is not Holder.ENGINES)

    @invariant()
    def time_asleep_is_counted_once(self) -> None:
        assert self.reported == pytest.approx(self.slept)

    @invariant()
    def the_learner_waits_only_for_engines_that_have_not_said_that_they_sleep(self) -> None:
        assert set(self.arbiter.awake) == set(ENGINES) - self.said
        assert self.arbiter.holder is not Holder.ASKED or self.arbiter.awake


TestAnyOrder = AnyOrder.TestCase


def test_the_last_engine_to_fall_asleep_gives_the_device() -> None:
    arbiter = DeviceArbiter(ENGINES)
    assert not arbiter.request()
    assert not arbiter.fell_asleep("a", 1.0)
    assert arbiter.fell_asleep("b", 2.0)
    assert arbiter.release()
    assert (arbiter.woke("a", 5.0), arbiter.woke("b", 5.0)) == (4.0, 3.0)
    assert not arbiter.granted


@given(st.lists(st.sampled_from(ENGINES), max_size=8))
def test_an_engine_that_never_answers_blocks_the_grant(answers: list[str]) -> None:
    arbiter = DeviceArbiter((*ENGINES, "silent"))
    arbiter.request()
    for engine in answers:
        assert not arbiter.fell_asleep(engine, 0.0)
    assert arbiter.holder is Holder.ASKED


def test_an_intruder_is_told_to_sleep_and_takes_nothing_back() -> None:
    arbiter = DeviceArbiter(("a",))
    arbiter.request()
    arbiter.fell_asleep("a", 0.0)
    arbiter.woke("a", 1.0)
    assert arbiter.granted and arbiter.engines_sleep
