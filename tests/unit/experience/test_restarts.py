"""Restarts: the turn after which the policy continues is found for every task, under any history, and kept."""

from __future__ import annotations

import copy
import json
import random

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from pipeline.experience.experience import Experience
from pipeline.experience.restarts import begun, observed
from pipeline.store.experience_records import PoolEntry, RestartSearch
from pipeline.tasks.sampler import TaskSampler

LOW, HIGH = 0.2, 0.8


@given(n=st.integers(2, 40), observations=st.lists(st.tuples(st.integers(1, 40), st.floats(0, 1)), max_size=40))
def test_bounds_and_turn_stay_ordered_under_any_observations_even_late_ones(n, observations):
    search = begun(1, n)
    for turn, rate in observations:
        search = observed(search, 1 + (turn - 1) % (n - 1), rate, LOW, HIGH)
        assert 0 <= search.low < search.high <= n
        assert search.turn == 0 or search.low < search.turn < search.high


@given(n=st.integers(2, 200), data=st.data())
def test_where_a_turn_is_neither_sure_nor_hopeless_bisection_finds_one_in_log_steps_and_stays(n, data):
    rare = data.draw(st.integers(0, n - 2))  # turns up to here are too rare
    common = data.draw(st.integers(rare + 2, n))  # and from here on too common
    search, groups = begun(1, n), 0
    while not rare < search.turn < common:
        assert search.turn
        search = observed(search, search.turn, 0.0 if search.turn <= rare else 1.0, LOW, HIGH)
        groups += 1
    assert groups <= n.bit_length()
    assert observed(search, search.turn, 0.5, LOW, HIGH).turn == search.turn


def test_an_improving_policy_moves_the_restart_to_the_start_and_a_forgetting_one_back():
    search = begun(1, 8)
    seen = [search.turn]
    while search.turn:
        search = observed(search, search.turn, 1.0, LOW, HIGH)
        seen.append(search.turn)
    assert seen == [4, 2, 1, 0]
    search, seen = begun(1, 8), []
    while search.turn:
        seen.append(search.turn)
        search = observed(search, search.turn, 0.0, LOW, HIGH)
    assert seen == [4, 6, 7], "after the last turn nothing is left to try"


def play(experience, make, task, successes, first, n=4):
    fresh = [make.fresh(first + i, float(i < successes), n_turns=6) for i in range(n)]
    return experience.finished(make.task(task), fresh, planned=False, version=0)


def started(make, **replay):
    config = make.config(n=4, batch=2, tasks=8, mode="restart", **replay)
    experience = Experience(config)
    experience.learn(["a"])
    return config, experience, TaskSampler(config.environments, 0)


def restarted_of(experience, sampler, n=4):
    plans = [experience.next_group(sampler, progress=0.0, version=0) for _ in range(n)]
    return [plan for plan in plans if plan.restart is not None]


def test_a_task_is_restarted_once_its_success_is_too_rare_from_the_start_and_no_longer_when_it_is_not(make):
    _, experience, sampler = started(make)
    play(experience, make, 0, 2, 0)
    assert not restarted_of(experience, sampler), "half of its rollouts succeed from the start"
    for first in (10, 20):
        play(experience, make, 0, 0, first)
    plans = restarted_of(experience, sampler)
    assert [plan.task.task_id for plan in plans] == ["a/0"] * 2, "once in a batch of two groups"
    assert plans[0].k == 0 and plans[0].candidates == () and plans[0].restart.turn == 3
    assert plans[0].restart.entry.reward == 1.0
    play(experience, make, 0, 3, 30)
    assert not restarted_of(experience, sampler)


def test_restarted_rollouts_move_the_turn_and_change_neither_difficulty_nor_the_pool(make):
    _, experience, sampler = started(make)
    play(experience, make, 0, 1, 0)
    play(experience, make, 0, 0, 10)
    restart = restarted_of(experience, sampler)[0].restart
    before = {name: copy.copy(record) for name, record in experience.tasks.items()}
    entries = experience.entries
    assert experience.restarted(make.task(0), restart, [1.0] * 4) == 4
    after = experience.tasks["a/0"]
    for name in ("bucket", "successes", "failures", "solved", "retired", "visits"):
        assert getattr(after, name) == getattr(before["a/0"], name)
    assert experience.entries == entries
    assert restarted_of(experience, sampler)[0].restart.turn == 1 < restart.turn
    assert experience.restarted(make.task(0), restart, [0.0] * 4) == 0, "a late answer, for the turn of before"


def test_a_task_that_could_not_be_played_again_is_not_restarted_again_even_after_a_resume(make):
    config, experience, sampler = started(make)
    play(experience, make, 0, 1, 0)
    play(experience, make, 0, 0, 10)
    assert restarted_of(experience, sampler)
    experience.unreproducible(make.task(0))
    for first in (20, 30):
        play(experience, make, 0, 0, first)
    assert not restarted_of(experience, sampler)
    changes = experience.take_changes()
    again = Experience(config, entries=changes.entries, tasks=changes.tasks, state=changes.state)
    again.learn(["a"])
    assert not restarted_of(again, sampler)


