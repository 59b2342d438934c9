"""Rewards before estimation, and the way from a batch to advantages on its rows."""

from dataclasses import replace

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given

from learner.advantages.base import overlong_count, overlong_loss, shaped, token_rewards
from learner.advantages.estimate import scored_of, with_advantages
from learner.data.rows import Group, StoredRollout, TokenScores, build_batch
from pipeline.config.advantages import AdvantageConfig
from pipeline.errors import ConfigurationError, PlugInError, SchemaError, TrainingError
from pipeline.schema import FinishReason, GroupPlan, Message, Task, TokenSpan, Trajectory, TrajectoryStatus, Turn
from pipeline.schema.codec import decode_trajectory, encode_trajectory
from tests.unit.advantages.cases import config_of, make_scored


def make_turn(sampled, reward=None, branch=0, context=2):
    return Turn(
        context=TokenSpan.context([1] * context),
        completion=TokenSpan.sampled([2] * sampled, [-1.0] * sampled, 0),
        context_messages=(Message("user", "u"),),
        completion_message=Message("assistant", "a"),
        finish_reason=FinishReason.STOP,
        temperature=1.0,
        branch=branch,
        reward=reward,
    )


def make_trajectory(name, reward, turns, recorded=True):
    return Trajectory(
        trajectory_id=name,
        group_id="g",
        task=Task("t", "toy", 0),
        turns=tuple(turns),
        status=TrajectoryStatus.COMPLETE,
        reward=reward,
        rewards={"environment": reward},
        recorded=recorded,
    )


def batch_of(trajectories, replays=()):
    fresh = [t for t in trajectories if t.trajectory_id not in dict(replays)]
    stored = [t for t in trajectories if t.trajectory_id in dict(replays)]
    names = tuple(t.trajectory_id for t in stored)
    plan = GroupPlan("g", Task("t", "toy", 0), len(trajectories), len(fresh), names)
    return build_batch(0, [Group(plan, (*fresh, *stored), dict(replays))])


def by_trajectory(batch):
    out = {}
    for row in batch.rows:
        out.setdefault(row.trajectory_id, []).extend(row.advantages.tolist())
    return out


# Overlong penalty


@given(st.integers(1, 300), st.integers(1, 200), st.integers(0, 100), st.floats(0, 2))
def test_overlong_penalty_is_the_published_one(n, longest, buffer, penalty):
    """arXiv:2503.14476, eq. 13, times the penalty."""
    if buffer > longest:
        with pytest.raises(ValueError, match="overlong_buffer"):
            AdvantageConfig(overlong_tokens=longest, overlong_buffer=buffer)
        return
    config = AdvantageConfig(overlong_tokens=longest, overlong_buffer=buffer, overlong_penalty=penalty)
    if n <= longest - buffer:
        published = 0.0
    elif n <= longest:
        published = ((longest - buffer) - n) / buffer
    else:
        published = -1.0
    assert overlong_loss(n, config) == pytest.approx(-published * penalty)


def test_overlong_penalty_counts_all_sampled_tokens_and_is_off_by_default():
    config = AdvantageConfig(overlong_tokens=4, overlong_buffer=2)
    short, long = make_scored(1.0, (0, 0)), make_scored(1.0, (0, 0, 0))
    trajectories = [make_trajectory("short", 1.0, [make_turn(2)]), make_trajectory("long", 1.0, [make_turn(3)])]
    assert [p.reward for p in shaped([short, long], trajectories, config)] == [1.0, 0.5]
    assert overlong_count([2, 3, 9], config) == 2
    assert [p.reward for p in shaped([short, long], [], AdvantageConfig())] == [1.0, 1.0]


def test_overlong_penalty_counts_a_summary_that_is_not_trained():
    """The penalty falls on the trajectories that the metric counts."""
    config = AdvantageConfig(overlong_tokens=4, overlong_buffer=2)
    batch = batch_of([make_trajectory("t", 1.0, [replace(make_turn(2), trained=False), make_turn(2, branch=1)])])
    (after,) = shaped(scored_of(batch, TokenScores()), batch.trajectories, config)
    assert (after.n_tokens, after.reward) == (2, 0.0)


