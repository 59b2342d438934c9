"""Choice of replay, retest and fresh groups over a run."""

from __future__ import annotations

import json
import math
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.config.replay import EssGuardConfig, ReplayConfig
from pipeline.replay import mixing
from pipeline.replay.mixing import Mixing, next_factor
from pipeline.replay.replay import Replay
from pipeline.replay.selection import Draws
from pipeline.tasks.sampler import DrawOutcome, TaskSampler


class Stage:
    def __init__(self, config, entries=(), **keywords):
        self.replay = Replay(config, entries=entries, **keywords)
        self.sampler = TaskSampler(config.environments, config.run.seed)

    def draw(self, n=1, progress=1.0, version=0):
        return [self.replay.next_group(self.sampler, progress=progress, version=version) for _ in range(n)]


def batches(ratio, batch, factors, *, restart=False):
    """By batch: True for each admission that is to be a replay group, where there is always one to replay."""
    replay = ReplayConfig(enabled=True, mode="mix", start_ratio=0, task_ratio=ratio, retest_ratio=0)
    mixing, found = Mixing(replay, batch), []
    for factor in factors:
        found.append([])
        for i in range(batch):
            if restart:
                mixing = Mixing(replay, batch, json.loads(json.dumps(mixing.state())))
            mixing.begin(1.0, factor)
            found[-1].append(mixing.replay_due)
            mixing.admitted(str(i), replay=found[-1][-1])
    return found


FACTORS = st.lists(st.floats(0, 1), min_size=1, max_size=12)


@given(batch=st.integers(1, 40), ratio=st.floats(0, 1), factors=FACTORS)
def test_a_full_pool_gives_the_share_over_all_batches_and_gives_it_first(batch, ratio, factors):
    found, planned = 0, 0.0
    for factor, due in zip(factors, batches(ratio, batch, factors), strict=True):
        found, planned = found + sum(due), planned + batch * ratio * factor
        assert due == sorted(due, reverse=True) and abs(sum(due) - batch * ratio * factor) < 1 + 1e-6
        assert planned - 1 - 1e-6 < found < planned + 1e-6


def test_of_one_group_an_update_half_are_replays_in_turn():
    assert batches(0.5, 1, [1.0] * 6) == [[False], [True]] * 3


@given(batch=st.integers(1, 12), ratio=st.floats(0, 1), factors=FACTORS)
def test_restarts_change_nothing_of_a_batch(batch, ratio, factors):
    assert batches(ratio, batch, factors, restart=True) == batches(ratio, batch, factors)


def test_products_that_rounding_puts_below_a_whole_number_are_meant_as_it():
    mixing = Mixing(ReplayConfig(enabled=True, mode="mix", start_ratio=0, task_ratio=0.29), 100)
    mixing.begin(1.0, 1.0)
    assert mixing.state()["target"] == 29


def test_a_deficit_is_caught_up_within_the_batch_and_not_carried_over():
    mixing = Mixing(ReplayConfig(enabled=True, mode="mix", start_ratio=0, task_ratio=0.5, retest_ratio=0), 8)
    found = []
    for valid in [False] * 5 + [True] * 11:
        mixing.begin(1.0, 1.0)
        found.append(mixing.replay_due and valid)
        mixing.admitted(str(len(found)), replay=found[-1])
    assert found == [False] * 5 + [True] * 3 + [True] * 4 + [False] * 4


def test_an_empty_pool_means_fresh_play(make):
    stage = Stage(make.config(task_ratio=1.0))
    assert [(p.k, p.task.seed) for p in stage.draw(6)] == [(0, i) for i in range(6)]


def test_every_batch_has_the_target_of_replay_tasks_and_no_task_twice(make):
    stage = Stage(make.config(batch=8, task_ratio=0.5), [make.entry(i, 1000 + i) for i in range(30)])
    for _ in range(10):
        plans = stage.draw(8)
        assert [p.k for p in plans] == [1] * 4 + [0] * 4
        assert len({p.task.task_id for p in plans}) == 8


def test_as_many_as_are_valid_where_the_pool_is_small(make):
    stage = Stage(make.config(batch=8, task_ratio=1.0), [make.entry(i, 1000 + i) for i in range(3)])
    for _ in range(3):
        assert Counter(p.k for p in stage.draw(8)) == {1: 3, 0: 5}


