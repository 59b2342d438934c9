"""On a GPU every tensor of an update is there: with a pretended one (tests/support/second_device.py) the learner makes
the updates that it makes on a CPU."""

import numpy as np
import pytest
import torch
import transformers

from learner.checkpoints.checkpoint import CheckpointState, save_checkpoint
from learner.process.device_turn import Offload
from tests.support import families
from tests.support.quick import slow_but
from tests.support.second_device import GPU, second_device

GAE = {"advantage": {"estimator": "gae"}, "loss": {"kl": "loss"}}
MASKED = {"masks": [{"level": "token", "low": 0.5, "high": 2.0}]}
CASES = {
    "padded": ({"packing": "padded"}, {}),
    "packed": ({"packing": "packed"}, {}),
    "steps": ({"epochs": 2, "minibatches": 2, "tokens_per_microbatch": 16}, {"replay": {"keep_trained": 2}}),
    "checkpointing": ({"gradient_checkpointing": True, "optimizer_dtype": "bfloat16"}, {}),
    "adapters": ({"lora": {"rank": 2}}, {"loss": {"kl": "loss", "entropy_bonus": 0.01}}),
    "critic": ({"critic": {"backbone": "own"}}, GAE),
    "critic of the policy": ({"critic": {"backbone": "none"}}, GAE),
}


@pytest.fixture
def on(initial, resume, config_of, train, monkeypatch, tmp_path):
    """Losses and weights of two updates, a turn of the engines, a checkpoint, and two more updates from there."""

    def run(device, learner, sections):
        monkeypatch.setattr("learner.process.build.resolve_device", lambda _: device)
        config, root = config_of(learner, **sections), tmp_path / device.type
        trainer = resume(config, initial)
        reports, offload = train(trainer, 2), Offload(trainer)
        offload.to_host()
        assert {p.device.type for p in trainer.policy.model.parameters()} == {"cpu"}
        offload.to_device()
        save_checkpoint(root, trainer, CheckpointState(2, 2, {}), initial, 2)
        trainer = resume(config, initial, root)
        reports += train(trainer, 2)
        assert {p.device for p in trainer.policy.model.parameters()} == {device}
        weights = {name: tensor.numpy() for name, tensor in trainer.policy.snapshot("float32").items()}
        return [report.loss for report in reports], weights

    return run


@pytest.mark.parametrize("case", slow_but(("packed", "adapters"), CASES))
def test_updates_on_a_gpu_are_those_on_a_cpu(on, case):
    losses, weights = on(torch.device("cpu"), *CASES[case])
    with second_device() as marks:
        found, others = on(GPU, *CASES[case])
    assert marks.operations > 1000
    np.testing.assert_allclose(found, losses, rtol=1e-4)
    for name, array in weights.items():
        np.testing.assert_allclose(others[name], array, rtol=1e-3, atol=1e-5, err_msg=name)


def test_the_host_waits_for_the_gpu_as_often_however_many_microbatches(initial, resume, config_of, train, monkeypatch):
    monkeypatch.setattr("learner.process.build.resolve_device", lambda _: GPU)

    def waits(tokens):
        config = config_of({"packing": "packed", "tokens_per_microbatch": tokens}, importance=MASKED)
        with second_device() as marks:
            trainer = resume(config, initial)
            before = marks.waits
            (report,) = train(trainer, 1)
        return report.n_microbatches, marks.waits - before

    (many, often), (one, once) = waits(16), waits(1000)
    assert many > one == 1
    assert often == once > 0


@pytest.mark.parametrize("name", slow_but(("Qwen3 (experts)", "Qwen3.5"), families.FAMILIES))
def test_every_family_trains_on_a_gpu(name, tmp_path, monkeypatch):
    transformers.utils.logging.disable_progress_bar()
    families.write_family(name, tmp_path)
    with second_device() as marks:
        monkeypatch.setattr(families, "CPU", GPU)
        policy = families.trained(families.read_policy(tmp_path)).policy
    assert marks.operations > 1000 and all(map(marks.has, policy.parameters))


def test_the_pretended_gpu_refuses_tensors_of_both_devices():
    with second_device():
        there, here = torch.ones(2, 3, device="cuda"), torch.ones(2, 3)
        assert (there.device, there[:, 1:].device, here.device) == (GPU, GPU, torch.device("cpu"))
        assert torch.equal((there + torch.tensor(1.0)).cpu(), here + 1)
        assert there[torch.tensor([0])].device == torch.zeros_like(there).device == here.to(there).device == GPU
        for mixed in (
            lambda: there + here,
            lambda: there.numpy(),
            lambda: there @ here.T,
            lambda: torch.cat([here, there]),
        ):
            with pytest.raises((RuntimeError, TypeError), match="on the GPU"):
                mixed()
    with pytest.raises((RuntimeError, AssertionError)):
        torch.ones(1, device="cuda")