def test_only_environments_that_declare_it_are_restarted(make):
    _, experience, sampler = started(make)
    play(experience, make, 0, 1, 0)
    play(experience, make, 0, 0, 10)
    experience.learn([])
    assert not restarted_of(experience, sampler)
    experience.learn(["a"])
    assert restarted_of(experience, sampler)


def test_a_new_search_begins_in_another_success_when_the_one_of_before_has_left(make):
    _, experience, sampler = started(make, max_trajectories_per_task=1, trajectories_per_task=1, select="random")
    play(experience, make, 0, 1, 0)
    play(experience, make, 0, 0, 10)
    first = restarted_of(experience, sampler)[0].restart
    play(experience, make, 0, 1, 20)  # first in, first out
    assert [entry.row_id for entry in experience.entries] == [20]
    play(experience, make, 0, 0, 30)
    second = restarted_of(experience, sampler)[0].restart
    assert (first.entry.row_id, second.entry.row_id) == (0, 20)


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**32))
@example(seed=1_525_059_950)  # a success that leaves by age
def test_a_stage_that_resumes_restarts_what_would_have_come(make, seed):
    rng = random.Random(seed)
    config = make.config(
        n=4, batch=3, tasks=6, mode="restart", max_age=rng.choice((None, 6)), window=rng.choice((0, 5))
    )
    sampler = TaskSampler(config.environments, 0)
    one = two = Experience(config)
    one.learn(["a"])
    rows: dict[int, PoolEntry] = {}
    tasks, state, playing, version = {}, None, [], 0
    for step in range(60):
        operation, x = rng.randrange(8), rng.random()
        position = sampler.state()
        results = []
        for experience in (one,) if one is two else (one, two):
            sampler = TaskSampler(config.environments, 0, position)
            if operation <= 3:
                results.append(experience.next_group(sampler, progress=x, version=version))
            elif operation <= 6 and playing:
                planned = playing[int(x * len(playing))]
                draw = random.Random(x)
                rewards = [float(draw.random() < x) for _ in range(4)]
                if planned.restart is not None and operation == 6:
                    results.append(experience.unreproducible(planned.task))
                elif planned.restart is not None:
                    results.append(experience.restarted(planned.task, planned.restart, rewards))
                else:
                    fresh = [make.fresh(4 * step + i, r, version=version, n_turns=5) for i, r in enumerate(rewards)]
                    results.append(experience.finished(planned.task, fresh, planned=False, version=version))
            elif operation == 7:
                experience.age_to(version + 1)
        assert all(result == results[0] for result in results)
        version += operation == 7
        if operation <= 3:
            playing.append(results[0])
        elif operation <= 6 and playing:
            playing.pop(int(x * len(playing)))
        for experience in (two, one) if one is not two else (one,):
            changes = experience.take_changes()
        rows.update({entry.row_id: copy.copy(entry) for entry in changes.entries})
        for row_id in changes.removed:
            rows.pop(row_id, None)
        tasks.update({record.task.task_id: copy.copy(record) for record in changes.tasks})
        state = json.loads(json.dumps(changes.state)) if changes.state is not None else state
        if rng.random() < 0.15:
            two = Experience(
                config, entries=map(copy.copy, rows.values()), tasks=map(copy.copy, tasks.values()), state=state
            )
            two.learn(["a"])
            assert not two.take_changes()
        for record in one.tasks.values():
            search = record.restart
            assert search is None or 0 <= search.turn < search.n_turns


@pytest.mark.parametrize(
    ("more", "says"),
    [
        ({"replay": {"inject": "rescue"}}, "plans no replay groups"),
        ({"replay": {"unit": "turn"}}, "rollouts are restarted"),
        ({"replay": {"task_ratio": 1.0}}, "set it below 1"),
        ({"replay": {"restart": {"rate_min": 0.8}}}, "must be below rate_max"),
        ({"lessons": {"enabled": True}}, "lessons.enabled changes prompts"),
        ({"advantage": {"estimator": "cpo"}}, "hints changes prompts"),
    ],
)
def test_what_cannot_be_restarted_is_refused_with_the_reason(make, more, says):
    config = make.config().model_dump()
    config["replay"] |= {"mode": "restart", **more.get("replay", {})}
    config |= {key: value for key, value in more.items() if key != "replay"}
    with pytest.raises(ValidationError, match=says):
        type(make.config()).model_validate(config)


def test_a_search_is_a_row_of_json():
    search = observed(begun(3, 9), 4, 0.0, LOW, HIGH)
    assert (
        RestartSearch(**json.loads(json.dumps({n: getattr(search, n) for n in search.__dataclass_fields__}))) == search
    )
