"""Schedule and summary of ``afterplay env eval``, against slow reference computations."""

import itertools
import random

import pytest

from actors.env_commands.eval_summary import Outcome, interval, sentences, summarise, wanted


def outcomes(*tasks, failure=None):
    """One outcome for each reward of each task; None fails."""
    return [
        Outcome(
            f"task/{i}",
            sample,
            reward,
            turns=2,
            tokens=10,
            failure=("engine: EngineUnavailable" if reward is None else None),
        )
        for i, rewards in enumerate(tasks)
        for sample, reward in enumerate(rewards)
    ]


def enumerated(rewards, k, threshold):
    """The share of the subsets of ``k`` rollouts that hold a success."""
    subsets = list(itertools.combinations(rewards, k))
    return sum(any(r >= threshold for r in subset) for subset in subsets) / len(subsets)


@pytest.mark.parametrize("seed", range(20))
def test_pass_at_k_is_the_mean_over_tasks_of_the_share_of_subsets_with_a_success(seed):
    draw = random.Random(seed)
    tasks = [[draw.choice([0.0, 0.4, 1.0]) for _ in range(draw.randint(1, 7))] for _ in range(draw.randint(1, 6))]
    found = summarise(outcomes(*tasks), len(tasks), 7, (1, 2, 4, 7), 1.0)
    for k in (1, 2, 4, 7):
        shares = [enumerated(rewards, k, 1.0) for rewards in tasks if len(rewards) >= k]
        got = found.pass_at[k]
        assert got.tasks == len(shares)
        if shares:
            assert got.value == pytest.approx(sum(shares) / len(shares))
            assert 0.0 <= got.low <= got.value <= got.high <= 1.0
        else:
            assert got.value is got.low is got.high is None


def test_tasks_are_always_solved_never_solved_or_in_between():
    found = summarise(outcomes([1, 1], [0, 0], [1, 0], [0.5, 0.2]), 4, 2, (1,), 1.0)
    assert (found.always, found.never, found.between) == (1, 2, 1)
    assert found.informative == 2  # the last one is never solved, and its rewards differ
    assert found.score == pytest.approx((1 + 0 + 0.5 + 0.35) / 4)


def test_a_failure_is_no_reward_and_is_counted_with_its_reason():
    found = summarise(outcomes([1, None], [None, None]), 2, 2, (1, 2), 1.0)
    assert found.failures == {"engine: EngineUnavailable": 3}
    assert (found.scored, found.score, found.scored_tasks) == (1, 1.0, 1)
    assert found.pass_at[1].value == 1.0 and found.pass_at[2].value is None
    assert found.left == 0


def test_a_task_with_one_scored_rollout_says_nothing_about_advantages():
    found = summarise(outcomes([1, None], [1, 0]), 2, 2, (1,), 1.0)
    assert (found.compared, found.informative, found.always, found.between) == (1, 1, 0, 1)


def test_rollouts_that_are_left_are_counted():
    assert summarise(outcomes([1, 0]), 3, 2, (1,), 1.0).left == 4
    nothing = summarise([], 3, 2, (1,), 1.0)
    assert (nothing.left, nothing.score, nothing.informative) == (6, None, 0)
    assert sentences(nothing)


def test_every_rollout_is_wanted_once_task_by_task():
    done = {("a", 0), ("b", 1)}
    assert list(wanted(["a", "b"], 3, done)) == [(0, 1), (0, 2), (1, 0), (1, 2)]
    assert list(wanted(["a", "b"], 3, set(itertools.product("ab", range(3))))) == []


@pytest.mark.parametrize("p", [0.1, 0.5, 0.95])
def test_the_interval_holds_the_mean_of_all_tasks_nineteen_times_in_twenty(p):
    draw = random.Random(1)
    held = 0
    for _ in range(400):
        # the rate of a task is p in the mean: tasks differ, as they do
        values = [draw.betavariate(2 * p, 2 * (1 - p)) for _ in range(60)]
        low, high = interval(values, 60 * 8)
        held += low <= p <= high
    assert held >= 0.92 * 400


def test_the_interval_has_a_width_where_all_tasks_agree():
    low, high = interval([0.0] * 20, 80)
    assert low == 0.0 and 0.1 < high < 0.2
    low, high = interval([1.0] * 20, 80)
    assert high == 1.0 and 0.8 < low < 0.9


@pytest.mark.parametrize(
    ("tasks", "words"),
    [
        ([[1, 1]] * 9 + [[0, 0]], "No task gives an advantage"),
        ([[1, 0]] * 9 + [[0, 0]], "is worth training on"),
        ([[1, 0]] + [[0, 0]] * 19, "easier tasks"),
        ([[1, 0]] + [[1, 1]] * 19, "harder tasks"),
        ([[None, None]], "Nothing was scored"),
        ([[1.0], [0.0]], "--samples"),
    ],
)
def test_the_report_ends_with_what_it_means_for_training(tasks, words):
    samples = len(tasks[0])
    text = sentences(summarise(outcomes(*tasks), len(tasks), samples, (1,), 1.0))
    assert words in text[-1]
