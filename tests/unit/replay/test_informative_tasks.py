"""``groups.tasks: informative``: what is drawn, how often, and what never is."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace

import pytest
from pydantic import ValidationError

from pipeline.config import RunConfig
from pipeline.replay.difficulty import Difficulty
from pipeline.replay.informative import UNIFORM_SHARE, InformativeTasks
from pipeline.replay.replay import Replay
from pipeline.replay.report import ReplayReport
from pipeline.tasks.sampler import TaskSampler
from pipeline.tasks.splits import decode_splits, encode_splits


def make_plain(make, **values) -> RunConfig:
    """Without replay."""
    return make.config(choice="informative", enabled=False, **values)


class Stage:
    """Admits groups and finishes them: task i succeeds ``rates[i]`` of the time (0.5 where it has no rate)."""

    def __init__(self, make, config: RunConfig, rates=None, rows=(), sampler_state=None, state=None) -> None:
        self.make, self.rates, self.rng, self.row_id = make, rates or {}, random.Random(1), 0
        self.replay = Replay(config, tasks=[replace(row) for row in rows], state=state)
        self.sampler = TaskSampler(config.environments, config.run.seed, sampler_state)
        self.n = config.groups.n_rollout

    def draw(self, n: int) -> list:
        return [self.replay.next_group(self.sampler, progress=0.0, version=0).task for _ in range(n)]

    def finish(self, task) -> None:
        successes = sum(self.rng.random() < self.rates.get(task.seed, 0.5) for _ in range(self.n))
        self.make.play(self.replay, task, successes, self.n, self.row_id)
        self.row_id += self.n


def test_tasks_are_taken_as_by_a_success_rate_drawn_from_the_posterior_of_each(make):
    """The independent form: propose a task, draw p from its posterior, take it with probability p(1-p)."""
    config, rng = make_plain(make, tasks=6, difficulty_half_life=8.0, retire_after=None), random.Random(0)
    difficulty, sampler = Difficulty(config, {"a": 6}), TaskSampler(config.environments, 0)
    counts = [(4, 0), (2, 2), (0, 12), (5, 11)]
    for i, (successes, failures) in enumerate(counts):
        difficulty.finished(make.task(i), successes, successes + failures)
    informative = InformativeTasks(difficulty, sampler)
    drawn = Counter(d.task_id if (d := informative.draw("a", (), rng)) else "unseen" for _ in range(40_000))

    expected: Counter[str] = Counter()
    while expected.total() < 40_000:
        i = rng.randrange(6)
        record = difficulty.records.get(f"a/{i}")
        p = rng.betavariate(1 + record.successes, 1 + record.failures) if record else rng.random()
        if rng.random() < p * (1 - p):
            expected[f"a/{i}" if record else "unseen"] += 1
    assert drawn.keys() == expected.keys()
    for key, count in expected.items():
        assert drawn[key] == pytest.approx(count, abs=5 * (2 * count) ** 0.5), key


def test_tasks_that_teach_are_drawn_more_often_and_all_are_drawn_again(make):
    rates = {i: (0.0, 0.5, 1.0)[i % 3] for i in range(30)}
    stage = Stage(make, make_plain(make, tasks=30, n=8, batch=4), rates)
    drawn: Counter[int] = Counter()
    for i in range(1500):
        (task,) = stage.draw(1)
        if i >= 300:
            drawn[task.seed] += 1
        stage.finish(task)
    of_rate = Counter()
    for seed, count in drawn.items():
        of_rate[rates[seed]] += count
    assert len(drawn) == 30
    assert of_rate[0.5] > 2.5 * of_rate[0.0] and of_rate[0.5] > 2.5 * of_rate[1.0]
    assert all(count > 0.3 * UNIFORM_SHARE * 1200 / 30 for count in drawn.values())


def test_the_first_pass_meets_every_task_and_none_twice_in_a_batch(make):
    stage = Stage(make, make_plain(make, tasks=12, batch=5))
    for _ in range(40):
        batch = stage.draw(5)
        assert len({task.task_id for task in batch}) == 5
        for task in batch:
            stage.finish(task)
    assert len(stage.replay.difficulty.records) == 12


def test_environments_keep_their_shares_and_one_without_an_end_has_only_new_tasks(make):
    environments = {"a": {"tasks": 4, "weight": 2}, "b": {"weight": 1}}
    stage = Stage(make, make_plain(make, environments=environments, batch=3))
    tasks = []
    for _ in range(60):
        tasks += stage.draw(1)
        stage.finish(tasks[-1])
    assert Counter(task.environment for task in tasks) == {"a": 40, "b": 20}
    assert [task.seed for task in tasks if task.environment == "b"] == list(range(20))
    assert all(record.task.environment == "a" for record in stage.replay.difficulty.records.values())


def test_what_is_held_out_is_never_drawn_even_where_an_earlier_run_file_trained_it(make):
    config = make_plain(make, tasks=20, batch=2)
    one = Stage(make, config)
    for _ in range(30):
        for task in one.draw(2):
            one.finish(task)
    changes = one.replay.take_changes()
    splits = decode_splits({"a": encode_splits({"test": range(5, 12)})})
    smaller = make_plain(make, tasks=15, batch=2)
    two = Stage(make, smaller, rows=changes.tasks, sampler_state=one.sampler.state(), state=changes.state)
    two.sampler.learn(splits)
    assert two.sampler.trainable("a") == 8
    drawn = {task.seed for task in two.draw(200)}
    assert drawn == {*range(5), 12, 13, 14}


def test_the_train_split_of_an_environment_is_all_that_is_drawn(make):
    stage = Stage(make, make_plain(make, tasks=50, batch=2))
    stage.sampler.learn(decode_splits({"a": encode_splits({"train": [3, 5, 8, 13], "test": [0, 1]})}))
    assert stage.sampler.trainable("a") == 4
    for _ in range(30):
        for task in stage.draw(2):
            assert task.seed in (3, 5, 8, 13)
            stage.finish(task)


def test_a_run_that_was_uniform_before_still_looks_at_unseen_tasks(make):
    uniform = TaskSampler(make_plain(make, tasks=40).environments, 0)
    for _ in range(90):
        uniform.draw()
    stage = Stage(make, make_plain(make, tasks=40, batch=4), sampler_state=uniform.state())
    for _ in range(30):
        for task in stage.draw(4):
            stage.finish(task)
    assert len(stage.replay.difficulty.records) > 30


def test_without_replay_no_task_retires_and_one_that_had_is_drawn_again(make):
    with_replay = make.config(tasks=3, batch=1, choice="informative")
    one = Stage(make, with_replay, {0: 1.0, 1: 1.0, 2: 1.0})
    for _ in range(6):
        one.finish(one.draw(1)[0])
    changes = one.replay.take_changes()
    assert any(record.retired for record in changes.tasks)
    plain = make_plain(make, tasks=3, batch=1)
    assert ReplayReport(started=True).json(plain)["guard"]["share"] == 0
    two = Stage(make, plain, rows=changes.tasks, state=changes.state)
    assert not two.replay.difficulty.retired
    assert {task.seed for task in two.draw(60)} == {0, 1, 2}


def test_a_run_file_is_refused_where_no_task_comes_twice(make):
    with pytest.raises(ValidationError, match=r"set environments\.a\.tasks"):
        make.config(choice="informative")
    data = {"name": "question", "tasks_from": {"kind": "jsonl", "path": "x.jsonl", "epochs": 2}}
    with pytest.raises(ValidationError, match="omit epochs"):
        RunConfig.model_validate(
            {
                "environments": {"q": data},
                "groups": {"tasks": "informative"},
                "scorer": {"functions": [{"path": "exact"}]},
            }
        )
