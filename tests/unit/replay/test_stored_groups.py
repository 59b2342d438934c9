"""Groups that come back whole: what is stored, what is drawn, what leaves, and that a restart changes nothing."""

from __future__ import annotations

import copy
import json
import math
import random
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from pipeline.config.replay import ReplayConfig
from pipeline.replay.replay import Replay
from pipeline.replay.selection import Draws
from pipeline.replay.stored_groups import StoredGroups
from pipeline.store.replay_records import Eviction, StoredGroup
from pipeline.tasks.sampler import TaskSampler


def rule(**groups) -> ReplayConfig:
    max_age = groups.pop("max_age", None)
    return ReplayConfig.model_validate({"enabled": True, "mode": "groups", "groups": groups, "max_age": max_age})


def group_of(make, number: int, rewards, *, task: int | None = None, version: int = 0) -> StoredGroup:
    task_of = make.task(number if task is None else task)
    members = tuple(
        make.entry(10 * number + i, task_of, reward=float(reward), version_min=version)
        for i, reward in enumerate(rewards)
    )
    return StoredGroup(number, task_of, members)


def stored(replay: ReplayConfig, groups=(), next_saved: int = 0, n: int = 2) -> StoredGroups:
    return StoredGroups(replay, n, 0, {"a": None}, groups, next_saved)


def test_only_groups_whose_rewards_differ_are_stored_and_each_once(make):
    held = stored(rule())
    assert not held.save(group_of(make, 0, (1, 1))) and not held.save(group_of(make, 1, (0, 0)))
    assert held.save(group_of(make, 2, (0, 1))) and not held.save(group_of(make, 2, (0, 1)))
    assert [group.group_number for group in held] == [2]


@pytest.mark.parametrize("ages", [(0, 0, 0), (0, 5, 20), (900, 1000, 1001)])
def test_priority_is_the_sum_of_absolute_advantages_times_exp_of_minus_age_over_tau(make, ages):
    rewards = ((0, 0, 0, 1), (0, 0, 1, 1), (0, 1, 1, 1))
    now = 2000
    groups = [group_of(make, i, r, version=now - age) for i, (r, age) in enumerate(zip(rewards, ages, strict=True))]
    weights = [sum(abs(x - sum(r) / 4) for x in r) * math.exp(-age / 8.0) for r, age in zip(rewards, ages, strict=True)]
    held, draws, n = stored(rule(uses_max=10**6), n=4), Draws(3), 4000
    for group in groups:
        held.save(group)
    found = Counter(held.draw((), now, draws.next("group")).group_number for _ in range(n))
    for i, weight in enumerate(weights):
        share = weight / sum(weights)
        assert abs(found[i] - n * share) <= 5 * math.sqrt(n * share * (1 - share)) + 1e-9


def test_the_newest_group_comes_back_first_as_often_as_it_may(make):
    held = stored(rule(select="newest", uses_max=2))
    for number in range(3):
        held.save(group_of(make, number, (0, 1)))
    drawn = [held.draw((), 0, random.Random(0)).group_number for _ in range(6)]
    assert drawn == [2, 2, 1, 1, 0, 0] and held.draw((), 0, random.Random(0)) is None
    assert [(group.group_number, reason) for group, reason in held.take()[1]] == [(i, Eviction.USES) for i in range(3)]


def test_the_oldest_groups_leave_over_the_bound_on_bytes_and_a_larger_one_is_not_stored(make):
    one = group_of(make, 0, (0, 1))
    size = sum(entry.n_bytes for entry in one.members)
    held = StoredGroups(rule().model_copy(update={"capacity_bytes": 2 * size}), 2, 0, {"a"})
    for group in (one, *(group_of(make, number, (0, 1)) for number in (1, 2))):
        assert held.save(group)
    assert [group.group_number for group in held] == [1, 2] and held.bytes == 2 * size
    assert [(group.group_number, reason) for group, reason in held.take()[1]] == [(0, Eviction.BYTES)]
    small = StoredGroups(rule().model_copy(update={"capacity_bytes": size - 1}), 2, 0, {"a"})
    assert not small.save(group_of(make, 3, (0, 1))) and len(small) == 0


def test_tasks_of_the_batch_and_of_environments_that_the_run_lacks_are_passed_over(make):
    held = stored(rule(select="uniform"))
    held.save(group_of(make, 0, (0, 1)))
    held.save(StoredGroup(1, make.task(5, "b"), group_of(make, 1, (0, 1)).members))
    assert held.draw({"a/0"}, 0, random.Random(0)) is None
    assert held.draw((), 0, random.Random(0)).group_number == 0


def test_groups_of_another_size_leave_when_the_run_starts_again(make):
    held = stored(rule(), [group_of(make, 0, (0, 1, 1)), group_of(make, 1, (0, 1))])
    assert [group.group_number for group in held] == [1]
    changed, removed = held.take()
    assert not changed and [(group.group_number, reason) for group, reason in removed] == [(0, Eviction.RECONFIGURED)]


