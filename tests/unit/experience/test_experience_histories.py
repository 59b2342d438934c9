"""Under any history the pool's invariants hold, and a restart at any moment changes nothing that is drawn after it."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

OPERATIONS = st.lists(st.tuples(st.integers(0, 9), st.integers(0, 2**16)), max_size=50)


@st.composite
def settings_of_replay(draw):
    """Keyword arguments of the configuration maker."""
    n = draw(st.integers(2, 5))
    per_task = draw(st.integers(1, 4))
    values = dict(
        n=n,
        batch=draw(st.integers(1, 6)),
        tasks=draw(st.sampled_from([None, 1, 3, 12])),
        staleness=draw(st.integers(0, 2)),
        seed=draw(st.integers(0, 3)),
        task_ratio=draw(st.sampled_from([0.0, 0.3, 0.5, 1.0])),
        trajectories_per_task=draw(st.integers(1, min(n - 1, per_task))),
        max_trajectories_per_task=per_task,
        capacity=draw(st.sampled_from([1, 5, 50_000])),
        select=draw(st.sampled_from(["argmin", "argmax", "random"])),
        entropy=draw(st.sampled_from(["stored", "current"])),
        task_sampling=draw(st.sampled_from(["uniform", "normal", "priority"])),
        difficulty=draw(st.sampled_from([None, None, 1])),
        max_age=draw(st.sampled_from([None, 2, 4])),
        window=draw(st.sampled_from([0, 1, 4])),
        unit=draw(st.sampled_from(["trajectory", "turn"])),
        retest_ratio=draw(st.sampled_from([0.0, 0.3])),
        inject=draw(st.sampled_from(["ratio", "rescue"])),
        bias_correction=draw(st.booleans()),
        ess_guard={"enabled": draw(st.booleans())},
    )
    start = draw(st.sampled_from([{}, {"start_ratio": 0.5}, {"start_solve_rate": 0.5}]))
    return values | start


def shape(plans):
    """What of a plan a later draw may differ in."""
    return [(p.task, p.k, [(c.entry.seq, c.weight, c.turn) for c in p.candidates]) for p in plans]


@settings(max_examples=60)
@given(values=settings_of_replay(), operations=OPERATIONS, more=st.integers(0, 2**16))
def test_invariants_hold_and_a_restart_at_any_moment_draws_what_would_have_come(make, values, operations, more):
    config = make.config(**values)
    one, other = make.history(config, restarts=False), make.history(config)
    for operation, x in operations:
        one.apply(operation, x)
        other.apply(operation, x)
    other.restart()
    for i in range(100):
        for history in (one, other):
            history.apply(0, more)
            if i % 3:
                history.apply(4, more + 17 * i)
    assert shape(one.plans) == shape(other.plans)


@settings(max_examples=30)
@given(values=settings_of_replay(), operations=OPERATIONS)
def test_reading_never_changes_the_store(make, values, operations):
    history = make.history(make.config(**values))
    for operation, x in operations:
        history.apply(operation, x)
    x = history.experience
    for _ in range(2):
        _ = len(x), x.holds(0), x.entries, x.tasks, x.buckets(), x.retired, x.share, x.oldest_version, x.bytes, x.factor
    assert not x.take_changes()
    history.check()


def test_memory_does_not_grow_with_endless_tasks(make):
    config = make.config(capacity=10, tasks=None)
    history = make.history(config)
    for i in range(400):
        history.apply(0, i)
        history.playing[-1] = history.playing[-1]
        history.finish(history.playing.pop(), 4 * (i % 16) + 2)
        history.write()
    assert len(history.experience.tasks) - history.experience.retired <= 10
    assert len(str(history.state)) < 2000