@pytest.mark.parametrize("rewards", ["outcome", "turns", "both"])
def test_overlong_penalty_lowers_the_sum_of_token_rewards_whatever_they_are(rewards):
    config = AdvantageConfig(overlong_tokens=4, overlong_buffer=2, rewards=rewards)
    trajectory = make_trajectory("t", 1.0, [make_turn(2, reward=0.25), make_turn(1, reward=0.75)])
    (before,) = scored_of(batch_of([trajectory]), TokenScores())
    (after,) = shaped([before], [trajectory], config)
    assert (token_rewards(before, config) - token_rewards(after, config)).tolist() == [0.0, 0.0, 0.5]


# Normalisation


def test_rewards_are_normalised_by_group_or_by_update():
    scored = [make_scored(r, group=g) for g, r in [(0, 1.0), (0, 3.0), (1, 10.0), (1, 10.0)]]
    group = [p.reward for p in shaped(scored, [], AdvantageConfig(reward_norm="group"))]
    np.testing.assert_allclose(group, [-1, 1, 0, 0], atol=1e-5)
    batch = [p.reward for p in shaped(scored, [], AdvantageConfig(reward_norm="batch"))]
    np.testing.assert_allclose(batch, (np.array([1, 3, 10, 10]) - 6) / np.std([1, 3, 10, 10]), atol=1e-5)


@pytest.mark.parametrize("mode", ["turns", "both"])
def test_turn_rewards_are_divided_and_not_shifted(mode):
    scored = [make_scored(r, turn_rewards=(1.0, r - 1.0)) for r in (2.0, 6.0)]
    out = shaped(scored, [], AdvantageConfig(reward_norm="group", rewards=mode))
    np.testing.assert_allclose([p.turn_rewards for p in out], [(0.5, 0.5), (0.5, 2.5)], rtol=1e-5)
    np.testing.assert_allclose([p.reward for p in out], [1.0, 3.0], rtol=1e-5)


# The user's own shaping

SHAPING = """
from dataclasses import replace

def by_length(scored, trajectories):
    return [replace(p, reward=p.reward / t.n_sampled) for p, t in zip(scored, trajectories, strict=True)]

def loses_one(scored, trajectories):
    return scored[1:]

def moves_groups(scored, trajectories):
    return [replace(p, group=0) for p in scored]

def broken(scored, trajectories):
    raise KeyError("gold")

def not_finite(scored, trajectories):
    return [replace(p, reward=float("nan")) for p in scored]
"""


@pytest.fixture
def shaping(tmp_path):
    file = tmp_path / "shaping.py"
    file.write_text(SHAPING)
    return lambda name, **options: AdvantageConfig(shaping=f"{file}:{name}", **options)


def test_users_shaping_changes_rewards_before_estimation_and_not_those_of_the_trajectories(shaping):
    batch = batch_of([make_trajectory("a", 1.0, [make_turn(2)]), make_trajectory("b", 1.0, [make_turn(4)])])
    out, _ = with_advantages(batch, TokenScores(), shaping("by_length", estimator="rloo"))
    assert by_trajectory(out) == {"a": [0.25] * 2, "b": [-0.25] * 4}
    assert [t.reward for t in out.trajectories] == [1.0, 1.0]


@pytest.mark.parametrize(
    "name,what",
    [
        ("loses_one", "expected 2 ScoredTrajectory"),
        ("moves_groups", "to change only rewards, but it changed"),
        ("broken", "KeyError: 'gold'"),
        ("not_finite", "finite reward"),
    ],
)
def test_what_a_users_shaping_does_is_checked(shaping, name, what):
    with pytest.raises((TrainingError, PlugInError), match=what):
        shaped([make_scored(1.0, group=1), make_scored(0.0, group=1)], [None, None], shaping(name))


def test_shaping_that_is_not_there_is_a_configuration_error(shaping):
    with pytest.raises(ConfigurationError, match="reward shaping"):
        shaped([make_scored(1.0)], [None], shaping("absent"))


# From a batch


def test_turn_rewards_reach_the_tokens_of_all_branches_by_turn():
    """Turn 1 is in a second branch, whose prompt holds what turn 0 sampled as context."""
    turns = [make_turn(2, 1.0), make_turn(1, -1.0, branch=1), make_turn(3, 4.0, branch=1)]
    batch = batch_of([make_trajectory("a", 4.0, turns)])
    assert len(batch.rows) == 2
    config = config_of(estimator="reinforce_pp", rewards="turns", whiten=False, gamma=0.5)
    (out,) = by_trajectory(with_advantages(batch, TokenScores(), config)[0]).values()
    assert out == [0.5**5 * 4 - 0.5**2 + 0.5, 0.5**4 * 4 - 0.5 + 1, 0.5**3 * 4 - 1, 1.0, 2.0, 4.0]


