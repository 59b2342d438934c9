"""Tasks and trajectories are drawn with the frequencies that the specification states."""

from __future__ import annotations

import math
import random
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.config.rollouts import HELD_OUT_SEED
from pipeline.replay.priorities import Priorities
from pipeline.replay.replay import Replay
from pipeline.replay.selection import TaskIndex, choose, draw_normal, draw_uniform, log_priority, sampling_correction
from pipeline.tasks.sampler import TaskSampler
from pipeline.tasks.splits import Seeds

CHI2_999 = {1: 10.83, 2: 13.82, 3: 16.27, 4: 18.47, 5: 20.52, 6: 22.46, 7: 24.32, 8: 26.12, 9: 27.88, 10: 29.59}
"""99.9 % quantiles by degrees of freedom."""


def assert_frequencies(draw, weights, n=6000):
    """``draw(rng)`` gives each key of ``weights`` with a probability proportional to its value."""
    rng = random.Random(5)
    counts = Counter(draw(rng) for _ in range(n))
    expected = {key: n * weight / sum(weights.values()) for key, weight in weights.items()}
    assert set(counts) <= {key for key, value in expected.items() if value > 0}
    cells = [key for key, value in expected.items() if value > 0]
    chi2 = sum((counts[key] - expected[key]) ** 2 / expected[key] for key in cells)
    assert chi2 < CHI2_999[len(cells) - 1], counts


@pytest.fixture
def index():
    index = TaskIndex()
    for bucket, names in {0: "ab", 2: "cdef", 4: "g", None: "h"}.items():
        for name in names:
            index.put(name, bucket)
    return index


def test_uniform_gives_every_task_that_is_left_the_same_chance(index):
    assert_frequencies(lambda rng: draw_uniform(index.all(), {"a", "d"}, rng), dict.fromkeys("bcefgh", 1))


def test_uniform_is_exact_where_nearly_everything_is_excluded():
    ids = [f"{i:03}" for i in range(200)]
    assert_frequencies(lambda rng: draw_uniform(ids, set(ids[2:]), rng), {"000": 1, "001": 1}, n=2000)


def test_normal_weighs_buckets_by_distance_from_half_and_tasks_of_one_bucket_alike(index):
    weights = {0: math.exp(-2), 2: 1.0, 4: math.exp(-2), None: 1.0}
    sizes = {0: "ab", 2: "cdef", 4: "g", None: "h"}
    expected = {name: weights[b] / len(names) for b, names in sizes.items() for name in names}
    assert_frequencies(lambda rng: draw_normal(index, 4, (), rng), expected)


def test_normal_leaves_out_buckets_without_a_task_outside_the_batch(index):
    weights = {"c": 1.0, "g": math.exp(-2), "h": 1.0}
    assert_frequencies(lambda rng: draw_normal(index, 4, set("abdef"), rng), weights)


def test_normal_does_not_underflow_in_large_groups():
    index = TaskIndex()
    index.put("a", 1)
    assert draw_normal(index, 4096, (), random.Random(0)) == "a"


def test_nothing_left_gives_nothing(index):
    everything = set("abcdefgh")
    rng = random.Random(0)
    assert draw_uniform(index.all(), everything, rng) is None
    assert draw_normal(index, 4, everything, rng) is None
    assert priorities_of(dict.fromkeys(everything, 0.0)).draw(everything, rng) is None
    assert draw_uniform([], (), rng) is None


def priorities_of(logs):
    priorities = Priorities()
    for key, log_weight in logs.items():
        priorities.put(key, log_weight)
    return priorities


def draw_priority(priorities, beta, rng):
    key, ratio = priorities.draw((), rng)
    return key, sampling_correction(ratio, beta)


PRIORITIES = {"a": (0.5, 0), "b": (0.25, 10), "c": (1.0, 3), "d": (0.75, 50)}


def priority(name, alpha=0.8, tau=20.0):
    p, age = PRIORITIES[name]
    return (p * (1 - p) + 0.01) ** alpha * math.exp(-age / tau)


def logs(name):
    p, age = PRIORITIES[name]
    return log_priority(p * (1 - p), alpha=0.8) - age / 20.0


def test_priority_is_variance_of_success_times_freshness():
    priorities = priorities_of({name: logs(name) for name in "abcd"})
    assert_frequencies(lambda rng: priorities.draw((), rng)[0], {name: priority(name) for name in "abcd"})


def corrections(beta):
    found = {}
    rng = random.Random(0)
    while len(found) < 4:
        name, weight = draw_priority(priorities_of({name: logs(name) for name in "abcd"}), beta, rng)
        found[name] = weight
    return found


def probabilities():
    total = sum(priority(name) for name in "abcd")
    return {name: priority(name) / total for name in "abcd"}


