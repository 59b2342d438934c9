"""Tiny real models and trajectories for the learner's tests."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from learner.data.rows import Batch, Group, Row, TokenScores
from learner.policy.policy import Policy
from learner.training.trainer import Trainer
from pipeline.config import RunConfig
from pipeline.config.learner import LearnerConfig
from pipeline.schema import FinishReason, GroupPlan, Message, Task, TokenSpan, Trajectory, TrajectoryStatus, Turn

VOCABULARY = 23


@pytest.fixture(autouse=True, scope="session")
def _one_thread():
    torch.set_num_threads(1)


def tiny_model(seed: int = 0, vocabulary: int = VOCABULARY, tie: bool = True, spread: float = 0.4) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=vocabulary,
            hidden_size=16,
            intermediate_size=32,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=1,
            max_position_embeddings=128,
            tie_word_embeddings=tie,
            initializer_range=spread,
        )
    )


def learner_config(**options) -> LearnerConfig:
    return LearnerConfig(**{"device": "cpu", "compute_dtype": "float32", "learning_rate": 1e-3, **options})


def run_config(learner: dict | None = None, **sections) -> RunConfig:
    return RunConfig.model_validate(
        {
            "run": {"total_steps": 100},
            "groups": {"n_rollout": 4, "groups_per_step": 2},
            "learner": {"device": "cpu", "compute_dtype": "float32", "learning_rate": 1e-3, **(learner or {})},
            **sections,
        }
    )


def tiny_policy(seed: int = 0, **options) -> Policy:
    return Policy(tiny_model(seed), learner_config(**options), torch.device("cpu"))


def gradients_of(trainer: Trainer, act: Callable[[], Any]) -> tuple[Any, dict[str, torch.Tensor]]:
    """The result of ``act``, and the gradients at its optimizer step; none without a step."""
    seen: dict[str, torch.Tensor] = {}

    def grab(*args, **kwargs):
        seen.update({n: p.grad.clone() for n, p in trainer.policy.model.named_parameters() if p.grad is not None})

    hook = trainer.optimizer.register_step_pre_hook(grab)
    result = act()
    hook.remove()
    return result, seen


def gradients(trainer: Trainer, rows: Sequence[Row], scores: TokenScores | None = None):
    """Report and gradients of the next update, with these rows."""
    return gradients_of(trainer, lambda: trainer.step(Batch(trainer.updates, (), tuple(rows)), 0, scores))


def make_turn(rng: np.random.Generator, context: int, sampled: int, *, version=0, branch=0, temperature=1.0) -> Turn:
    return Turn(
        context=TokenSpan.context(rng.integers(0, VOCABULARY, context)),
        completion=TokenSpan.sampled(rng.integers(0, VOCABULARY, sampled), -rng.uniform(0.5, 4.0, sampled), version),
        context_messages=(Message("user", "u"),),
        completion_message=Message("assistant", "a"),
        finish_reason=FinishReason.STOP,
        temperature=temperature,
        branch=branch,
    )


def make_trajectory(
    name: str = "t0",
    *,
    group: str = "g0",
    reward: float | None = 1.0,
    turns: Sequence[Turn] | None = None,
    seed: int = 0,
) -> Trajectory:
    rng = np.random.default_rng(seed)
    return Trajectory(
        trajectory_id=name,
        group_id=group,
        task=Task(f"task/{group}", "toy", 0),
        turns=tuple(turns or (make_turn(rng, 3, 2), make_turn(rng, 2, 3))),
        status=TrajectoryStatus.COMPLETE,
        reward=reward,
        rewards={"environment": reward},
    )


def make_group(name: str, rewards: Sequence[float], seed: int = 0, replay: Sequence[int] = ()) -> Group:
    trajectories = tuple(
        make_trajectory(f"{name}.{i}", group=name, reward=r, seed=seed * 1000 + i) for i, r in enumerate(rewards)
    )
    replay_ids = tuple(f"{name}.{i}" for i in replay)
    plan = GroupPlan(name, Task(f"task/{name}", "toy", 0), len(rewards), len(rewards) - len(replay_ids), replay_ids)
    return Group(plan, trajectories)


def make_rows(
    count: int, seed: int = 0, *, advantages: Sequence[float] | None = None, replayed: Sequence[bool] | None = None
) -> tuple[Row, ...]:
    rng = np.random.default_rng(seed)
    rows = []
    for i in range(count):
        length = int(rng.integers(4, 14))
        mask = rng.random(length) < 0.5
        mask[0], mask[-1] = False, True
        rows.append(
            Row(
                trajectory_id=f"t{i}",
                trajectory_index=i,
                environment="toy",
                token_ids=rng.integers(0, VOCABULARY, length).astype(np.int32),
                loss_mask=mask,
                behaviour_logprobs=np.where(mask, -rng.uniform(0.5, 5.0, length), 0.0).astype(np.float32),
                policy_versions=np.where(mask, 0, -1).astype(np.int32),
                temperatures=np.full(length, 0.8, dtype=np.float32),
                turns=np.zeros(length, dtype=np.int32),
                advantages=np.full(mask.sum(), rng.normal() if advantages is None else advantages[i], dtype=np.float32),
                replayed=bool(replayed[i]) if replayed is not None else False,
            )
        )
    return tuple(rows)


@pytest.fixture(scope="session")
def kit():
    """The helpers of this file, for tests that are imported by path."""
    import types

    return types.SimpleNamespace(
        VOCABULARY=VOCABULARY,
        tiny_model=tiny_model,
        tiny_policy=tiny_policy,
        learner_config=learner_config,
        run_config=run_config,
        make_turn=make_turn,
        make_trajectory=make_trajectory,
        make_group=make_group,
        make_rows=make_rows,
    )
