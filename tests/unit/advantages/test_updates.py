"""Estimators through the trainer, on a tiny model: turn rewards, KL in the reward, ReMax, any split of the batch."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from learner.advantages.estimate import with_advantages
from learner.data.rows import Group, TokenScores, build_batch
from learner.policy.policy import Policy
from learner.training.trainer import Trainer
from pipeline.config import RunConfig
from pipeline.schema import FinishReason, GroupPlan, Message, Task, TokenSpan, Trajectory, TrajectoryStatus, Turn
from tests.unit.advantages.cases import config_of
from tests.unit.learner.conftest import gradients_of

VOCABULARY = 23


def make_trajectory(name, group, reward, rng, turn_rewards):
    def turn(value):
        n = int(rng.integers(1, 5))
        return Turn(
            TokenSpan.context(rng.integers(0, VOCABULARY, 3)),
            TokenSpan.sampled(rng.integers(0, VOCABULARY, n), -rng.uniform(0.5, 4.0, n), 0),
            (Message("user", "u"),),
            Message("assistant", "a"),
            FinishReason.STOP,
            1.0,
            reward=value,
        )

    return Trajectory(
        name, group, Task("t", "toy", 0), tuple(turn(v) for v in turn_rewards), TrajectoryStatus.COMPLETE,
        reward=reward, rewards={"environment": reward},
    )  # fmt: skip


def groups_of(seed=0):
    rng = np.random.default_rng(seed)
    out = []
    for g in range(2):
        members = []
        for i in range(4):
            turn_rewards = rng.integers(0, 3, int(rng.integers(1, 4))).astype(float).tolist()
            members.append(make_trajectory(f"{g}.{i}", f"g{g}", sum(turn_rewards), rng, turn_rewards))
        out.append(Group(GroupPlan(f"g{g}", Task("t", "toy", 0), 4, 4, baseline=0.5 + g), tuple(members)))
    return out


def make_trainer(learner=None, **sections):
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCABULARY, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
            num_key_value_heads=1, max_position_embeddings=64, initializer_range=0.4,
        )
    )  # fmt: skip
    config = RunConfig.model_validate(
        {
            "groups": {"n_rollout": 4, "groups_per_step": 2},
            "learner": {"device": "cpu", "compute_dtype": "float32", "learning_rate": 1e-2, **(learner or {})},
            **sections,
        }
    )
    return Trainer(Policy(model, config.learner, torch.device("cpu")), config)


def gradients(trainer, batch):
    """Of the update's optimizer step; empty where there was none."""
    return gradients_of(trainer, lambda: trainer.train(batch, 0))[1]


ESTIMATORS = ["grpo", "rloo", "opo", "maxrl", "gpg", "pass_at_k", "remax", "reinforce_pp", "reinforce_pp_baseline"]


@pytest.mark.parametrize("name", ESTIMATORS)
@pytest.mark.parametrize("rewards", ["outcome", "turns"])
def test_an_update_does_not_depend_on_micro_batches_or_the_order_of_groups(name, rewards):
    """Through estimation and loss, the gradient changes by no more than rounding."""
    options = {"advantage": config_of(name, rewards=rewards, gamma=0.9, k=2)}
    results = []
    for tokens, turned in ((4096, False), (16, False), (40, True)):
        trainer = make_trainer({"tokens_per_microbatch": tokens, "grad_clip": 1e9}, **options)
        groups = groups_of()
        results.append(gradients(trainer, build_batch(0, groups[::-1] if turned else groups)))
    assert any(float(g.abs().max()) > 1e-3 for g in results[0].values())
    for other in results[1:]:
        for n, gradient in results[0].items():
            torch.testing.assert_close(other[n], gradient, rtol=1e-4, atol=1e-6)


def test_kl_in_the_reward_is_taken_off_token_by_token():
    trainer = make_trainer(
        advantage={"estimator": {"name": "reinforce_pp", "whiten": False}}, loss={"kl": "reward", "kl_coef": 0.5}
    )
    batch = build_batch(0, groups_of())
    rng = np.random.default_rng(1)
    current, reference = (-rng.uniform(0.1, 3, batch.n_sampled).astype(np.float32) for _ in range(2))
    scores = TokenScores(logprobs=current, reference=reference)
    penalties = trainer._kl_penalties(scores)
    np.testing.assert_allclose(penalties, 0.5 * (current - reference), rtol=1e-5, atol=1e-6)
    config = trainer._config.advantage
    with_kl, _ = with_advantages(batch, scores, config, penalties)
    without, _ = with_advantages(batch, scores, config)
    sequences = [row.trajectory_index for row in batch.rows]
    assert sequences == list(range(8)), "one row each"
    first = 0
    for a, b in zip(with_kl.rows, without.rows, strict=True):
        taken = penalties[first : first + a.n_sampled]
        np.testing.assert_allclose(b.advantages - a.advantages, np.cumsum(taken[::-1])[::-1], rtol=1e-4, atol=1e-5)
        first += a.n_sampled


def test_an_update_reports_overlong_trajectories():
    trainer = make_trainer(advantage={"overlong_tokens": 5, "overlong_buffer": 1})
    batch = build_batch(0, groups_of())
    report = trainer.train(batch, 0)
    assert report.overlong == sum(t.n_sampled > 4 for t in batch.trajectories) > 0


def test_remax_trains_groups_whose_rewards_are_all_equal():
    """A comparison within the group teaches nothing there, one with the greedy rollout does."""
    groups = [replace(g, trajectories=tuple(replace(t, reward=1.0) for t in g.trajectories)) for g in groups_of()]
    moved = {}
    for name in ("grpo", "remax"):
        trainer = make_trainer(advantage={"estimator": name})
        moved[name] = bool(gradients(trainer, build_batch(0, groups)))
    assert moved == {"grpo": False, "remax": True}
