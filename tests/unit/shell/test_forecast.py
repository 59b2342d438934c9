"""Forecasts: closed forms where there are some, identities of any run, and given speeds."""

from __future__ import annotations

import itertools
import random
from itertools import repeat
from pathlib import Path
from statistics import fmean, quantiles

import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.config import RunConfig
from pipeline.errors import ConfigurationError
from pipeline.runtime.run_directory import RunDirectory
from pipeline.stage.staleness import StalenessRule
from pipeline.store import tables
from pipeline.store.queries import GroupTimes
from pipeline.supervisor.forecast import FORM, Outlook, Speeds, forecast, measure, play


def outlook_of(
    rule: StalenessRule, slots: int, group: GroupTimes, update: float, publish: float, total: int = 60
) -> Outlook:
    return play(rule, slots, repeat(group), repeat(update), publish, total)[0]


@pytest.mark.parametrize(
    ("bound", "slots", "update", "publish", "seconds", "staleness"),
    [
        (0, 8, 3.0, 1.0, 10 + 3 + 1, 0),  # a barrier
        (0, 4, 3.0, 1.0, 2 * 10 + 3 + 1, 0),  # the slots are taken twice
        (1, 16, 3.0, 1.0, (10 + 3 + 1) / 2, 1),
        (2, 24, 3.0, 1.0, (10 + 3 + 1) / 3, 2),
        (9, 80, 3.0, 1.0, 3, 9),  # the learner
        (9, 80, 3.0, 4.0, 4, 9),  # the learner waits for the engines to take the version before
        (9, 4, 3.0, 1.0, 8 * 10 / 4, None),  # the slots
    ],
)
def test_rollouts_of_one_length_follow_the_closed_forms(
    bound: int, slots: int, update: float, publish: float, seconds: float, staleness: float | None
) -> None:
    rule, group = StalenessRule(bound, 2), GroupTimes((10.0,) * 4)
    found = outlook_of(rule, slots, group, update, publish)
    assert found.update_seconds == pytest.approx(seconds)
    assert found.slots_idle == pytest.approx(1 - 8 * 10 / slots / seconds), "Little's law"
    assert staleness is None or found.staleness == staleness
    least = Speeds([group], [update], publish).bounds(rule, slots)
    assert found.update_seconds >= max(least) - 1e-9


def test_barrier_of_exponential_rollouts_waits_for_their_expected_maximum() -> None:
    rng = random.Random(1)
    groups = (GroupTimes(tuple(rng.expovariate(1 / 10) for _ in range(4))) for _ in repeat(None))
    found, _ = play(StalenessRule(0, 4), 16, groups, repeat(3.0), 1.0, 1000)
    slowest = 10 * sum(1 / i for i in range(1, 17))  # Rényi 1953
    assert found.update_seconds == pytest.approx(slowest + 3 + 1, rel=0.03)
    assert found.learner_idle == pytest.approx((slowest + 1) / (slowest + 4), rel=0.03)


@settings(max_examples=60, deadline=None)
@given(
    st.integers(0, 3), st.integers(1, 3), st.integers(1, 12), st.lists(st.floats(0.1, 50), max_size=3), st.booleans(),
    st.floats(0.5, 20), st.floats(0, 1), st.randoms(use_true_random=False),
)  # fmt: skip
def test_any_run_keeps_the_bound_and_no_update_is_faster_than_learner_and_slots(
    bound, size, slots, seconds, replaced, update, share, rng
) -> None:
    rule, kinds = StalenessRule(bound, size), [GroupTimes(tuple(seconds))]
    if replaced and seconds:
        kinds.append(GroupTimes((1.0,), trained=False))
    drawn = []

    def groups():
        while True:
            drawn.append(rng.choice(kinds))
            yield drawn[-1]

    found, ages = play(rule, slots, groups(), repeat(update), share * update, 30)
    assert all(0 <= age <= bound for of_update in ages for age in of_update)
    assert all(len(of_update) == size * len(seconds) for of_update in ages)
    assert found.update_seconds >= update - 1e-9
    assert found.learner_idle == pytest.approx(1 - update / found.update_seconds, abs=1e-9)
    assert -1e-9 <= found.slots_idle <= 1
    used = sum(sum(group.seconds) for group in drawn)
    assert 30 * found.update_seconds * slots * (1 - found.slots_idle) <= 2 * used + 1e-9


