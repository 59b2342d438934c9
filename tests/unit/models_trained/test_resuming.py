"""Stopping and resuming equals never stopping, with every part that a trainer can have."""

import pytest
import torch

from learner.checkpoints.checkpoint import CheckpointState, find_checkpoints, save_checkpoint
from learner.process.build import make_policy
from pipeline.errors import FormatMismatch
from tests.unit.models_trained.conftest import LORA

KINDS = {
    "plain": ({}, ()),
    "bfloat16 moments": ({"optimizer_dtype": "bfloat16"}, ()),
    "adapters": ({"lora": LORA}, ("reference",)),
    "critic": ({"critic": {"warmup_updates": 1, "learning_rate": 1e-3}}, ("values",)),
    "critic without backbone": ({"critic": {"backbone": "none"}, "lora": LORA}, ("values", "logprobs")),
}


def tensors(trainer):
    """Everything that must not differ, by name."""
    found = {f"policy.{name}": t for name, t in trainer.policy.snapshot("float32").items()}
    found |= {f"trained.{name}": p for name, p in trainer.policy.named_parameters}
    if trainer.critic is not None:
        state = trainer.critic.state()
        found |= {f"critic.{key}": t for key, t in {**state.get("backbone", {}), **state["head"]}.items()}
    for i, state in enumerate(trainer.optimizer.state_dict()["state"].values()):
        found |= {f"optimizer.{i}.{key}": t for key, t in state.items() if isinstance(t, torch.Tensor)}
    return found


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_resumed_training_equals_uninterrupted_bit_for_bit(
    kind, config_of, initial, resume, train, tmp_path, monkeypatch
):
    learner_section, names = KINDS[kind]
    monkeypatch.setattr("learner.training.trainer.needed_scores", lambda config: frozenset(names))
    monkeypatch.setattr("learner.process.build.needed_scores", lambda config: frozenset(names))
    config = config_of({"minibatches": 2, "schedule": "cosine", **learner_section})
    straight = resume(config, initial)
    lines = train(straight, 5)
    random = torch.rand(3)
    first = resume(config, initial)
    train(first, 3)
    root = tmp_path / "c"
    save_checkpoint(root, first, CheckpointState(3, 3, {}), initial, keep=1)
    torch.manual_seed(999)
    second = resume(config, initial, root)
    assert second.updates == 3
    again = train(second, 2)
    assert torch.equal(torch.rand(3), random)
    expected, came = tensors(straight), tensors(second)
    assert expected.keys() == came.keys()
    different = [name for name in expected if not torch.equal(expected[name], came[name])]
    assert different == []
    assert [r.loss for r in again] == [r.loss for r in lines[3:]]
    assert [r.critic for r in again] == [r.critic for r in lines[3:]]


def test_the_model_of_an_adapter_checkpoint_is_merged_and_loads_anywhere(config_of, initial, resume, train, tmp_path):
    config = config_of({"lora": LORA})
    trainer = resume(config, initial)
    train(trainer, 2)
    path = save_checkpoint(tmp_path / "c", trainer, CheckpointState(2, 2, {}), initial, keep=1)
    merged = make_policy(config_of(), path / "model", None).snapshot("float32")
    own = trainer.policy.snapshot("float32")
    assert all(torch.equal(own[name], merged[name]) for name in own)
    assert (path / "model" / "tokenizer.json").exists()


def test_switching_adapters_between_runs_is_refused_with_what_to_do(config_of, initial, resume, tmp_path):
    plain = resume(config_of(), initial)
    save_checkpoint(tmp_path / "c", plain, CheckpointState(0, 0, {}), initial, keep=1)
    with pytest.raises(FormatMismatch, match=r"choose another run\.name"):
        resume(config_of({"lora": LORA}), initial, tmp_path / "c")
    adapted = resume(config_of({"lora": LORA}), initial)
    save_checkpoint(tmp_path / "d", adapted, CheckpointState(0, 0, {}), initial, keep=1)
    with pytest.raises(FormatMismatch, match=r"choose another run\.name"):
        resume(config_of(), initial, tmp_path / "d")


def test_a_part_that_was_switched_on_begins_anew(config_of, initial, resume, tmp_path, caplog):
    plain = resume(config_of(), initial)
    save_checkpoint(tmp_path / "c", plain, CheckpointState(0, 0, {}), initial, keep=1)
    trainer = resume(config_of(advantage={"estimator": "gae"}), initial, tmp_path / "c")
    assert trainer.critic is not None
    assert "has no critic" in caplog.text
    assert len(find_checkpoints(tmp_path / "c")) == 1


def test_a_critic_warms_up_from_where_it_was_switched_on(config_of, initial, resume, train, tmp_path):
    plain = resume(config_of(), initial)
    train(plain, 2)
    save_checkpoint(tmp_path / "c", plain, CheckpointState(2, 2, {}), initial, keep=1)
    config = config_of({"critic": {"warmup_updates": 2}}, advantage={"estimator": "gae"})
    first = resume(config, initial, tmp_path / "c")
    assert [report.optimizer_steps for report in train(first, 1)] == [0]
    save_checkpoint(tmp_path / "c", first, CheckpointState(3, 3, {}), initial, keep=1)
    again = resume(config, initial, tmp_path / "c")
    assert [report.optimizer_steps for report in train(again, 2)] == [0, 1]


@pytest.mark.parametrize("before", ["float32", "bfloat16"])
def test_a_resumed_optimizer_keeps_its_moments_and_has_the_options_of_the_run_file(
    before, config_of, initial, resume, train, tmp_path
):
    gae = {"advantage": {"estimator": "gae"}}
    first = resume(config_of({"weight_decay": 0.1, "optimizer_dtype": before}, **gae), initial)
    train(first, 1)
    save_checkpoint(tmp_path / "c", first, CheckpointState(1, 1, {}), initial, keep=1)
    second = resume(config_of({"betas": [0.8, 0.95]}, **gae), initial, tmp_path / "c")
    for made, came in ((first.optimizer, second.optimizer), (first.critic.optimizer, second.critic.optimizer)):
        (group,) = came.param_groups
        assert (group["weight_decay"], group["betas"], group["fused"]) == (0.0, (0.8, 0.95), True)
        for a, b in zip(made.state.values(), came.state.values(), strict=True):
            assert int(a["step"]) == int(b["step"]) == 1
            assert torch.equal(a["exp_avg"].float(), b["exp_avg"])
    assert train(second, 1)[0].optimizer_steps == 1