def test_at_beta_one_common_tasks_count_alike_and_rare_ones_by_their_priority():
    p, weight = probabilities(), corrections(1.0)
    mean = sum(value**2 for value in p.values())
    assert min(p.values()) < mean < max(p.values())
    assert {n: p[n] * weight[n] for n in "abcd"} == pytest.approx({n: min(p[n], mean) for n in "abcd"})


@pytest.mark.parametrize("beta", [0.0, 0.4, 1.0])
def test_the_correction_follows_the_formula(beta):
    p = probabilities()
    effective = 1 / sum(value**2 for value in p.values())
    assert corrections(beta) == pytest.approx({n: min(1.0, (effective * p[n]) ** -beta) for n in "abcd"})


PRIORITY_LOGS = st.lists(st.floats(-60, 0), min_size=1, max_size=30)


def weights_of(logs, beta):
    """Of every task: its correction."""
    priorities = priorities_of({f"{i:02}": value for i, value in enumerate(logs)})
    return {f"{i:02}": sampling_correction(priorities.ratio(f"{i:02}"), beta) for i in range(len(logs))}


@given(logs=PRIORITY_LOGS, beta=st.floats(0, 1), age=st.integers(100, 10_000))
def test_an_ancient_task_changes_nothing_for_the_others(logs, beta, age):
    """Of the largest priority but for its age (in tau): the weights of the others are what they are without it."""
    others = weights_of(logs, beta)
    together = weights_of([*logs, max(logs) - age], beta)
    for task_id, weight in others.items():
        assert together[task_id] == pytest.approx(weight, rel=1e-5)


@given(logs=PRIORITY_LOGS, beta=st.floats(0, 1))
def test_no_weight_is_above_one_and_their_mean_has_a_floor(logs, beta):
    weights = weights_of(logs, beta)
    assert all(0 < weight <= 1 for weight in weights.values())
    total = sum(math.exp(value - max(logs)) for value in logs)
    mean = sum(math.exp(logs[int(i)] - max(logs)) / total * weight for i, weight in weights.items())
    assert mean >= 2 ** -(1 + beta) * (1 - 1e-9)


def test_priorities_of_very_old_tasks_do_not_underflow():
    key, weight = draw_priority(priorities_of({"a": -1e6, "b": -1e6 - 1}), 1.0, random.Random(0))
    assert key in "ab" and 0 < weight <= 1


@given(st.lists(st.one_of(st.none(), st.floats(0, 5), st.just(math.nan)), min_size=1, max_size=8), st.integers(1, 8))
def test_the_smallest_or_largest_entropies_are_chosen_and_unknown_ones_last(make, entropies, k):
    entries = [make.entry(i, entropy=entropy) for i, entropy in enumerate(entropies)]
    before = list(entries)
    for select, sign in (("argmin", 1), ("argmax", -1)):
        chosen = choose(entries, k, select, lambda: random.Random(0))
        known = [e for e in entries if e.entropy is not None and not math.isnan(e.entropy)]
        unknown = [e for e in entries if e not in known]
        assert chosen == [*sorted(known, key=lambda e: sign * e.entropy), *unknown][:k]
    assert entries == before


def test_random_choice_is_uniform_over_sets(make):
    entries = [make.entry(i) for i in range(4)]
    pairs = {frozenset((i, j)): 1 for i in range(4) for j in range(i)}
    assert_frequencies(lambda rng: frozenset(e.row_id for e in choose(entries, 2, "random", lambda: rng)), pairs)


def pooled(make, config, turns):
    entries = [make.entry(i, task, n_turns=n) for i, (task, n) in enumerate(turns)]
    return Replay(config, entries=entries)


def draws(experience, config, n, **keywords):
    sampler = TaskSampler(config.environments, 0)
    return [experience.next_group(sampler, **({"progress": 0.5, "version": 0} | keywords)) for _ in range(n)]


def test_within_a_batch_tasks_are_drawn_without_replacement(make):
    config = make.config(batch=6, task_ratio=1.0, task_sampling="uniform", tasks=6)
    experience = pooled(make, config, [(i, 1) for i in range(6)])
    for _ in range(20):
        assert sorted(p.task.seed for p in draws(experience, config, 6)) == list(range(6))


@pytest.mark.parametrize("sampling", ["priority", "uniform"])
def test_no_held_out_task_of_an_import_is_trained(make, sampling):
    config = make.config(batch=2, task_ratio=1.0, task_sampling=sampling, tasks=10)
    experience = Replay(config, entries=[make.entry(i, i) for i in (3, 12, HELD_OUT_SEED)])
    sampler = TaskSampler(config.environments, 0)
    sampler.learn({"a": {"train": Seeds.of(range(10)), "eval": Seeds.of(range(10, 14))}})
    experience.learn(sampler)
    planned = [experience.next_group(sampler, progress=0.5, version=0) for _ in range(40)]
    assert {p.task.seed for p in planned if p.k} == {3}
    assert {p.task.seed for p in planned} <= set(range(10))


