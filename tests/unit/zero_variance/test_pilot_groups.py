"""``groups.pilot``: the first rollouts of a group decide about the others, and its weight makes up for that."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

from learner.advantages.estimators import Grpo, grpo
from learner.process.preflight import with_options
from pipeline.config import RunConfig
from pipeline.errors import ConfigurationError
from pipeline.stage.groups import PILOT_CONTINUED, inclusion_probability
from pipeline.store.records import GroupState

N, M = 4, 2
PILOT = {"n_rollout": N, "groups_per_step": 2, "pilot": M}


def orders_of(s: Any, group: str) -> int:
    return sum(order.group_id == group for order in s.holding.values())


def test_a_group_with_a_mixed_pilot_is_continued_and_weighs_one(stage) -> None:
    s = stage(groups=PILOT)
    group = s.play(0, 1)
    assert orders_of(s, group) == N - M
    assert s.play(1, 1) == group
    assert s.plans[group][1].weight == 1.0
    s.play(1, 0)
    s.play(0, 0)
    s.train()
    assert s.ledger().trajectories["trained"] == 2 * N


def test_a_group_with_an_equal_pilot_is_continued_by_chance_or_replaced_and_every_account_adds_up(stage) -> None:
    s = stage(groups=PILOT, replay={"enabled": True, "retire_after": None}, environments={"a": {"tasks": 9}})
    weights, given_up = [], 0
    for i in range(60):
        group = s.play(i % 2, i % 2)
        if orders_of(s, group):
            s.play(1, 0)
            weights.append(s.plans[group][1].weight)
        else:
            given_up += 1
            record = s.core.records[int(group[1:])]
            assert record.state is GroupState.CANCELLED and record.reason == "pilot"
        if len(s.members()) == 2:
            s.train()
    assert set(weights) == {1 / PILOT_CONTINUED}
    assert 15 <= len(weights) <= 45
    ledger = s.ledger()
    assert ledger.groups["cancelled.pilot"] == given_up and ledger.trajectories["dropped.pilot"] == M * given_up
    visits = sum(record.visits for record in s.core.replay.difficulty.records.values())
    assert visits == given_up + len(weights), "each pilot counts once for the difficulty of its task"
    assert not s.core.replay.groups, "what chance continued does not come back whole"


def test_a_stage_that_comes_back_at_any_moment_decides_the_same(stage) -> None:
    one, other = stage(groups=PILOT), stage(groups=PILOT)
    for i in range(120):
        for s in (one, other):
            first = min(s.holding)
            s.answer(first, float(i % 7 in (0, 3)))
            if s is other:
                s.restart()
            if len(s.members()) == 2:
                s.train()
        assert one.holding.keys() == other.holding.keys()
        assert {g: p.weight for g, (_, p) in one.plans.items()} == {g: p.weight for g, (_, p) in other.plans.items()}
    assert one.ledger().groups["cancelled.pilot"] and one.trained == other.trained


def test_a_pilot_that_a_new_run_file_drops_or_begins_changes_no_weight(stage) -> None:
    s = stage(groups=PILOT)
    first = min(s.holding)
    s.answer(first, 1.0)
    s.restart(groups={"n_rollout": N, "groups_per_step": 2})
    group = s.play(1, 1, 1)
    assert s.plans[group][1].weight == 1.0
    assert s.play(0, 1, 1, 1)
    s.train()
    first = min(s.holding)
    s.answer(first, 1.0)
    s.restart(groups=PILOT)
    group = s.play(1, 1, 1)
    assert s.plans[group][1].weight == 1.0


def test_replay_groups_are_ordered_whole(stage) -> None:
    replay = {"enabled": True, "mode": "mix", "task_ratio": 0.5, "retire_after": None}
    s = stage(groups=PILOT, replay=replay, environments={"a": {"tasks": 4}})
    for _ in range(40):
        group = min(order.group_id for order in s.holding.values())
        record = s.core.records[int(group[1:])]
        out = orders_of(s, group)
        assert out == (N - record.k if record.k else M)
        if record.k:
            assert record.weight == 1.0
            return
        s.play(0, 1)
        s.play(0, 1)
        if len(s.members()) == 2:
            s.train()
    raise AssertionError("expected a replay group")


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"groups": {"n_rollout": 2, "pilot": 2}}, "must be below groups.n_rollout"),
        ({"groups": PILOT, "advantage": {"estimator": "remax"}}, "greedy rollout"),
        ({"groups": PILOT, "scorer": {"functions": [{"path": "x.py:f", "per": "group"}]}}, "per: group"),
    ],
)
def test_what_a_pilot_cannot_decide_is_refused(sections, message) -> None:
    with pytest.raises(ValueError, match=message):
        RunConfig.model_validate(sections)


def test_an_estimator_that_learns_from_equal_rewards_is_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"groups\.pilot is 2.*set pilot: null"):
        with_options(RunConfig.model_validate({"groups": PILOT, "advantage": {"estimator": "gae"}}))


def outcomes(p: float) -> list[tuple[tuple[float, ...], float]]:
    """Rewards of a group of N rollouts that succeed with probability p, and the probability of each."""
    return [
        (rewards, float(np.prod([p if r else 1 - p for r in rewards])))
        for rewards in itertools.product((0.0, 1.0), repeat=N)
    ]


def gradient(rewards: tuple[float, ...], p: float, *, std: bool) -> float:
    """Of the surrogate at the policy that sampled, by the logit of p: mean of A_i d log π(r_i) / d logit."""
    r = np.array(rewards)
    return float(np.mean(grpo(r, Grpo(normalize_std=std)) * (r - p)))


@pytest.mark.parametrize("std", [False, True])
def test_the_expected_gradient_is_that_of_whole_groups_times_one_factor_for_all_tasks(std: bool) -> None:
    """Two tasks, drawn with equal probability; every outcome of pilot, chance and the rest is enumerated."""
    tasks = (0.1, 0.6)
    whole = np.array([sum(q * gradient(r, p, std=std) for r, q in outcomes(p)) / 2 for p in tasks])
    if not std:
        assert whole == pytest.approx([(1 - 1 / N) * p * (1 - p) / 2 for p in tasks])

    admitted, unweighted, continued = np.zeros(2), np.zeros(2), 0.0
    for i, p in enumerate(tasks):
        for pilot in itertools.product((0.0, 1.0), repeat=M):
            chance = inclusion_probability(pilot)
            for rest in itertools.product((0.0, 1.0), repeat=N - M):
                rewards = (*pilot, *rest)
                q = float(np.prod([p if r else 1 - p for r in rewards])) * chance / 2
                continued += q
                admitted[i] += q / chance * gradient(rewards, p, std=std)
                unweighted[i] += q * gradient(rewards, p, std=std)
    assert admitted == pytest.approx(whole), "groups that are given up count as 0"
    # groups of an update: given up ones are replaced until one is continued, a geometric number of times
    rounds = np.arange(200)
    of_update = admitted * np.sum((1 - continued) ** rounds)
    assert of_update == pytest.approx(whole / continued)
    assert unweighted[0] / whole[0] < unweighted[1] / whole[1] - 0.02, "without weights hard tasks count less"


PAGE = [
    (0.0, 4, 1.06), (0.5, 4, 0.95), (0.8, 4, 0.89), (0.95, 4, 0.86),
    (0.0, 2, 1.18), (0.5, 2, 1.06), (0.8, 2, 0.99), (0.95, 2, 0.95),
]  # fmt: skip


@pytest.mark.parametrize(("hopeless", "m", "expected"), PAGE)
def test_noise_times_rollouts_is_what_the_page_says(hopeless: float, m: int, expected: float) -> None:
    """Relative to groups ordered whole: second moment of the weighted gradient, times rollouts of an admitted group.
    Groups of 8 with a pilot of ``m``; a share of the tasks never succeeds, the others 30 % of the time."""
    n, p = 8, 0.3
    whole = weighted = rollouts = 0.0
    for rewards in itertools.product((0.0, 1.0), repeat=n):
        q = float(np.prod([p if r else 1 - p for r in rewards]))
        chance = inclusion_probability(rewards[:m])
        whole += q * gradient(rewards, p, std=False) ** 2
        weighted += q * gradient(rewards, p, std=False) ** 2 / chance
        rollouts += q * (m + chance * (n - m))
    never = m + inclusion_probability([0.0] * m) * (n - m)
    cost = (hopeless * never + (1 - hopeless) * rollouts) / n
    assert weighted / whole * cost == pytest.approx(expected, abs=0.006)


@pytest.mark.parametrize(("p", "kept"), [(0.02, 0.77), (0.3, 0.92)])
def test_without_the_weight_a_task_keeps_the_share_of_its_gradient_that_the_page_says(p: float, kept: float) -> None:
    n, m = 8, 4
    whole = unweighted = 0.0
    for rewards in itertools.product((0.0, 1.0), repeat=n):
        part = float(np.prod([p if r else 1 - p for r in rewards])) * gradient(rewards, p, std=False)
        whole += part
        unweighted += part * inclusion_probability(rewards[:m])
    assert unweighted / whole == pytest.approx(kept, abs=0.006)
