"""Advantages, statistics, schedule, batching: the pure parts."""

import itertools

import hypothesis.extra.numpy as hnp
import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings

from learner.advantages.base import ScoredTrajectory
from learner.advantages.estimate import estimate, with_advantages
from learner.data.microbatch import collate, plan_microbatches, token_offsets, token_weights
from learner.data.rows import TokenScores, build_batch, trajectory_rows
from learner.observability.statistics import Mean, TokenValues, Weights, batch_statistics, source_statistics
from learner.training.optimizer import learning_rate
from pipeline.config.advantages import AdvantageConfig
from pipeline.config.learner import LearnerConfig
from pipeline.errors import TrainingError

weights = hnp.arrays(np.float64, st.integers(1, 30), elements=st.floats(1e-3, 1e3))


@given(weights)
def test_ess_is_one_over_one_plus_squared_variation(w):
    ess = Weights.of(w).ess_ratio
    assert ess == pytest.approx(1 / (1 + (w.std() / w.mean()) ** 2), rel=1e-9)
    assert 1 / len(w) - 1e-12 <= ess <= 1


@given(st.integers(1, 50), st.floats(1e-3, 1e3))
def test_ess_of_equal_weights_is_one(n, value):
    assert Weights.of(np.full(n, value)).ess_ratio == pytest.approx(1)


@given(weights, weights)
def test_statistics_of_parts_add_up_to_those_of_the_whole(a, b):
    whole, parts = Weights.of(np.concatenate([a, b])), Weights.of(a) + Weights.of(b)
    assert (whole.count, whole.smallest, whole.largest) == (parts.count, parts.smallest, parts.largest)
    assert parts.ess_ratio == pytest.approx(whole.ess_ratio)
    assert (Mean.of(a) + Mean.of(b)).value == pytest.approx(np.concatenate([a, b]).mean())


def test_nothing_counted_has_no_mean():
    assert Mean().value is None
    assert Weights().mean is None
    assert Weights().ess_ratio is None


@given(weights, st.floats(1e-3, 1e3))
def test_carried_ess_is_kishs_unless_the_mean_weight_is_below_one(w, factor):
    scaled = Weights.of(np.asarray(w) * factor)
    mean = float(np.mean(w)) * factor
    assert scaled.ess_ratio == pytest.approx(Weights.of(w).ess_ratio)
    assert scaled.carried_ratio == pytest.approx(scaled.ess_ratio * min(1.0, mean))


def test_weights_that_carry_nothing_have_a_carried_ess_near_zero():
    tiny = Weights.of(np.full(50, 0.01))
    assert tiny.ess_ratio == pytest.approx(1) and tiny.carried_ratio == pytest.approx(0.01)
    assert Weights.of(np.zeros(3)).carried_ratio == 0
    assert Weights().carried_ratio is None


