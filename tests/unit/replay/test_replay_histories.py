"""Under any history the pool's invariants hold, and a restart at any moment changes nothing that is drawn after it."""

from __future__ import annotations

import random

from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.config.learner import CheckpointConfig
from pipeline.store.replay_records import Eviction

SEEDS = st.integers(0, 2**32)
"""Of a configuration and a history: drawn number by number, hypothesis would make most of them empty."""


def config_of(make, rng):
    n = rng.randint(2, 5)
    per_task = rng.randint(1, 4)
    mode = rng.choice(["mix", "mix", "groups"])
    tasks = rng.choice([None, 1, 3, 12])
    start = rng.choice([{}, {}, {"start_ratio": 0.5}, {"start_solve_rate": 0.5}])
    return make.config(
        n=n,
        batch=rng.randint(1, 6),
        tasks=tasks,
        staleness=rng.randint(0, 2),
        seed=rng.randint(0, 3),
        mode=mode,
        groups={
            "capacity": rng.choice([1, 3, 512]),
            "uses_max": rng.randint(1, 3),
            "select": rng.choice(["priority", "priority", "uniform", "newest"]),
            "tau": rng.choice([0.1, 8.0]),
        },
        correction=rng.choice(["token", "sequence", "geometric", "soft"]),
        task_ratio=rng.choice([0.0, 0.3, 0.5, 1.0 if mode == "mix" else 0.75]),
        trajectories_per_task=rng.randint(1, min(n - 1, per_task)),
        max_trajectories_per_task=per_task,
        capacity=rng.choice([2, 8, 50_000]),
        capacity_bytes=rng.choice([500, 2000, 2**40]),
        difficulty_half_life=rng.choice([0.0, 0.5, 1.0, 4.0]),
        retire_after=rng.choice([None, 1, 1, 2]),
        select=rng.choice(["argmin", "argmax", "random"]),
        entropy=rng.choice(["stored", "current"]),
        task_sampling=rng.choice(["uniform", "normal", "priority"]),
        max_age=rng.choice([None, 2, 4]),
        retest_ratio=rng.choice([0.0, 0.3]),
        bias_correction=rng.random() < 0.5,
        ess_guard={"enabled": rng.random() < 0.5},
        **start,
    )


def operations_of(rng):
    return [(rng.randrange(10), rng.randrange(2**16)) for _ in range(rng.randint(0, 120))]


def shape(plans):
    """What of a plan a later draw may differ in."""
    return [(p.task, p.k, [(c.entry.row_id, c.weight) for c in p.candidates]) for p in plans]


@settings(max_examples=200)
@given(seed=SEEDS)
def test_invariants_hold_and_a_restart_at_any_moment_draws_what_would_have_come(make, seed):
    rng = random.Random(seed)
    config = config_of(make, rng)
    one, other = make.history(config, restarts=False), make.history(config)
    for operation, x in operations_of(rng):
        one.apply(operation, x)
        other.apply(operation, x)
    one.write()
    other.restart()
    for i in range(100):
        for history in (one, other):
            history.admit(i)
            if i % 3:
                history.finish(history.playing.pop(0), seed + 17 * i)
            if i % 20 == 10:
                history.update(i // 5)
                history.age()
    assert shape(one.plans) == shape(other.plans)
    assert list(one.replay.pool) == list(other.replay.pool)
    assert list(one.replay.groups) == list(other.replay.groups)
    for history in (one, other):
        history.write()
        history.check()


@settings(max_examples=60)
@given(seed=SEEDS)
def test_an_update_that_is_taken_back_leaves_what_there_would_be_had_it_never_been_made(make, seed):
    """The trajectories that were collected and the versions that were published meanwhile are the same in both. So
    evictions, which go by entropy, are left out."""
    rng = random.Random(seed)
    config = config_of(make, rng)
    replay = config.replay.model_copy(update={"max_trajectories_per_task": 1000})
    config = config.model_copy(update={"replay": replay})
    one, other = make.history(config), make.history(config)
    for operation, x in operations_of(rng):
        one.apply(operation, x)
        other.apply(operation, x)
    resumed = one.updates + rng.randint(0, 3)
    for _ in range(rng.randint(0, 30)):
        x = rng.randrange(2**16)
        if one.playing and rng.random() < 0.5:
            one.finish(one.playing.pop(x % len(one.playing)), x)
            other.finish(other.playing.pop(x % len(other.playing)), x)
        else:
            one.update(x)
            if other.updates < resumed:
                other.update(x)
            one.age(), other.age()
        one.write(), other.write()
    if rng.random() < 0.5:
        one.restart()
    one.replay.roll_back(resumed)
    one.write()
    one.check(), other.check()
    assert list(one.replay.pool) == list(other.replay.pool)
    assert (one.replay.factor, one.replay.share) == (other.replay.factor, other.replay.share)
    assert one.replay._state() == other.replay._state()
    assert one.replay.difficulty.records == other.replay.difficulty.records
    assert (one.update_records or []) == (other.update_records or [])
    for i in range(20):
        one.admit(i), other.admit(i)
    assert shape(one.plans) == shape(other.plans)


def test_updates_are_remembered_while_a_checkpoint_before_them_may_be_there(make):
    history = make.history(make.config().model_copy(update={"checkpoint": CheckpointConfig(every=2, keep=3)}))
    history.replay.import_entries([make.entry(0)])
    for update in range(20):
        history.update(0)
        if update % 2:
            history.replay.covered(update + 1)
    history.write()
    assert [record["update"] for record in history.update_records] == list(range(14, 20))
    history.replay.roll_back(14)
    assert next(iter(history.replay.pool)).uses == 14


@settings(max_examples=20)
@given(seed=SEEDS)
def test_reading_never_changes_the_store(make, seed):
    rng = random.Random(seed)
    history = make.history(config_of(make, rng))
    for operation, x in operations_of(rng):
        history.apply(operation, x)
    x = history.replay
    for _ in range(2):
        _ = list(x.pool), 0 in x.pool, x.difficulty.buckets, x.difficulty.retired, x.share, x.oldest_version, x.bytes
    assert not x.take_changes()
    history.check()


def test_the_generated_histories_reach_what_they_are_about(make):
    """Replays, evictions, retirement: each in a fair part of histories, or the properties above say little."""
    reached = dict.fromkeys(("replay", "left", "aged", "retired", "factor", "whole", "used"), 0)
    for seed in range(80):
        rng = random.Random(seed)
        config = config_of(make, rng)
        history = make.history(config)
        for operation, x in operations_of(rng):
            history.apply(operation, x)
        n = config.groups.n_rollout
        reached["replay"] += any(0 < plan.k < n for plan in history.plans)
        reached["whole"] += any(plan.k == n for plan in history.plans)
        reached["used"] += history.reasons[Eviction.USES] > 0
        reached["left"] += history.left > 0
        reached["aged"] += history.reasons[Eviction.AGE] > 0
        reached["retired"] += len(history.replay.difficulty.retired) > 0
        reached["factor"] += history.replay.factor < 1
    assert min(reached.values()) >= 3, sorted(reached.items())


def test_memory_does_not_grow_with_endless_tasks(make):
    history = make.history(make.config(capacity=10, tasks=None))
    for i in range(400):
        history.admit(i)
        history.finish(history.playing.pop(), 4 * (i % 16) + 2)
        history.write()
    assert len(history.replay.difficulty.records) - len(history.replay.difficulty.retired) <= 10
    assert len(str(history.state)) < 2000