def test_given_speeds_have_the_given_mean_and_tail_and_a_forecast_follows_them() -> None:
    speeds = Speeds.parse("rollout=30:90,update=20,publish=5", n_rollout=8)
    seconds = list(itertools.chain.from_iterable(group.seconds for group in speeds.groups))
    assert fmean(seconds) == pytest.approx(30, rel=0.05)
    assert quantiles(seconds, n=20)[-1] == pytest.approx(90, rel=0.05)
    assert (speeds.updates, speeds.publish) == ((20,), 5)
    config = RunConfig.model_validate({"environments": {"a": {}}, "staleness": {"max": 0}})
    outlook, sentence = forecast(config, speeds, left=10)
    rule = StalenessRule(0, config.groups.groups_per_step)
    barrier = speeds.bounds(rule, config.actor.concurrency)[2]
    assert outlook.update_seconds == pytest.approx(barrier, rel=0.1) and f"{barrier:.3g} s" in sentence
    assert outlook.rows()["mean staleness, versions"] == "0.00"


@pytest.mark.parametrize(
    "text",
    [
        "rollout=3,update=1", "rollout=3:1,update=1", "rollout=3:30,update=1", "rollout=0:0,update=1",
        "rollout=3:9", "rollout=3:9,update=0", "rollout=3:9,update=1,publish=-1", "rollout=3:9,update=1,x=1",
        "rollout=nan:nan,update=1", "rollout=3:9,update=inf", "=",
    ],
)  # fmt: skip
def test_speeds_that_cannot_be_say_what_was_expected(text: str) -> None:
    with pytest.raises(ConfigurationError, match=f"expected a run directory, or {FORM}"):
        Speeds.parse(text, 8)


def test_turns_on_one_device_have_no_forecast() -> None:
    config = RunConfig.model_validate({"environments": {"a": {}}})
    config = config.model_copy(update={"engine": config.engine.model_copy(update={"colocate": "sleep"})})
    with pytest.raises(ConfigurationError, match=r"engine.colocate: sleep"):
        forecast(config, Speeds.parse("rollout=3:9,update=1", 8), left=1)


@pytest.mark.parametrize("pause", [0.0, 8 * 3600.0])
def test_slots_are_not_idle_while_a_run_is_stopped(tmp_path: Path, pause: float) -> None:
    config = RunConfig.model_validate({"environments": {"a": {}}, "staleness": {"max": 0}, "actor": {"concurrency": 1}})
    directory = RunDirectory(tmp_path)
    ends = [10.0 * i + (pause if i > 6 else 0.0) for i in range(1, 11)]
    same = {"seconds": {"step": 10.0, "wait": 1.0}}
    lines = [{"step": i + 1, "update": i, "finished": end, **same} for i, end in enumerate(ends)]
    directory.metrics_file.write_bytes(b"".join(orjson.dumps(line) + b"\n" for line in lines))
    tables.STORE.create(directory.store_file)
    connection = tables.STORE.connect(directory.store_file)
    for i, end in enumerate(ends):
        group = (i, b"", 1, 1, 1, i, None, "trained", i, 0, 0, "", end - 10, end, 0, 0)
        connection.execute(f"INSERT INTO groups VALUES ({', '.join('?' * len(group))})", group)
        lost_at = end + pause if i == 5 else end - 2.5  # killed: its order was out until the next start
        order = (i, 0, 0, "actor-0", 0, 0, "done", "", 0, end - 10, lost_at, 0)
        connection.execute(f"INSERT INTO orders VALUES ({', '.join('?' * len(order))})", order)
    connection.close()
    measured = measure(config, directory)[1]
    assert measured.update_seconds == 10 and 0.2 <= measured.slots_idle <= 0.25
