"""Estimators at the edges: equal rewards, groups of one, rewards by turn, missing and hostile facts, a user's own."""

from itertools import product

import numpy as np
import pytest

from learner.advantages.base import Estimates
from learner.advantages.estimate import COMPARING, estimate, needed_scores
from pipeline.config.advantages import AdvantageConfig
from pipeline.errors import ConfigurationError, TrainingError
from tests.unit.advantages.cases import advantages_of, config_of, make_scored, options_of


def test_equal_rewards_and_groups_of_one_have_advantage_exactly_zero():
    table = product(sorted(COMPARING), ([0.1], [0.1] * 3, [-7.3] * 5, [0.0] * 2), ("outcome", "turns", "both"))
    for name, rewards, mode in table:
        if name == "maxrl" or name == "pass_at_k":
            rewards = [abs(r) for r in rewards]
        scored = [make_scored(r, turn_rewards=(0.3, r - 0.3)) for r in rewards]
        for advantages in advantages_of(scored, **options_of(name), rewards=mode):
            assert not advantages.any(), (name, rewards, mode)


def test_reinforce_pp_learns_from_groups_of_one():
    advantages = advantages_of([make_scored(1.0, group=0), make_scored(0.0, group=1)], estimator="reinforce_pp")
    assert advantages[0][0] > 0 > advantages[1][0]


def test_turn_rewards_credit_the_turn_and_those_before_it():
    """The second member earns at its first turn; the tokens of its second turn did nothing for it."""
    scored = [
        make_scored(0.0, (0, 1), turn_rewards=(0.0, 0.0)),
        make_scored(1.0, (0, 1), turn_rewards=(1.0, 0.0)),
    ]
    options = {"estimator": "rloo", "rewards": "turns"}
    assert [a.tolist() for a in advantages_of(scored, **options)] == [[-1.0, 0.0], [1.0, 0.0]]


def test_a_member_that_ended_stands_at_later_turns_with_nothing_more_to_get():
    scored = [
        make_scored(3.0, (0, 1), turn_rewards=(1.0, 2.0)),
        make_scored(1.0, (0,), turn_rewards=(1.0,)),
        make_scored(1.0, (0, 1), turn_rewards=(0.0, 1.0)),
    ]
    advantages = advantages_of(scored, estimator="rloo", rewards="turns")
    assert [a.tolist() for a in advantages] == [[2.0, 1.5], [-1.0], [-1.0, 0.0]]


def test_a_trajectory_without_turn_rewards_has_its_outcome_at_the_last_token():
    imported = make_scored(1.0, (0, 0, 1))
    for mode in ("turns", "both"):
        config = {"estimator": "reinforce_pp", "rewards": mode, "gamma": 0.5, "whiten": False}
        assert advantages_of([imported], **config)[0].tolist() == [0.25, 0.5, 1.0]


def test_both_kinds_of_reward_sum_to_the_outcome():
    p = make_scored(5.0, (0, 0, 1, 2), turn_rewards=(1.0, -2.0, 0.5))
    (returns,) = advantages_of([p], estimator="reinforce_pp", rewards="both", whiten=False)
    assert returns.tolist() == [5.0, 5.0, 4.0, 6.0]


def test_rewards_of_turns_that_are_not_trained_reach_only_earlier_tokens():
    """Replay of turn 1 alone, of three."""
    p = make_scored(7.0, (1, 1), turn_rewards=(1.0, 2.0, 4.0))
    (returns,) = advantages_of([p], estimator="reinforce_pp", rewards="turns", whiten=False)
    assert returns.tolist() == [6.0, 6.0]


def test_cpo_gives_failed_groups_a_signal_and_leaves_others_to_grpo():
    facts = {"entropies": [1.0, 2.0], "logprobs": [-2.0, -1.0], "hinted": [-1.0, -3.0]}
    failed = [make_scored(0.0, (0, 0), group=0, **facts) for _ in range(2)]
    mixed = [make_scored(r, (0, 0), group=1, **facts) for r in (0.0, 1.0)]
    solved = [make_scored(1.0, (0, 0), group=2, **facts) for _ in range(2)]
    scored = failed + mixed + solved
    advantages = advantages_of(scored, estimator="cpo")
    np.testing.assert_allclose(advantages[0], [0.5 * np.exp(-1.0) * 1.0, 1.0 * np.exp(-3.0) * -2.0])
    plain = advantages_of(scored)
    for i in range(2, 6):
        assert np.array_equal(advantages[i], plain[i])
    turned = advantages_of(scored, estimator="cpo", solved_weight=1.0)
    np.testing.assert_allclose(turned[4], -advantages[0])