def test_replays_of_a_task_are_as_many_as_are_stored_and_at_most_k(make):
    config = make.config(batch=3, task_ratio=1.0, trajectories_per_task=2)
    stage = Stage(config, [make.entry(i, task) for i, task in enumerate((0, 1, 1, 2, 2, 2))])
    assert {p.task.seed: p.k for p in stage.draw(3)} == {0: 1, 1: 2, 2: 2}


def test_mixing_begins_at_its_share_of_the_run_and_collecting_at_once(make):
    stage = Stage(make.config(batch=1, task_ratio=1.0, start_ratio=0.35, tasks=5))
    make.play(stage.replay, 0, 1, 4, 0)
    assert len(stage.replay.pool) == 1 and stage.replay.share == 0
    assert [p.k for p in stage.draw(3, progress=0.34)] == [0, 0, 0]
    assert [p.k for p in stage.draw(1, progress=0.35)] == [1] and stage.replay.share == 1
    assert [p.k for p in stage.draw(1, progress=0.1)] == [1]


def test_mixing_begins_for_good_once_a_batch_is_solved_well_enough(make):
    config = make.config(batch=1, task_ratio=1.0, start_ratio=0.0, start_solve_rate=0.3)
    stage = Stage(config, [make.entry(0, 0)])
    told = dict(used=[], ess={}, entropies={})
    for rate, k in ((0.3, 0), (None, 0), (0.31, 1), (0.0, 1)):
        stage.replay.consumed(update=0, version=0, **told, solve_rate=rate)
        assert [p.k for p in stage.draw(1, progress=1.0)] == [k]
    state = stage.replay.take_changes().state
    assert Stage(config, [make.entry(0, 0)], state=state).draw(1, progress=0.0)[0].k == 1


def test_a_share_of_groups_goes_to_retired_tasks(make):
    stage = Stage(make.config(batch=4, retest_ratio=0.1, tasks=5005))
    for task in range(5):
        make.play(stage.replay, 5000 + task, 4, 4, 10 * task)
    plans = stage.draw(200)
    assert sum(p.task.seed >= 5000 for p in plans) == 20
    assert len({p.task.seed for p in plans if p.task.seed >= 5000}) == 5


@pytest.mark.parametrize("ratio", [0.15, 0.3, 0.6, 0.9, 1.0])
def test_the_share_of_retests_is_what_the_run_file_says(ratio):
    mixing, found = Mixing(ReplayConfig(enabled=True, mode="mix", task_ratio=0, retest_ratio=ratio), 4), 0
    for i in range(1000):
        mixing.begin(1.0, 1.0)
        found += (retest := mixing.retest_due)
        mixing.admitted(str(i), retest=retest)
    assert abs(found - 1000 * ratio) <= 1


def test_credit_for_retests_does_not_pile_up_while_nothing_is_retired(make):
    stage = Stage(make.config(batch=4, retest_ratio=0.5, tasks=1000))
    stage.draw(100)
    make.play(stage.replay, 5000, 4, 4, 0)
    make.play(stage.replay, 5001, 4, 4, 10)
    assert sum(p.task.seed >= 5000 for p in stage.draw(8)) <= 5


def test_where_everything_is_retired_a_retired_task_is_played(make):
    stage = Stage(make.config(batch=2, tasks=3))
    for task in range(3):
        make.play(stage.replay, task, 4, 4, 10 * task)
    assert {p.task.seed for p in stage.draw(40)} == {0, 1, 2}


def test_where_one_environment_is_retired_the_others_are_played(make):
    environments = {"a": {"tasks": 3}, "b": {"weight": 2}}
    stage = Stage(make.config(batch=2, environments=environments))
    for task in range(3):
        make.play(stage.replay, task, 4, 4, 10 * task)
    assert {p.task.environment for p in stage.draw(30)} == {"b"}
    make.play(stage.replay, 0, 0, 4, 100)
    make.play(stage.replay, 1, 0, 4, 110)
    counts = Counter(p.task.environment for p in stage.draw(30))
    assert 8 <= counts["a"] <= 12


