"""The circuit breaker of an engine under every order of requests, probes and time."""

from __future__ import annotations

import random

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from actors.engine.engine_state import (
    FAILURES,
    TRIAL_SECONDS,
    WAIT_SECONDS,
    WAIT_SECONDS_MAX,
    WINDOW,
    Breaker,
    BreakerState,
)


def closed_breaker(jitter: float = 1.0) -> Breaker:
    breaker = Breaker(lambda: jitter)
    breaker.came_up()
    return breaker


def failed_times(breaker: Breaker, times: int, now: float = 0.0) -> None:
    for _ in range(times):
        breaker.failed(now, "HTTP 500")


class BreakerMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.breaker = Breaker(lambda: 0.5)
        self.now = 0.0
        self.trials: list[float] = []
        self.was = BreakerState.OPEN

    def state(self) -> BreakerState:
        return self.breaker.state(self.now)

    @rule(seconds=st.floats(0, 40))
    def wait(self, seconds: float) -> None:
        before = self.state()
        self.now += seconds
        assert (before, self.state()) in {
            *((state, state) for state in BreakerState),
            (BreakerState.OPEN, BreakerState.HALF_OPEN),
        }, "time alone lets a wait end and does nothing else"

    @rule(trial=st.booleans())
    def answered(self, trial: bool) -> None:
        before, trial = self.state(), trial and bool(self.trials)
        self.breaker.answered(trial=trial)
        assert before is self.state() or trial, "an answer to an old request closes nothing"
        if trial:
            self.end_trial()

    @rule(trial=st.booleans())
    def failed(self, trial: bool) -> None:
        before, trial = self.state(), trial and bool(self.trials)
        self.breaker.failed(self.now, "HTTP 500", trial=trial)
        assert self.state() is not BreakerState.CLOSED or before is BreakerState.CLOSED
        assert trial or before is self.state() or before is BreakerState.CLOSED, "an old failure extends no wait"
        if trial:
            self.end_trial()

    @rule(data=st.data())
    def send(self, data: st.DataObject) -> None:
        before = self.state()
        if not self.breaker.admits(self.now):
            assert before is not BreakerState.CLOSED
            return
        assert before is not BreakerState.OPEN
        trial = self.breaker.sent(self.now)
        assert trial == (before is BreakerState.HALF_OPEN)
        if trial:
            assert not self.trials or self.now - self.trials[-1] >= TRIAL_SECONDS, "one trial at a time"
            self.trials.append(self.now)

    @precondition(lambda self: self.trials)
    @rule()
    def end_trial(self) -> None:
        self.trials.clear()
        self.breaker.ended()

    @rule(up=st.booleans())
    def probe(self, up: bool) -> None:
        if up:
            self.breaker.came_up()
        else:
            self.breaker.went_down("refused")
            assert self.state() is BreakerState.OPEN, "a failed probe opens at once"

    @invariant()
    def explains_itself(self) -> None:
        assert self.breaker.closed == (self.state() is BreakerState.CLOSED)
        assert bool(self.breaker.problem) != self.breaker.closed


TestBreakerMachine = BreakerMachine.TestCase
TestBreakerMachine.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)


def test_fewer_failures_than_the_threshold_open_nothing() -> None:
    breaker = closed_breaker()
    failed_times(breaker, FAILURES - 1)
    assert breaker.admits(0.0)
    failed_times(breaker, 1)
    assert not breaker.admits(0.0) and "HTTP 500" in breaker.problem


def test_failures_count_only_among_the_last_requests() -> None:
    breaker = closed_breaker()
    for _ in range(10):
        failed_times(breaker, FAILURES - 1)
        for _ in range(WINDOW):
            breaker.answered()
    assert breaker.closed


def test_failure_rate_of_thirty_percent_opens_and_of_two_percent_does_not() -> None:
    def openings(rate: float, requests: int) -> int:
        draw, breaker, opened = random.Random(1), closed_breaker(), 0
        for _ in range(requests):
            if draw.random() < rate:
                breaker.failed(0.0, "HTTP 500")
            else:
                breaker.answered()
            if not breaker.closed:
                opened, breaker = opened + 1, closed_breaker()
        return opened

    assert openings(0.3, 60) >= 1
    assert openings(0.02, 2000) == 0


def test_each_opening_in_a_row_waits_twice_as_long_up_to_the_limit() -> None:
    breaker, now, waits = closed_breaker(), 0.0, []
    failed_times(breaker, FAILURES)
    for _ in range(8):
        began = now
        while breaker.state(now) is BreakerState.OPEN:
            now += 0.25
        waits.append(now - began)
        assert breaker.sent(now)
        breaker.failed(now, "HTTP 500", trial=True)
        breaker.ended()
    assert waits[:5] == [WAIT_SECONDS * 2**i for i in range(5)]
    assert waits[-1] == WAIT_SECONDS_MAX


def test_wait_is_short_again_after_a_window_of_answers() -> None:
    breaker = closed_breaker()
    for _ in range(2):
        failed_times(breaker, FAILURES)
        assert breaker.state(WAIT_SECONDS) is BreakerState.HALF_OPEN
        assert breaker.sent(WAIT_SECONDS)
        breaker.answered(trial=True)
        breaker.ended()
        for _ in range(WINDOW):
            breaker.answered()


def test_jitter_halves_the_wait_at_most() -> None:
    breaker = closed_breaker(jitter=0.0)
    failed_times(breaker, FAILURES)
    assert breaker.state(0.49) is BreakerState.OPEN
    assert breaker.state(0.5) is BreakerState.HALF_OPEN
