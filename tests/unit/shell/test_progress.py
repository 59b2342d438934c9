"""Decision that a role is stuck, without clock, thread or process."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.runtime.progress import FACTOR, AdaptiveLimit, Alarm, Progress, RoleState, Watchdog

FLOOR = 120.0
STUCK = 300.0
PERIOD = 1.0
WORK = st.sampled_from([RoleState.TRAINING, RoleState.PUBLISHING, RoleState.SAVING, RoleState.LOADING])


def look_until(watchdog: Watchdog, start: float, end: float) -> list[tuple[Alarm, float]]:
    """The alarms of a watchdog that looks every second, and when."""
    seconds = range(1, int(end - start) + 1)
    return [(alarm, start + s) for s in seconds if (alarm := watchdog.look(start + s)) is not None]


@given(WORK, st.floats(0, 5000))
def test_a_hang_is_told_at_the_limit_and_ends_the_process_later_exactly_once(state: RoleState, begun: float) -> None:
    progress = Progress(FLOOR, begun)
    progress.enter(state, begun)
    watchdog = Watchdog(progress, STUCK, PERIOD, begun)
    limit = progress.limit
    alarms = look_until(watchdog, begun, begun + limit + STUCK + 2)
    assert [alarm for alarm, _ in alarms][:2] == [Alarm.DUMP, Alarm.END]
    assert limit < alarms[0][1] - begun <= limit + 2 * PERIOD
    assert limit + STUCK < alarms[1][1] - begun <= limit + STUCK + 2 * PERIOD


@given(WORK, st.lists(st.floats(0.1, FLOOR), min_size=1, max_size=40))
def test_a_role_that_moves_within_the_floor_is_never_stuck(state: RoleState, pauses: list[float]) -> None:
    progress, now = Progress(FLOOR, 0.0), 0.0
    progress.enter(state, now)
    for pause in pauses:
        assert not progress.stuck(now + pause)
        now += pause
        progress.beat(now)


@given(st.floats(1, 5000), st.lists(st.floats(0.2, 1.0), min_size=1, max_size=40))
def test_a_slow_but_steady_role_is_not_restarted_whatever_its_step_time(step: float, shares: list[float]) -> None:
    """The first step may take the limit of a first one; after that, each step up to FACTOR times the longest."""
    progress, now = Progress(FLOOR, 0.0), 0.0
    step = min(step, 6 * FLOOR)
    for share in [1.0, *shares]:
        progress.enter(RoleState.TRAINING, now)
        now += step * share
        assert not progress.stuck(now)
        progress.enter(RoleState.WAITING_FOR_ROLLOUTS, now)
    progress.enter(RoleState.TRAINING, now)
    longest = max([step, *(step * share for share in shares)][-32:])
    assert progress.limit == pytest.approx(max(FLOOR, FACTOR * longest))


def test_an_eight_minute_step_has_a_limit_of_its_own_and_a_quick_one_the_floor() -> None:
    progress = Progress(FLOOR, 0.0)
    assert progress.limit == 30 * FLOOR, "loading a model takes long"
    progress.enter(RoleState.TRAINING, 0)
    assert progress.limit == 6 * FLOOR, "the first step compiles kernels"
    progress.enter(RoleState.WAITING_FOR_ROLLOUTS, 480)
    progress.enter(RoleState.TRAINING, 480)
    assert progress.limit == FACTOR * 480
    for step in range(40):
        progress.enter(RoleState.WAITING_FOR_ROLLOUTS, 481 + step)
        progress.enter(RoleState.TRAINING, 481 + step)
    assert progress.limit == FLOOR, "old pauses are forgotten"


def test_a_limit_stays_above_a_time_limit_inside_the_state() -> None:
    progress = Progress(FLOOR, 0.0)
    progress.allow(RoleState.PUBLISHING, 3600)
    for second in range(100):
        progress.enter(RoleState.PUBLISHING, second)
        assert progress.limit == 3600
        progress.enter(RoleState.WAITING_FOR_ROLLOUTS, second + 0.5)
        assert progress.limit == FLOOR


def test_steps_inside_a_state_are_what_counts_and_not_the_time_in_it() -> None:
    progress = Progress(FLOOR, 0.0)
    progress.enter(RoleState.TRAINING, 0)
    for second in range(3600):
        progress.beat(second)
    assert not progress.stuck(3600)
    progress.enter(RoleState.WAITING_FOR_ROLLOUTS, 3600)
    progress.enter(RoleState.TRAINING, 3600)
    assert progress.limit == FLOOR


def test_reporting_the_same_state_again_is_no_progress() -> None:
    progress = Progress(FLOOR, 0.0)
    progress.enter(RoleState.PUBLISHING, 0)
    progress.enter(RoleState.PUBLISHING, 1000)
    assert progress.stuck(1000)


@given(st.floats(10, 100_000))
def test_a_process_that_was_stopped_and_goes_on_is_excused(seconds: float) -> None:
    progress = Progress(FLOOR, 0.0)
    progress.enter(RoleState.TRAINING, 0)
    watchdog = Watchdog(progress, STUCK, PERIOD, 0)
    assert watchdog.look(seconds) is None
    assert look_until(watchdog, seconds, seconds + FLOOR - 2) == []


def test_a_role_that_goes_on_after_an_alarm_is_well_and_the_next_hang_is_told_again() -> None:
    progress = Progress(FLOOR, 0.0)
    progress.enter(RoleState.WAITING_FOR_ORDERS, 0)
    watchdog = Watchdog(progress, STUCK, PERIOD, 0)
    assert [alarm for alarm, _ in look_until(watchdog, 0, 200)] == [Alarm.DUMP]
    progress.beat(200)
    assert look_until(watchdog, 200, 300) == []
    assert [alarm for alarm, _ in look_until(watchdog, 300, 400)] == [Alarm.DUMP]


def test_a_draining_process_is_left_to_the_limit_of_the_drain() -> None:
    progress = Progress(FLOOR, 0.0)
    progress.watched = False
    assert progress.limit == math.inf and not progress.stuck(1e9)


@given(st.lists(st.floats(0, 1e6), max_size=80))
def test_one_outlier_raises_a_limit_by_its_factor_at_most(durations: list[float]) -> None:
    limit = AdaptiveLimit(10, 60)
    for duration in durations:
        before = limit.seconds
        limit.record(duration)
        assert 10 <= limit.seconds <= FACTOR * before
