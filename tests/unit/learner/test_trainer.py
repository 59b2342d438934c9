import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from learner.advantages.estimate import with_advantages
from learner.data.rows import Batch, TokenScores, build_batch, trajectory_rows
from learner.policy.policy import Policy
from learner.training.trainer import Trainer
from pipeline.config.advantages import AdvantageConfig
from pipeline.errors import Interrupted, TrainingError
from pipeline.schema import FinishReason, Message, TokenSpan, Turn
from tests.unit.learner.conftest import gradients


def trainer_of(kit, learner=None, spread=0.4, **sections) -> Trainer:
    config = kit.run_config(learner, **sections)
    return Trainer(Policy(kit.tiny_model(spread=spread), config.learner, torch.device("cpu")), config)


def test_gradient_equals_a_full_logits_reference(kit):
    rows = kit.make_rows(5)
    trainer = trainer_of(kit, {"grad_clip": 1e9})
    model = kit.tiny_model()
    total = sum(row.n_sampled for row in rows)
    loss = 0.0
    for row in rows:
        logits = model(torch.from_numpy(row.token_ids.astype(np.int64))[None]).logits[0] / 0.8
        log_p = torch.log_softmax(logits.double(), -1)
        for t in np.flatnonzero(row.loss_mask):
            ratio = (log_p[t - 1, int(row.token_ids[t])] - float(row.behaviour_logprobs[t])).exp()
            a = float(row.advantages[0])
            token_loss = torch.maximum(-a * ratio, -a * ratio.clamp(0.8, 1.28))
            loss = loss + (token_loss.clamp(max=-a * 3.0) if a < 0 else token_loss) / total
    loss.backward()
    report, came = gradients(trainer, rows)
    assert report.loss == pytest.approx(loss.item(), rel=1e-5)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(came[name], parameter.grad, rtol=1e-3, atol=1e-6)


def test_a_token_with_an_infinite_behaviour_logprob_is_rejected_and_counted(kit):
    (row, *rest) = kit.make_rows(3)
    mu = row.behaviour_logprobs.copy()
    mu[np.flatnonzero(row.loss_mask)[0]] = -np.inf
    trainer = trainer_of(kit)
    report = trainer.step(Batch(0, (), (replace(row, behaviour_logprobs=mu), *rest)), 0)
    assert report.statistics.all.rejected == 1
    assert report.optimizer_steps == 1
    assert math.isfinite(report.loss)


def test_rows_without_advantage_are_scored_but_change_no_gradient(kit):
    rows = kit.make_rows(6, advantages=[1.0, 0.0, -1.0, 0.0, 0.5, 0.0])
    report, grads = gradients(trainer_of(kit, {"grad_clip": 1e9}), rows)
    with_entropy_path = trainer_of(kit, {"grad_clip": 1e9}, loss={"entropy_bonus": 1e-30})
    slow_report, slow = gradients(with_entropy_path, rows)
    assert report.loss == pytest.approx(slow_report.loss, rel=1e-4)
    for name in grads:
        torch.testing.assert_close(grads[name], slow[name], rtol=1e-5, atol=1e-7)
    report = trainer_of(kit).step(Batch(0, (), rows), 0)
    assert report.statistics.all.tokens == sum(row.n_sampled for row in rows)
    assert report.tokens_without_signal == sum(row.n_sampled for row in rows if not row.has_signal)


def test_a_batch_without_any_advantage_changes_no_weight(kit):
    trainer = trainer_of(kit)
    before = trainer.policy.snapshot("float32")
    report = trainer.step(Batch(0, (), kit.make_rows(3, advantages=[0.0] * 3)), 0)
    after = trainer.policy.snapshot("float32")
    assert report.optimizer_steps == 0
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_recorded_with_the_learners_own_weights_every_ratio_is_one(kit):
    trainer = trainer_of(kit)
    rows = own_rows(trainer, kit.make_rows(5))
    report = trainer.step(Batch(0, (), rows), policy_version=0)
    s = report.statistics
    assert s.all.ratio.mean == pytest.approx(1, abs=1e-5)
    assert s.all.ratio.ess_ratio == pytest.approx(1, abs=1e-6)
    assert s.logprob_differences.max() < 1e-5
    assert s.all.kl_k3.value == pytest.approx(0, abs=1e-6)


