"""Weights and optimizer may leave the device between updates; training does not notice."""

from __future__ import annotations

import pytest
import torch

from learner.data.rows import Batch
from learner.process.device_turn import Offload
from learner.training.trainer import Trainer
from tests.unit.models_trained.conftest import LORA

CASES = {
    "plain": {},
    "bfloat16 moments": {"optimizer_dtype": "bfloat16"},
    "adapters": {"lora": LORA},
}


@pytest.mark.parametrize("case", CASES)
def test_training_goes_on_bit_for_bit_after_a_round_trip(kit, case):
    weights = []
    for offload in (False, True):
        config = kit.run_config(CASES[case])
        torch.manual_seed(0)
        trainer = Trainer(kit.tiny_policy(**CASES[case]), config)
        moved = Offload(trainer)
        for update in range(3):
            torch.manual_seed(update)
            trainer.step(Batch(update, (), kit.make_rows(3, seed=update)), update)
            if offload:
                parameters = list(trainer.policy.model.parameters())
                assert moved.to_host() > 0
                assert moved.to_host() == 0
                assert moved.to_device() > 0
                assert moved.to_device() == 0
                assert all(a is b for a, b in zip(parameters, trainer.policy.model.parameters(), strict=True))
        weights.append(trainer.policy.snapshot("float32"))
    for name, tensor in weights[0].items():
        assert torch.equal(tensor, weights[1][name]), name


def test_weights_can_be_copied_for_publication_while_they_are_away(kit):
    trainer = Trainer(kit.tiny_policy(), kit.run_config())
    before = trainer.policy.snapshot("float32")
    moved = Offload(trainer)
    moved.to_host()
    assert all(torch.equal(t, before[n]) for n, t in trainer.policy.snapshot("float32").items())
    tied = trainer.policy.model
    assert tied.get_output_embeddings().weight is tied.get_input_embeddings().weight
