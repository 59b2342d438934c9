"""The learner's side: an update is made from the groups that are not left out, or counted where there are none."""

from __future__ import annotations

import torch
from prometheus_client import CollectorRegistry
from transformers import LlamaConfig, LlamaForCausalLM

from learner.data.rows import build_batch
from learner.metrics import LearnerMetrics
from learner.observability.timing import StepTimes
from learner.policy.policy import Policy
from learner.process.batches import choose_replays
from learner.process.recorder import Update, record_step, step_line, trained_facts
from learner.process.session import GroupAssembler
from learner.training.trainer import Trainer
from pipeline.config import RunConfig
from pipeline.schema import FinishReason, GroupPlan, Message, Task, TokenSpan, Trajectory, TrajectoryStatus, Turn


def plan_of(number: int, *, left_out: bool = False) -> GroupPlan:
    return GroupPlan(f"g{number:06d}", Task(f"a/{number}", "a", number), 2, 2, left_out=left_out)


def trajectory_of(plan: GroupPlan, index: int) -> Trajectory:
    completion = TokenSpan.sampled([3, 4 + index], [-0.5, -0.7], 0)
    turn = Turn(TokenSpan.context([1, 2]), completion, (Message("user", "u"),), Message("assistant", "x"),
                FinishReason.STOP, 1.0)  # fmt: skip
    name = f"{plan.group_id}.{index}.0"
    return Trajectory(name, plan.group_id, plan.task, (turn,), TrajectoryStatus.COMPLETE, rewards={"environment": 1.0})


def tiny_trainer(**sections: object) -> Trainer:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    config = RunConfig.model_validate(
        {
            "run": {"total_steps": 10},
            "groups": {"n_rollout": 2, "groups_per_step": 2, "zero_variance": "drop"},
            "learner": {"device": "cpu", "compute_dtype": "float32", "learning_rate": 1e-2},
            **sections,
        }
    )
    shape = LlamaConfig(vocab_size=17, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2)
    return Trainer(Policy(LlamaForCausalLM(shape), config.learner, torch.device("cpu")), config)


def test_a_left_out_group_completes_its_update_without_a_delivery() -> None:
    assembler = GroupAssembler(2)
    left, other = plan_of(0, left_out=True), plan_of(1)
    assembler.plan(left, 0)
    assert assembler.progress(0).complete == 1 and assembler.holding() == [left.group_id]
    assembler.plan(other, 0)
    assert not assembler.ready(0)
    for index in range(2):
        assembler.deliver(other.group_id, index, trajectory_of(other, index), float(index), {})
    assert [group.group_id for group in assembler.take(0)] == [other.group_id]
    assert assembler.consumed(0) == [left.group_id, other.group_id], "the stage is told of both"


def test_an_update_without_groups_is_counted_and_changes_no_weight() -> None:
    trainer = tiny_trainer()
    before = [p.detach().clone() for p in trainer.policy.parameters]
    choice = choose_replays((), trainer._config.replay, trainer.mean_entropies)
    batch = build_batch(0, choice.groups)
    report = trainer.train(batch, policy_version=3)
    assert trainer.updates == 1 and report.optimizer_steps == 0 and report.tokens_trained == 0
    assert all(torch.equal(a, b) for a, b in zip(before, trainer.policy.parameters, strict=True))
    update = Update(batch, report, StepTimes(0.0, 0.0, 1.0), choice=choice)
    line = step_line(update)
    assert line["step"] == 1 and line["n_groups"] == 0 and line["reward_mean"] is None
    metrics = LearnerMetrics(registry := CollectorRegistry(), environments=("a",))
    metrics.entropy_nats.set(1.5)
    metrics.behaviour_kl_nats.labels(estimator="k3").set(0.25)
    record_step(metrics, update)
    kept = registry.get_sample_value("afterplay_learner_behaviour_kl_nats", {"estimator": "k3"})
    assert (registry.get_sample_value("afterplay_learner_entropy_nats"), kept) == (1.5, 0.25), "nothing new is known"
    facts = trained_facts(batch, report, choice)
    assert facts.policy_version == 3 and not (facts.replayed or facts.entropy)
    assert trainer.train(build_batch(1, ()), policy_version=4).update == 1


def test_the_gradient_is_that_of_the_remaining_groups_alone() -> None:
    """Denominators are those of what is trained: an update that loses a group equals an update planned without it."""
    outcomes = []
    for groups_per_step in (2, 1):
        trainer = tiny_trainer(groups={"n_rollout": 2, "groups_per_step": groups_per_step, "zero_variance": "drop"})
        before = [p.detach().clone() for p in trainer.policy.parameters]
        assembler, plan = GroupAssembler(groups_per_step), plan_of(1)
        if groups_per_step == 2:
            assembler.plan(plan_of(0, left_out=True), 0)
        assembler.plan(plan, 0)
        for index in range(2):
            assembler.deliver(plan.group_id, index, trajectory_of(plan, index), float(index), {})
        trainer.train(build_batch(0, assembler.take(0)), 0)
        outcomes.append([p.detach().clone() for p in trainer.policy.parameters])
        assert any((a != b).any() for a, b in zip(before, outcomes[-1], strict=True))
    assert all(torch.equal(a, b) for a, b in zip(*outcomes, strict=True))