@pytest.mark.parametrize("reward", [0.0, 1.0])
@pytest.mark.parametrize("penalty", [-1e-6, 0.0, 1e-6])
def test_a_kl_penalty_of_either_sign_does_not_decide_whether_a_group_failed_or_was_solved(reward, penalty):
    facts = {"logprobs": [-2.0], "hinted": [-1.0], "entropies": [1.0], "penalties": [penalty]}
    scored = [make_scored(reward, (0,), **facts) for _ in range(2)]
    for advantages in advantages_of(scored, estimator="cpo", solved_weight=1.0):
        assert advantages.tolist() == [pytest.approx((1 - 2 * reward) * np.exp(-1.0))]


def test_cpo_needs_no_hint_for_groups_that_did_not_fail():
    scored = [make_scored(r) for r in (0.0, 1.0)]
    assert np.array_equal(advantages_of(scored, estimator="cpo")[0], advantages_of(scored)[0])


# Hostile input


def test_remax_without_a_greedy_rollout_says_what_is_missing():
    with pytest.raises(TrainingError, match="greedy rollout of group 0"):
        advantages_of([make_scored(1.0)], estimator="remax")


def test_maxrl_refuses_negative_returns():
    with pytest.raises(TrainingError, match=">= 0"):
        advantages_of([make_scored(-1.0), make_scored(1.0)], estimator="maxrl")


def test_pass_at_k_refuses_groups_smaller_than_k():
    with pytest.raises(TrainingError, match=r"at least advantage\.estimator\.k"):
        advantages_of([make_scored(0.0), make_scored(1.0)], estimator="pass_at_k", k=3)


@pytest.mark.parametrize("name,facts", [("gae", {"values": [0.0, np.nan, 0.0]}), ("gae", {}), ("cpo", {})])
def test_a_missing_or_broken_score_is_an_error_with_its_name(name, facts):
    missing = "values" if name == "gae" else "entropies"
    with pytest.raises(TrainingError, match=missing):
        advantages_of([make_scored(0.0, **facts)], estimator=name)


@pytest.mark.parametrize("hinted,logprobs", [([np.nan], [-1.0]), ([-1.0], [np.nan]), ([0.5], [-1.0])])
def test_cpo_refuses_what_is_no_log_probability(hinted, logprobs):
    p = make_scored(0.0, (0,), hinted=hinted, logprobs=logprobs, entropies=[1.0])
    with pytest.raises(TrainingError, match="log-probabilities <= 0"):
        advantages_of([p], estimator="cpo")


def test_cpo_is_finite_and_bounded_for_any_log_probabilities():
    for hinted, logprob in product((-np.inf, -1e30, -800.0, 0.0), repeat=2):
        p = make_scored(0.0, (0,), hinted=[hinted], logprobs=[logprob], entropies=[1.0])
        assert abs(advantages_of([p], estimator="cpo")[0][0]) <= 20.0, (hinted, logprob)


def test_huge_rewards_give_finite_advantages():
    scored = [make_scored(r, (0,), values=[0.0]) for r in (1e12, -1e12, 0.0)]
    for name in ("grpo", "rloo", "opo", "gpg", "reinforce_pp", "reinforce_pp_baseline", "gae"):
        assert np.isfinite(np.concatenate(advantages_of(scored, **options_of(name)))).all(), name


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_rewards_that_are_not_finite_are_refused_before_estimation(bad):
    with pytest.raises(TrainingError, match="finite reward"):
        make_scored(bad)
    with pytest.raises(TrainingError, match="finite rewards of all turns"):
        make_scored(1.0, turn_rewards=(bad,))


def test_turns_out_of_order_are_refused():
    with pytest.raises(TrainingError, match="turns in order"):
        make_scored(1.0, (1, 0))