def values(n=6, seed=0, replayed=None):
    rng = np.random.default_rng(seed)
    return TokenValues(
        logprobs=-rng.uniform(0.1, 3, n),
        behaviour=-rng.uniform(0.1, 3, n),
        entropy=rng.uniform(0, 2, n),
        losses=rng.normal(size=n),
        trained=np.ones(n, bool),
        clipped_low=np.zeros(n, bool),
        clipped_high=np.arange(n) == 1,
        versions=np.arange(n).astype(np.int32),
        trajectory_indices=(np.arange(n) // 2).astype(np.int32),
        replayed=np.zeros(n, bool) if replayed is None else replayed,
        recorded=np.ones(n, bool),
        discarded=np.zeros(n, bool),
        off_policy=np.zeros(n, bool) if replayed is None else replayed,
        masked=np.zeros(n, bool),
        reasons=np.zeros(n, np.int8),
        truncated=np.zeros(n, bool),
        reference_kl=np.full(n, np.nan),
        moved=np.zeros(n, bool),
        advantages=np.zeros(n),
        numbers=np.arange(n),
    )


def test_kl_estimators_agree_with_their_formulas_and_k3_is_never_negative():
    v = values(50)
    s = source_statistics(v)
    d = v.logprobs - v.behaviour
    assert s.kl_k1.value == pytest.approx(-d.mean())
    assert s.kl_k3.value == pytest.approx((np.exp(d) - 1 - d).mean())
    assert s.kl_k3.value >= 0


def test_sequence_ratio_is_the_product_over_the_trajectory():
    v = values(4)
    d = v.logprobs - v.behaviour
    came = source_statistics(v).sequence_ratios
    np.testing.assert_allclose(np.sort(came), np.sort(np.exp([d[:2].sum(), d[2:].sum()])))


def test_staleness_is_counted_from_the_oldest_version_of_each_trajectory():
    s = batch_statistics(values(6), policy_version=5)
    assert sorted(s.staleness) == [1, 3, 5]
    assert len(s.logprob_differences) == 1


def test_sources_are_counted_over_their_own_tokens_and_rejected_tokens_over_none():
    v = values(6, replayed=np.arange(6) >= 4)
    v.trained[0] = False
    s = batch_statistics(v, 5)
    assert (s.by_source["fresh"].tokens, s.by_source["replay"].tokens, s.all.tokens) == (3, 2, 5)
    assert (s.all.rejected, s.replay_share) == (1, 0.4)
    assert s.by_source["fresh"].clipped_high.value == pytest.approx(1 / 3)


def test_a_batch_of_only_rejected_tokens_has_no_statistics():
    v = values(2)
    v.trained[:] = False
    assert batch_statistics(v, 5).all.ratio.mean is None


def group_advantages(rewards, config):
    """One advantage for each reward of one group."""
    scored = [ScoredTrajectory(0, float(r), np.zeros(1, np.int32)) for r in rewards]
    return np.concatenate(estimate(scored, config).advantages)


@pytest.mark.parametrize("normalize", [True, False])
def test_group_of_one_and_equal_rewards_have_advantage_exactly_zero(normalize):
    config = AdvantageConfig(estimator={"name": "grpo", "normalize_std": normalize})
    for rewards in ([0.7], [0.1, 0.1, 0.1], [1.0] * 8):
        assert not group_advantages(rewards, config).any()


@given(hnp.arrays(np.float64, st.integers(2, 12), elements=st.floats(-5, 5)))
def test_advantages_are_centred_ordered_and_of_unit_spread(rewards):
    a = group_advantages(rewards, AdvantageConfig())
    assert a.sum() == pytest.approx(0, abs=1e-6)
    if rewards.std() > 1e-2:
        assert a.std() == pytest.approx(1, abs=1e-3)
        assert a[rewards.argmax()] == a.max()


@pytest.mark.parametrize("rewards", [[], [float("nan")], [1.0, float("inf")]])
def test_rewards_that_are_not_finite_are_refused(rewards):
    with pytest.raises(TrainingError, match=r"finite|at least one trajectory"):
        group_advantages(rewards, AdvantageConfig())


def test_cosine_falls_from_the_full_rate_towards_zero():
    config = LearnerConfig(learning_rate=2.0, schedule="cosine")
    rates = [learning_rate(u, config, 10) for u in range(11)]
    assert rates[0] == 2.0
    assert rates[5] == pytest.approx(1.0)
    assert rates[10] == pytest.approx(0.0)
    assert all(a > b for a, b in itertools.pairwise(rates))


@settings(max_examples=100)
@given(st.lists(st.integers(1, 50), min_size=1, max_size=40), st.integers(1, 120))
def test_microbatches_hold_every_row_once_within_the_budget(lengths, budget):
    plan = plan_microbatches(lengths, budget)
    assert sorted(i for part in plan for i in part) == list(range(len(lengths)))
    for part in plan:
        assert len(part) == 1 or len(part) * max(lengths[i] for i in part) <= budget
    assert plan == plan_microbatches(lengths, budget)


@pytest.mark.parametrize("aggregation", ["token_mean", "sequence_mean"])
def test_token_weights_of_an_optimizer_step_sum_to_one(aggregation, kit):
    rows = kit.make_rows(7)
    w = token_weights(rows, aggregation)
    assert sum(x * row.n_sampled for x, row in zip(w, rows, strict=True)) == pytest.approx(1)


def test_branches_of_a_trajectory_are_one_sequence(kit):
    rng = np.random.default_rng(0)
    forked = kit.make_trajectory("a", turns=[kit.make_turn(rng, 3, 2), kit.make_turn(rng, 6, 4, branch=1)])
    plain = kit.make_trajectory("b", turns=[kit.make_turn(rng, 3, 3)])
    rows = trajectory_rows(forked, 0) + trajectory_rows(plain, 1)
    assert [len(row) for row in rows] == [5, 10, 6]
    np.testing.assert_allclose(token_weights(rows, "sequence_mean"), [1 / 12, 1 / 12, 1 / 6])


def test_rows_follow_the_schema_and_carry_the_temperature_of_their_turn(kit):
    rng = np.random.default_rng(0)
    turns = [kit.make_turn(rng, 3, 2, version=4, temperature=0.5), kit.make_turn(rng, 2, 3, version=5, temperature=1.5)]
    (row,) = trajectory_rows(kit.make_trajectory("a", turns=turns), 0)
    assert row.loss_mask.tolist() == [False] * 3 + [True] * 2 + [False] * 2 + [True] * 3
    assert row.policy_versions.tolist() == [-1, -1, -1, 4, 4, -1, -1, 5, 5, 5]
    assert row.temperatures.tolist() == [0.5] * 5 + [1.5] * 5
    assert row.advantages.shape == (row.n_sampled,) and not row.advantages.any()


def test_context_after_the_last_sampled_token_is_not_computed(kit):
    rng = np.random.default_rng(0)
    turns = [kit.make_turn(rng, 3, 2), kit.make_turn(rng, 9, 0)]
    (row,) = trajectory_rows(kit.make_trajectory("a", turns=turns), 0)
    assert len(row) == 5


@pytest.mark.parametrize("name", ["loss_mask", "behaviour_logprobs", "policy_versions", "temperatures"])
def test_lengths_that_disagree_are_an_error(name, kit):
    from dataclasses import replace

    (row,) = kit.make_rows(1)
    with pytest.raises(TrainingError, match=name):
        replace(row, **{name: getattr(row, name)[:-1]})


def test_greedy_tokens_are_refused(kit):
    rng = np.random.default_rng(0)
    with pytest.raises(TrainingError, match="temperature"):
        trajectory_rows(kit.make_trajectory("a", turns=[kit.make_turn(rng, 2, 2, temperature=0.0)]), 0)


def test_predictors_point_at_the_position_before_each_sampled_token(kit):
    rows = kit.make_rows(3)
    part = collate(rows, [1.0] * 3, token_offsets(rows).tolist())
    flat = part.token_ids_BT.reshape(-1)
    np.testing.assert_array_equal(flat[part.predictors_S + 1], part.targets_S)
    expected = np.concatenate([row.token_ids[row.loss_mask] for row in rows])
    np.testing.assert_array_equal(part.targets_S, expected)
    assert part.token_index_S.tolist() == list(range(len(expected)))


def test_replayed_trajectories_share_the_advantage_group_and_keep_their_mask(kit):
    batch = build_batch(0, [kit.make_group("g", [1.0, 0.0, 0.0, 1.0], replay=[3])])
    batch, _ = with_advantages(batch, TokenScores(), AdvantageConfig())
    assert [row.replayed for row in batch.rows] == [False, False, False, True]
    assert batch.rows[3].advantages[0] == batch.rows[0].advantages[0] > 0
    assert batch.rows[3].loss_mask.any()