def test_an_optimizer_step_is_no_disagreement_of_engine_and_learner(kit):
    """The second mini-batch is scored with weights that the first has moved."""
    rows = own_rows(trainer_of(kit), kit.make_rows(6))
    s = trainer_of(kit, {"minibatches": 2, "learning_rate": 0.1}).step(Batch(0, (), rows), policy_version=0).statistics
    assert s.all.kl_k3.value > 1e-3
    assert 0 < len(s.logprob_differences) < s.all.tokens
    assert s.logprob_differences.max() < 1e-5


def test_padding_and_shared_beginnings_are_counted_once_for_all_epochs(kit):
    def counted(epochs):
        learner = {"epochs": epochs, "packing": "padded", "tokens_per_microbatch": 1000}
        report = trainer_of(kit, learner).step(Batch(0, (), kit.make_rows(6)), policy_version=0)
        return report.tokens_padding, report.tokens_shared, report.tokens_trained

    assert counted(3) == counted(1) and counted(1)[0] > 0


def own_rows(trainer, rows):
    """The same rows with μ as the trainer's own policy gives it."""
    scores, at, out = trainer.score(rows), 0, []
    for row in rows:
        mu = np.zeros(len(row), np.float32)
        mu[row.loss_mask] = scores[at : at + row.n_sampled]
        at += row.n_sampled
        out.append(replace(row, behaviour_logprobs=mu))
    return tuple(out)


def test_replayed_rows_under_current_weights_have_the_plain_gradient(kit):
    """The ratio is 1, and the loss that of the same rows as fresh ones."""
    rows = own_rows(trainer_of(kit), kit.make_rows(5))
    report, grads = gradients(trainer_of(kit), rows)
    replay_report, replay = gradients(trainer_of(kit), [replace(row, replayed=True) for row in rows])
    assert report.loss == replay_report.loss
    assert all(torch.equal(grads[name], replay[name]) for name in grads)


@pytest.mark.parametrize("where", ["loss", "gradient"])
def test_nonfinite_step_is_skipped_counted_and_leaves_the_weights(kit, where):
    trainer = trainer_of(kit)
    rows = kit.make_rows(3)
    if where == "loss":
        rows = (replace(rows[0], advantages=rows[0].advantages * float("nan")), *rows[1:])
    else:
        trainer.policy.model.model.norm.weight.register_hook(lambda g: g * float("inf"))
    before = trainer.policy.snapshot("float32")
    report = trainer.step(Batch(0, (), rows), 0)
    assert report.nonfinite[where] == 1
    assert report.optimizer_steps == 0
    assert trainer.updates == 1
    after = trainer.policy.snapshot("float32")
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_a_ratio_that_is_not_finite_skips_the_step(kit):
    trainer = trainer_of(kit)
    with torch.no_grad():
        trainer.policy.parameters[0].fill_(torch.nan)
    report = trainer.step(Batch(0, (), kit.make_rows(3)), 0)
    assert report.nonfinite["ratio"] == 1 and report.optimizer_steps == 0


def test_a_mini_batch_that_is_not_finite_leaves_the_others_to_train(kit):
    rows = kit.make_rows(6)
    rows[4].advantages[:] = np.nan
    report = trainer_of(kit, {"minibatches": 3}).step(Batch(0, (), rows), 7)
    assert sum(report.nonfinite.values()) == 1 and report.optimizer_steps == 2