def test_an_infinite_penalty_is_an_error_not_an_advantage():
    scored = [make_scored(1.0, (0,), penalties=[np.inf]), make_scored(0.0, (0,), penalties=[0.0])]
    for name in ("grpo", "reinforce_pp"):
        with pytest.raises(TrainingError, match="finite"):
            advantages_of(scored, estimator=name)


def test_one_token_and_very_long_trajectories_stand_side_by_side():
    scored = [make_scored(1.0, (0,)), make_scored(0.0, np.zeros(200_000))]
    for name in ("grpo", "opo", "reinforce_pp"):
        together = advantages_of(scored, estimator=name, gamma=0.999)
        assert [len(a) for a in together] == [1, 200_000]
        assert all(np.isfinite(a).all() for a in together)


def test_what_a_users_estimator_returns_is_checked(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(
        "from learner.advantages.estimate import Estimates\n"
        "import numpy as np\n"
        "def good(scored, config):\n    return Estimates(tuple(np.full(p.n_tokens, p.reward) for p in scored))\n"
        "good.needs = {'entropies'}\n"
        "def short(scored, config):\n    return Estimates(tuple(np.zeros(1) for p in scored))\n"
        "def few(scored, config):\n    return Estimates(())\n"
        "def odd(scored, config):\n    return None\n"
        "odd.needs = {'gold'}\n"
    )
    scored = [make_scored(2.0)]
    assert advantages_of(scored, estimator=f"{file}:good")[0].tolist() == [2.0] * 3
    assert needed_scores(config_of(estimator=f"{file}:good")) == {"entropies"}
    for name, what in (("short", "3 finite advantages"), ("few", "a tuple of 1 arrays")):
        with pytest.raises(TrainingError, match=what):
            advantages_of(scored, estimator=f"{file}:{name}")
    with pytest.raises(ConfigurationError, match="expected needs out of"):
        needed_scores(config_of(estimator=f"{file}:odd"))
    with pytest.raises(ConfigurationError, match="has no 'absent'"):
        needed_scores(config_of(estimator=f"{file}:absent"))
    assert isinstance(Estimates(()), Estimates)


def test_a_users_estimator_has_options_with_types_where_it_has_a_class_for_them(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(
        "from learner.advantages.estimate import Estimates\n"
        "from pipeline.config.base import Options\n"
        "import numpy as np\n"
        "class Scaled(Options):\n    scale: float = 2.0\n"
        "def plain(scored, config):\n"
        "    return Estimates(tuple(np.full(p.n_tokens, config.estimator.scale) for p in scored))\n"
        "def typed(scored, config):\n    return plain(scored, config)\n"
        "typed.options = Scaled\n"
    )

    def first(name, **options):
        return estimate([make_scored(1.0)], AdvantageConfig(estimator={"name": f"{file}:{name}", **options}))

    assert first("plain", scale=3.0).advantages[0].tolist() == [3.0] * 3
    assert first("typed").advantages[0].tolist() == [2.0] * 3
    with pytest.raises(ConfigurationError, match=r"unknown key advantage\.estimator\.scal; did you mean .*\.scale\?"):
        first("typed", scal=3.0)
    with pytest.raises(ConfigurationError, match=r"advantage\.estimator\.scale: expected a valid number"):
        first("typed", scale="much")


def test_an_unknown_name_is_refused_with_the_known_ones():
    with pytest.raises(ConfigurationError, match=r"expected one of grpo, .*, or your own as .*, got 'grop'"):
        estimate([make_scored(1.0)], AdvantageConfig(estimator="grop"))


def test_run_files_that_an_estimator_cannot_work_with_say_why():
    with pytest.raises(ValueError, match=r"expected \{prompt\} and \{hint\}"):
        AdvantageConfig(estimator="cpo", hint_template="{prompt}")
    with pytest.raises(ValueError, match="for cpo, self_distill and estimators of your own, got the estimator grpo"):
        AdvantageConfig(hint_template="{prompt} {hint}")


def test_cpo_gives_a_trajectory_without_a_hint_no_dense_signal():
    facts = {"entropies": [1.0], "logprobs": [-2.0]}
    scored = [make_scored(0.0, (0,), hinted=[-1.0], **facts), make_scored(0.0, (0,), **facts)]
    a, b = advantages_of(scored, estimator="cpo")
    assert a[0] > 0 and b[0] == 0