@settings(max_examples=100)
@given(seed=st.integers(0, 2**32))
def test_bounds_hold_under_any_history_and_a_restart_draws_what_would_have_come(make, seed):
    rng = random.Random(seed)
    replay = rule(
        capacity=rng.choice((1, 3, 100)),
        uses_max=rng.randint(1, 3),
        select=rng.choice(("priority", "uniform", "newest")),
        tau=rng.choice((0.1, 8.0)),
        max_age=rng.choice((None, 3)),
    )
    one = other = stored(replay)
    rows: dict[int, StoredGroup] = {}
    uses: Counter[int] = Counter()
    version = 0
    for number in range(rng.randint(0, 60)):
        operation, rewards, age = rng.randrange(8), [rng.randrange(2) for _ in range(2)], rng.randrange(3)
        seed_of_draw, task = rng.random(), rng.randrange(4)
        if operation == 0:
            version += 1
        for held in (one,) if one is other else (one, other):
            if operation == 0:
                held.age_to(version)
            elif operation == 1:
                held.retire(f"a/{task}")
            elif operation <= 4:
                held.save(group_of(make, number, rewards, task=task, version=version - age))
        if operation > 4:
            drawn = [
                None if group is None else group.group_number
                for group in (
                    held.draw({f"a/{task}"}, version, random.Random(seed_of_draw))
                    for held in ((one,) if one is other else (one, other))
                )
            ]
            assert len(set(drawn)) == 1
            if drawn[0] is not None:
                uses[drawn[0]] += 1
                assert uses[drawn[0]] <= replay.groups.uses_max
        changed, removed = one.take()
        rows.update({group.group_number: copy.copy(group) for group in changed})
        for left, _ in removed:
            rows.pop(left.group_number, None)
        assert rows == {group.group_number: group for group in one}
        assert len(one) <= replay.groups.capacity
        assert all(group.informative and group.uses < replay.groups.uses_max for group in one)
        if replay.max_age is not None:
            assert all(version - group.version_min <= 3 or operation != 0 for group in one)
        if rng.random() < 0.2:
            other = stored(replay, map(copy.copy, rows.values()), one.next_saved)


def test_an_experience_of_groups_plans_whole_groups_and_continues_after_a_restart(make):
    config = make.config(n=2, batch=2, tasks=8, mode="groups", task_ratio=0.5)
    sampler = TaskSampler(config.environments, 0)
    experience = Replay(config)
    for number in range(3):
        fresh = [make.fresh(10 * number + i, float(i)) for i in range(2)]
        assert experience.finished(make.task(number), fresh, version=0).saved == ()
        assert experience.trained(number, make.task(number), fresh) is not None
    changes = experience.take_changes()
    again = Replay(
        config,
        groups=map(copy.copy, changes.groups),
        tasks=map(copy.copy, changes.tasks),
        state=json.loads(json.dumps(changes.state)),
    )
    for x in (experience, again):
        position = TaskSampler(config.environments, 0, sampler.state())
        plans = [x.next_group(position, progress=0.0, version=1) for _ in range(6)]
        assert [plan.k for plan in plans] == [2, 0] * 3
        assert all(len(plan.candidates) == 2 for plan in plans[::2])
        assert {c.entry.reward for plan in plans[::2] for c in plan.candidates} == {0.0, 1.0}
    assert list(experience.groups) == list(again.groups)


@pytest.mark.parametrize(("mode", "kept"), [("mix", 0), ("groups", 1)])
def test_groups_are_stored_only_where_they_come_back_whole(make, mode, kept):
    experience = Replay(make.config(n=2, batch=2, tasks=8, mode=mode))
    experience.trained(0, make.task(0), [make.fresh(i, float(i)) for i in range(2)])
    assert len(experience.groups) == kept


@pytest.mark.parametrize(
    ("more", "says"),
    [
        ({"replay": {"task_ratio": 1.0}}, "set it below 1"),
        ({"advantage": {"estimator": "remax"}}, "greedy rollout"),
    ],
)
def test_what_whole_groups_cannot_do_is_refused_with_the_reason(make, more, says):
    config = make.config().model_dump()
    config["replay"] |= {"mode": "groups", **more.get("replay", {})}
    config |= {key: value for key, value in more.items() if key != "replay"}
    with pytest.raises(ValidationError, match=says):
        type(make.config()).model_validate(config)


@pytest.mark.parametrize("mode", ["mix", "groups"])
def test_experience_of_an_environment_that_is_only_evaluated_from_now_on_is_not_trained(make, mode):
    def config(weight: float):
        environments = {"a": {"tasks": 8, "weight": weight}, "b": {}}
        return make.config(n=2, batch=2, mode=mode, task_ratio=0.5, environments=environments)

    experience = Replay(config(1.0))
    fresh = [make.fresh(i, float(i)) for i in range(2)]
    experience.finished(make.task(0), fresh, version=0)
    experience.trained(0, make.task(0), fresh)
    changes = experience.take_changes()

    def first_plan(weight: float):
        rows = {"entries": changes.entries, "groups": changes.groups, "tasks": changes.tasks}
        now = config(weight)
        again = Replay(now, **{name: map(copy.copy, found) for name, found in rows.items()}, state=changes.state)
        return again.next_group(TaskSampler(now.trained_environments, 0), progress=0.0, version=0)

    assert first_plan(1.0).task.environment == "a" and first_plan(1.0).k
    assert first_plan(0.0).task.environment == "b" and not first_plan(0.0).k