def test_gae_takes_values_by_token_number_and_gives_returns_by_it():
    batch = batch_of([make_trajectory("a", 1.0, [make_turn(2), make_turn(1, branch=1)]),
                      make_trajectory("b", 0.0, [make_turn(2)])])  # fmt: skip
    values = np.array([0.5, 0.25, 0.75, 0.1, 0.2], dtype=np.float32)
    config = config_of(estimator="gae", whiten=False)
    out, scores = with_advantages(batch, TokenScores(values=values), config)
    np.testing.assert_allclose(np.concatenate([r.advantages for r in out.rows]), [1, 1, 1, 0, 0] - values, atol=1e-6)
    np.testing.assert_allclose(scores.returns, [1, 1, 1, 0, 0], atol=1e-6)


def test_penalties_are_taken_off_by_token_number():
    batch = batch_of([make_trajectory("a", 1.0, [make_turn(2)]), make_trajectory("b", 1.0, [make_turn(1)])])
    config = config_of(estimator="rloo")
    out, _ = with_advantages(batch, TokenScores(), config, np.array([0.25, 0.25, 0.0], dtype=np.float32))
    assert by_trajectory(out) == {"a": [-0.5, -0.5], "b": [0.5]}


def test_replayed_and_imported_trajectories_share_the_group_with_fresh_ones():
    fresh = make_trajectory("a", 0.0, [make_turn(2, 0.0)])
    stored = make_trajectory("b", 1.0, [make_turn(1, 0.0), make_turn(1, 1.0)])
    imported = make_trajectory("c", 1.0, [make_turn(3)], recorded=False)
    batch = batch_of([fresh, stored, imported], {"b": StoredRollout(), "c": StoredRollout()})
    scored = scored_of(batch, TokenScores())
    assert [p.replayed for p in scored] == [False, True, True]
    assert [p.behaviour is None for p in scored] == [False, False, True]
    assert [p.turn_rewards for p in scored] == [(0.0,), (0.0, 1.0), ()]
    out = by_trajectory(with_advantages(batch, TokenScores(), config_of(estimator="rloo", rewards="turns"))[0])
    assert out == {"a": [-1.0] * 2, "b": [0.5, 1.0], "c": [0.5] * 3}


def test_turn_rewards_have_the_weight_that_the_scorer_gives_the_environment():
    batch = batch_of([make_trajectory("a", 1.0, [make_turn(1, 0.5), make_turn(1, 3.0)])])
    assert [p.turn_rewards for p in scored_of(batch, TokenScores(), turn_weight=0.5)] == [(0.25, 1.5)]


def test_remax_takes_the_baseline_of_the_plan():
    batch = batch_of([make_trajectory("a", 1.0, [make_turn(2)])])
    (group,) = batch.groups
    batch = replace(batch, groups=(replace(group, plan=replace(group.plan, baseline=0.25)),))
    out, _ = with_advantages(batch, TokenScores(), config_of(estimator="remax"))
    assert by_trajectory(out) == {"a": [0.75, 0.75]}


def test_the_baseline_is_normalised_with_the_rewards_it_is_compared_with():
    scored = [make_scored(r, baseline=3.0) for r in (1.0, 3.0)]
    out = shaped(scored, [], AdvantageConfig(reward_norm="group"))
    np.testing.assert_allclose([p.baseline for p in out], [1.0, 1.0], rtol=1e-5)


# Turn rewards on the wire


def test_turn_rewards_survive_the_wire_and_payloads_without_them_read_as_none():
    t = make_trajectory("a", 3.0, [make_turn(1, 1.0), make_turn(2, 2.0)])
    back = decode_trajectory([bytes(f) for f in encode_trajectory(t)])
    assert back.turn_rewards == (1.0, 2.0)
    old = replace(t, turns=tuple(replace(turn, reward=None) for turn in t.turns))
    frames = [bytes(f) for f in encode_trajectory(old)]
    assert b'"reward":' not in frames[0].split(b'"turns"')[1]
    assert decode_trajectory(frames).turn_rewards is None
    assert replace(t, turns=(t.turns[0], old.turns[1])).turn_rewards is None


@pytest.mark.parametrize("reward", [float("nan"), float("inf"), "1"])
def test_a_turn_reward_that_is_no_finite_number_is_refused(reward):
    with pytest.raises(SchemaError, match="reward of a turn"):
        make_turn(1, reward)