def test_epochs_and_minibatches_make_that_many_optimizer_steps_over_whole_trajectories(kit):
    trainer = trainer_of(kit, {"epochs": 2, "minibatches": 3}, importance={"anchor": "proximal"})
    rows = kit.make_rows(7)
    report = trainer.step(Batch(0, (), rows), 0)
    assert report.optimizer_steps == 6
    assert report.statistics.all.tokens == sum(row.n_sampled for row in rows)


def test_shifting_the_sampled_tokens_by_one_is_noticed(kit):
    """The recorded log-probs belong to their tokens: one place off and the difference is large."""
    trainer = trainer_of(kit)
    rows = own_rows(trainer, kit.make_rows(8))
    right = trainer_of(kit).step(Batch(0, (), rows), 0).statistics.logprob_differences.mean()
    shifted = []
    for row in rows:
        mu = row.behaviour_logprobs.copy()
        mu[row.loss_mask] = np.roll(mu[row.loss_mask], 1)
        shifted.append(replace(row, behaviour_logprobs=mu))
    wrong = trainer_of(kit).step(Batch(0, (), tuple(shifted)), 0).statistics.logprob_differences.mean()
    assert right < 1e-5
    assert wrong > 0.1


def test_interrupt_leaves_the_weights_untouched_and_the_update_unmade(kit):
    trainer = trainer_of(kit)
    before = trainer.policy.snapshot("float32")
    trainer.policy.interrupt.set()
    with pytest.raises(Interrupted):
        trainer.step(Batch(0, (), kit.make_rows(3)), 0)
    assert (trainer.updates, trainer.policy.interrupt.mid_update) == (0, False)
    assert all(torch.equal(before[n], t) for n, t in trainer.policy.snapshot("float32").items())
    trainer.policy.interrupt.asked = False
    assert trainer.step(Batch(0, (), kit.make_rows(3)), 0).optimizer_steps == 1


def test_interrupt_reaches_the_backward_pass(kit):
    trainer = trainer_of(kit)
    layers = trainer.policy.model.model.layers
    layers[1].register_forward_hook(lambda *_: trainer.policy.interrupt.set())
    with pytest.raises(Interrupted):
        trainer.step(Batch(0, (), kit.make_rows(3)), 0)


def test_an_update_that_has_begun_to_change_the_weights_is_finished_before_a_stop(kit):
    trainer = trainer_of(kit, {"minibatches": 2})
    trainer.optimizer.register_step_post_hook(lambda *_: trainer.policy.interrupt.set())
    assert trainer.step(Batch(0, (), kit.make_rows(4)), 0).optimizer_steps == 2
    assert (trainer.updates, trainer.policy.interrupt.mid_update) == (1, False)
    with pytest.raises(Interrupted):
        trainer.step(Batch(1, (), kit.make_rows(4)), 1)
    assert (trainer.updates, trainer.policy.interrupt.mid_update) == (1, False)


def test_an_update_is_ended_by_force_between_optimizer_steps_and_marked_torn(kit):
    trainer = trainer_of(kit, {"minibatches": 2})
    trainer.optimizer.register_step_post_hook(lambda *_: trainer.policy.interrupt.force())
    with pytest.raises(Interrupted):
        trainer.step(Batch(0, (), kit.make_rows(4)), 0)
    assert (trainer.updates, trainer.policy.interrupt.mid_update) == (0, True)


def test_a_batch_of_another_update_is_refused(kit):
    with pytest.raises(TrainingError, match="update 0"):
        trainer_of(kit).step(Batch(3, (), kit.make_rows(2)), 0)


