"""A fork changes what is stored and nothing that is learnt: both branches train as the unforked play would."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from learner.advantages.estimate import with_advantages
from learner.data.rows import Batch, Group, TokenScores, build_batch
from learner.policy.policy import Policy
from learner.training.trainer import Trainer
from pipeline.config.advantages import AdvantageConfig
from pipeline.schema import TokenSpan, Trajectory
from tests.unit.learner.conftest import gradients_of


def forked(trajectory: Trajectory) -> Trajectory:
    """The same play, whose second turn was asked for with the whole history restated."""
    first, second = trajectory.turns
    before = [first.context, first.completion, second.context]
    whole = TokenSpan.context(np.concatenate([span.token_ids for span in before]))
    return replace(trajectory, turns=(first, replace(second, context=whole, branch=1)))


def learnt(kit, batch: Batch, aggregation: str) -> tuple[float, dict[str, torch.Tensor]]:
    config = kit.run_config({"grad_clip": 1e9}, loss={"aggregation": aggregation})
    trainer = Trainer(Policy(kit.tiny_model(), config.learner, torch.device("cpu")), config)
    report, seen = gradients_of(trainer, lambda: trainer.step(batch, policy_version=0))
    return report.loss, seen


@pytest.mark.parametrize("aggregation", ["token_mean", "sequence_mean", "sequence_sum"])
def test_a_trajectory_that_forked_gives_the_gradient_of_the_one_that_did_not(kit, aggregation):
    """Also for the others of its group: the baseline counts trajectories, not branches."""
    group = kit.make_group("g", [1.0, 0.0, 0.5, 0.0])
    trajectories = tuple(forked(t) if i in (0, 3) else t for i, t in enumerate(group.trajectories))
    groups = (group, Group(group.plan, trajectories))
    batches = [with_advantages(build_batch(0, [g]), TokenScores(), AdvantageConfig())[0] for g in groups]
    assert [len(batch.rows) for batch in batches] == [4, 6]
    (loss, grads), (loss_forked, grads_forked) = (learnt(kit, batch, aggregation) for batch in batches)
    assert loss_forked == pytest.approx(loss, rel=1e-5) and grads
    for name, grad in grads.items():
        torch.testing.assert_close(grads_forked[name], grad, rtol=1e-4, atol=1e-6)