def test_the_guard_shrinks_fast_recovers_slowly_and_stays_in_its_bounds():
    guard = EssGuardConfig(enabled=True, floor=0.3)
    assert next_factor(guard, 1.0, 0.29) == 0.5
    assert next_factor(guard, 0.5, 0.3) == pytest.approx(0.55)
    assert next_factor(guard, 0.15, 0.0) == 0.075
    assert next_factor(guard, 0.99, 0.9) == 1.0
    assert next_factor(guard, 0.5, None) == pytest.approx(0.55)
    assert next_factor(guard, 1.0, math.nan) == 0.5
    assert next_factor(EssGuardConfig(), 0.2, 0.0) == 1.0


def test_a_collapsed_ess_stops_replay_until_it_has_recovered(make, monkeypatch):
    monkeypatch.setattr(mixing, "SHRINK", 0.1)
    monkeypatch.setattr(mixing, "RECOVERY", 0.25)
    guard = {"enabled": True}
    stage = Stage(make.config(batch=4, task_ratio=0.5, ess_guard=guard), [make.entry(i, 100 + i) for i in range(9)])
    told = dict(used=[], entropies={}, solve_rate=None)
    shares = []
    for ess in (0.9, 0.01, None, None, 0.9, 0.9):
        stage.replay.consumed(update=0, version=0, **told, ess={"all": 0.5, "fresh": 1.0, "replay": ess})
        shares.append(sum(p.k for p in stage.draw(4)))
    assert shares == [2, 0, 0, 2, 1, 2]


def test_a_cancelled_groups_task_is_drawn_first_but_comes_back_only_once(make):
    stage = Stage(make.config(batch=1))
    first, second = (p.task for p in stage.draw(2))
    stage.replay.cancelled(first)
    assert stage.draw()[0].task == first
    stage.replay.cancelled(first)
    assert [p.task.seed for p in stage.draw(3)] == [2, 3, 4]
    stage.replay.cancelled(second)
    assert stage.draw()[0].task == second
    make.play(stage.replay, second, 1, 4, 0)
    stage.replay.cancelled(second)
    assert stage.draw()[0].task == second


def test_tasks_of_the_batch_are_set_aside_and_drawn_first_later(make):
    config = make.config(batch=4, task_ratio=0.5, tasks=5)
    stage = Stage(config, [make.entry(i, i) for i in range(5)])
    plans = stage.draw(4 * 25)
    for i in range(0, 100, 4):
        assert len({p.task.seed for p in plans[i : i + 4]}) == 4
    fresh = Counter(p.task.seed for p in plans if not p.k)
    assert max(fresh.values()) - min(fresh.values()) <= 4


def test_a_batch_larger_than_all_tasks_repeats_them_evenly(make):
    stage = Stage(make.config(batch=9, tasks=2))
    assert sorted(Counter(p.task.seed for p in stage.draw(90)).values()) == [45, 45]


def test_draws_depend_on_purpose_and_count_alone():
    one = Draws(3)
    first = [one.next("task").random() for _ in range(3)]
    one.next("other")
    later = one.next("task").random()
    assert Draws(3, {"task": 3}).next("task").random() == later
    assert [Draws(3, {"task": i}).next("task").random() for i in range(3)] == first
    assert len({Draws(seed).next(p).random() for seed in (0, 1) for p in "ab"}) == 4


@given(retired=st.sets(st.integers(0, 19), max_size=20), seed=st.integers(0, 3))
def test_passing_over_tasks_keeps_epochs_whole_and_shares_exact(make, retired, seed):
    environments = make.config(environments={"a": {"tasks": 20}, "b": {"weight": 3}}).environments
    sampler = TaskSampler(environments, seed)

    def verdict(task):
        return DrawOutcome.PASS if task.task_id in {f"a/{seed}" for seed in retired} else DrawOutcome.TAKE

    drawn = [sampler.draw_where(verdict) for _ in range(80)]
    counts = Counter(task.environment for task in drawn)
    assert abs(counts["a"] - (20 if len(retired) < 20 else 0)) <= 1
    seen = [task.seed for task in drawn if task.environment == "a"]
    left = 20 - len(retired)
    assert all(len(set(seen[i : i + left])) == left for i in range(0, len(seen) - left, left)) if left else not seen