def test_snapshot_holds_tied_weights_once_and_in_the_published_type(kit):
    policy = kit.tiny_policy()
    weights = policy.snapshot("bfloat16")
    assert "lm_head.weight" not in weights
    assert "model.embed_tokens.weight" in weights
    assert all(t.dtype == torch.bfloat16 for t in weights.values())
    copy = policy.snapshot("float32")
    with torch.no_grad():
        policy.model.model.norm.weight.add_(1)
    assert torch.equal(copy["model.norm.weight"], policy.snapshot("float32")["model.norm.weight"] - 1)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_dropout_never_separates_learner_and_engine(kit, dtype):
    model = kit.tiny_model()
    model.config.attention_dropout = 0.5
    for layer in model.model.layers:
        layer.self_attn.attention_dropout = 0.5
    policy = Policy(model, kit.learner_config(compute_dtype=dtype), torch.device("cpu"))
    trainer = Trainer(policy, kit.run_config())
    assert np.array_equal(trainer.score(kit.make_rows(3)), trainer.score(kit.make_rows(3)))


def play_bandit(trainer, rng, update, pulls=32):
    """Two contexts; in context c the arms c, c + 3 … pay. One sampled token a trajectory, μ from the policy itself."""
    from learner.data.rows import Group
    from pipeline.schema import GroupPlan, Task, Trajectory, TrajectoryStatus

    groups = []
    for c in range(2):
        prompt = np.array([20 + c, 10], dtype=np.int32)
        with torch.no_grad():
            logits = trainer.policy.model(torch.from_numpy(prompt.astype(np.int64))[None]).logits[0, -1]
        log_p = torch.log_softmax(logits, -1).numpy()
        name = f"u{update}.{c}"
        trajectories = []
        for i in range(pulls):
            token = int(rng.choice(len(log_p), p=np.exp(log_p) / np.exp(log_p).sum()))
            turn = Turn(
                TokenSpan.context(prompt),
                TokenSpan.sampled([token], [min(0.0, log_p[token])], update),
                (Message("user", "u"),),
                Message("assistant", "a"),
                FinishReason.STOP,
                1.0,
            )
            trajectories.append(
                Trajectory(
                    f"{name}.{i}",
                    name,
                    Task(f"t{c}", "bandit", c),
                    (turn,),
                    TrajectoryStatus.COMPLETE,
                    reward=float(token % 3 == c),
                )
            )
        groups.append(Group(GroupPlan(name, Task(f"t{c}", "bandit", c), pulls, pulls), tuple(trajectories)))
    return with_advantages(build_batch(update, groups), TokenScores(), AdvantageConfig())[0]


@pytest.mark.parametrize("anchor", ["behaviour", "proximal"])
def test_it_learns_a_contextual_bandit(kit, anchor):
    trainer = trainer_of(kit, {"learning_rate": 0.02}, spread=0.1, importance={"anchor": anchor})
    rng, rewards = np.random.default_rng(0), []
    for update in range(25):
        batch = play_bandit(trainer, rng, update)
        rewards.append(np.mean([t.reward for t in batch.trajectories]))
        report = trainer.step(batch, policy_version=update)
        assert report.statistics.staleness.max() == 0
    assert np.mean(rewards[-3:]) > 0.9 > 0.5 > np.mean(rewards[:2])


def test_rows_of_a_forked_trajectory_train_each_sampled_token_once(kit):
    rng = np.random.default_rng(0)
    forked = kit.make_trajectory("a", turns=[kit.make_turn(rng, 3, 2), kit.make_turn(rng, 6, 4, branch=1)])
    rows = [replace(row, advantages=row.advantages + 1) for row in trajectory_rows(forked, 0)]
    report = trainer_of(kit).step(Batch(0, (), tuple(rows)), 0)
    assert report.tokens_trained == forked.n_sampled


@pytest.mark.parametrize("checkpointing", [True, "offload"])
def test_gradient_checkpointing_changes_no_gradient(kit, checkpointing):
    rows = kit.make_rows(4)
    report, grads = gradients(trainer_of(kit, {"grad_clip": 1e9}), rows)
    other_report, other = gradients(trainer_of(kit, {"grad_clip": 1e9, "gradient_checkpointing": checkpointing}), rows)
    assert report.loss == pytest.approx(other_report.loss, rel=1e-6)
    for name in grads:
        torch.testing.assert_close(other[name], grads[name], rtol=1e-5, atol=1e-7)
