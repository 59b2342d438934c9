"""Losses by name and by import path, what they need, and what a run file may not ask for."""

from pathlib import Path

import numpy as np
import pytest
import torch
from pydantic import ValidationError

from learner.losses.base import ClipRange
from learner.losses.loss import policy_loss
from learner.losses.policy_losses import loss_rules, needed_scores, policy_loss_of
from pipeline.config.losses import ImportanceConfig, LossConfig
from pipeline.errors import ConfigurationError, TrainingError
from tests.unit.losses.cases import rules_of, tensors
from tests.unit.losses.slow import Token

PLUGINS = Path(__file__).with_name("plugins_for_losses.py")


def test_a_users_loss_comes_by_path_with_its_options():
    config = LossConfig(policy={"name": f"{PLUGINS}:reinforce", "scale": 2.0})
    rules = loss_rules(config, ImportanceConfig())
    t = tensors([Token(-1.0, -2.0, 0.0, 0.0, 0.5, row=0), Token(-1.5, -2.0, 0.0, 0.0, -1.0, row=0)])
    terms = policy_loss(t, rules)
    (grad,) = torch.autograd.grad(terms.loss, t.logprobs)
    np.testing.assert_allclose(grad.numpy(), [-0.125, 0.25])
    assert not terms.clipped_low.any()
    assert not rules.needs_signal


def test_a_users_loss_of_the_wrong_shape_is_refused_with_what_was_expected():
    rules = rules_of("ppo", policy=policy_loss_of(f"{PLUGINS}:too_short"))
    with pytest.raises(TrainingError, match="one loss for each of 2 tokens"):
        policy_loss(tensors([Token(-1.0, -2.0, 0.0, 0.0, 0.5)] * 2), rules)


def test_an_unknown_loss_is_answered_with_the_known_ones():
    with pytest.raises(ConfigurationError, match=r"ppo, gspo, .* got 'pppo'"):
        policy_loss_of("pppo")
    with pytest.raises(ConfigurationError, match="has no 'nothing'"):
        policy_loss_of(f"{PLUGINS}:nothing")


PUBLISHED = {
    "ppo": (0.2, 0.28),
    "gspo": (3e-4, 4e-4),
    "gspo_token": (3e-4, 4e-4),
    "gmpo": (0.4, 0.4),
    "cispo": (1.0, 4.0),
    "dppo_tv": (0.15, 0.15),
    "dppo_kl": (0.05, 0.05),
}


@pytest.mark.parametrize("name", sorted(PUBLISHED))
def test_published_clips_hold_until_the_run_file_says_otherwise(name):
    rules = loss_rules(LossConfig(policy=name), ImportanceConfig())
    assert rules.fresh == ClipRange(*PUBLISHED[name])
    assert rules.off.high >= rules.fresh.high
    policy = {"name": name, "clip_low": 0.11, "clip_high": 0.12}
    chosen = loss_rules(LossConfig(policy=policy, off_clip_high=3), ImportanceConfig())
    assert (chosen.fresh, chosen.off) == (ClipRange(0.11, 0.12), ClipRange(0.11, 3))


@pytest.mark.parametrize(
    ("loss", "needed"),
    [
        ({}, set()),
        ({"policy": "gspo"}, set()),
        ({"kl": "loss"}, {"reference"}),
        ({"kl": "reward"}, {"reference", "logprobs"}),
        ({"policy": f"{PLUGINS}:with_entropies"}, {"entropies"}),
    ],
)
def test_losses_say_what_has_to_be_gathered(loss, needed):
    assert needed_scores(LossConfig(**loss)) == needed


def test_a_loss_that_asks_for_what_nobody_gathers_is_refused():
    with pytest.raises(ConfigurationError, match="magic"):
        needed_scores(LossConfig(policy=f"{PLUGINS}:asks_for_magic"))


@pytest.mark.parametrize(
    ("section", "values", "message"),
    [
        (LossConfig, {"aggregation": "sequence_sum_norm"}, "aggregation_length"),
        (LossConfig, {"aggregation_length": 5}, "set both or neither"),
        (LossConfig, {"kl_estimator": "k3"}, "would do nothing"),
        (LossConfig, {"kl": "reward", "kl_estimator": "k3+"}, "but a reward has no gradient"),
        (ImportanceConfig, {"weight": "sequence"}, "correct twice"),
        (ImportanceConfig, {"masks": [{"level": "token"}]}, "rejects nothing"),
        (ImportanceConfig, {"masks": [{"level": "token", "low": 2, "high": 1}]}, "must be above"),
    ],
)
def test_impossible_combinations_are_explained(section, values, message):
    with pytest.raises(ValidationError, match=message):
        section(**values)


def test_the_kl_is_estimated_by_k3_in_the_loss_and_k1_in_the_reward_unless_said():
    def estimator(**loss):
        return loss_rules(LossConfig(**loss), ImportanceConfig()).kl_estimator

    assert estimator(kl="loss") == "k3"
    assert estimator(kl="reward") == "k1"
    assert estimator(kl="loss", kl_estimator="k2") == "k2"


def test_log_probs_before_the_step_are_read_where_a_mask_needs_them():
    masked = loss_rules(LossConfig(), ImportanceConfig(masks=({"level": "token", "high": 2},)))
    plain = loss_rules(LossConfig(), ImportanceConfig())
    assert masked.needs_proximal(replayed=False, recorded=True)
    assert not plain.needs_proximal(replayed=False, recorded=True)