def test_retired_and_deferred_tasks_that_a_changed_run_file_holds_out_are_not_drawn(make):
    config = make.config(batch=2, tasks=10, retest_ratio=0.5)
    before = Replay(config)
    for i in range(5):
        make.play(before, i, 4, 4, 4 * i)
    for i in (6, 7):
        before.cancelled(make.task(i))
    changes = before.take_changes()
    experience, sampler = Replay(config, tasks=changes.tasks, state=changes.state), TaskSampler(config.environments, 0)
    sampler.learn({"a": {"eval": Seeds.of([2, 3, 6])}})
    experience.learn(sampler)
    planned = [experience.next_group(sampler, progress=0.5, version=0) for _ in range(40)]
    assert {p.task.seed for p in planned} == {0, 1, 4, 5, 7, 8, 9}


def test_the_pool_is_drawn_by_variance_of_success_times_freshness(make):
    config = make.config(batch=1, task_ratio=1.0, task_sampling="priority", priority={"tau": 8.0}, tasks=100)
    experience = Replay(config)
    weights = {}
    for task, (successes, version) in enumerate(((1, 10), (2, 10), (3, 4), (2, 0))):
        make.play(experience, task, successes, 4, 10 * task, version=version)
        variance = (1 + successes) * (5 - successes) / (6 * 7)
        weights[task] = (variance + 0.01) * math.exp(-(10 - version) / 8)
    plans = iter(draws(experience, config, 6000, version=10))
    assert_frequencies(lambda _: next(plans).task.seed, weights)


def test_a_stored_task_moves_to_the_bucket_of_its_latest_group(make):
    config = make.config(difficulty_half_life=0.0, batch=1, task_ratio=1.0, tasks=100)
    experience = Replay(config)
    make.play(experience, 0, 2, 4, 0)
    make.play(experience, 1, 2, 4, 10)
    make.play(experience, 1, 0, 4, 20)
    assert [experience.difficulty.records[f"a/{i}"].bucket for i in range(2)] == [2, 0] and len(experience.pool) == 4
    plans = iter(draws(experience, config, 6000))
    assert_frequencies(lambda _: next(plans).task.seed, {0: 1, 1: math.exp(-2)})


def test_beta_grows_to_one_with_progress(make):
    priority = {"beta": 0.4, "tau": 10.0}
    config = make.config(batch=1, task_ratio=1.0, task_sampling="priority", priority=priority, tasks=9)
    entries = [make.entry(0, 0, version_min=10), make.entry(1, 1, version_min=0)]
    for progress, beta in ((0.0, 0.4), (0.5, 0.7), (1.0, 1.0), (2.0, 1.0)):
        experience = Replay(config, entries=entries)
        plans = draws(experience, config, 100, progress=progress, version=10)
        weights = {p.task.seed: p.candidates[0].weight for p in plans}
        p = 1 / (1 + math.exp(-1))
        assert weights == pytest.approx({0: ((p**2 + (1 - p) ** 2) / p) ** beta, 1: 1.0})


def test_an_ancient_task_in_the_pool_does_not_change_the_weights_of_the_others(make):
    config = make.config(batch=4, task_ratio=1.0, task_sampling="priority", priority={"tau": 4.0}, tasks=99)
    young = [make.entry(i, i, version_min=990 + i) for i in range(9)]
    ancient = make.entry(50, 50, version_min=0)

    def weights(entries):
        plans = draws(Replay(config, entries=entries), config, 200, version=1000)
        assert all(p.k for p in plans)
        return [(p.task.seed, p.candidates[0].weight) for p in plans]

    without = weights(young)
    assert weights([ancient, *young]) == without
    assert sum(weight for _, weight in without) / 200 > 0.25


def test_bias_correction_is_the_success_rate_when_it_was_saved_and_one_where_unknown(make):
    config = make.config(batch=1, task_ratio=1.0, bias_correction=True, tasks=9)
    entries = [make.entry(0, 0, success_rate=0.25), make.entry(1, 1, success_rate=None, recorded=False)]
    plans = draws(Replay(config, entries=entries), config, 60)
    assert {p.task.seed: p.candidates[0].weight for p in plans} == {0: 0.25, 1: 1.0}


def test_the_learner_may_choose_from_all_usable_ones_best_first(make):
    values = dict(batch=1, task_ratio=1.0, trajectories_per_task=2, tasks=1)
    entries = [make.entry(i, entropy=e) for i, e in enumerate((3.0, None, 1.0, 2.0))]

    def candidates(**more):
        config = make.config(**values, **more)
        (plan,) = draws(Replay(config, entries=entries), config, 1)
        assert plan.k == 2
        return [c.entry.row_id for c in plan.candidates]

    assert candidates(entropy="current") == [2, 3, 0, 1]
    assert candidates(entropy="stored") == [2, 3]
    assert candidates(entropy="current", select="argmax") == [0, 3, 2, 1]
    assert len(candidates(entropy="current", select="random")) == 2
