"""Gradients of an update whose groups are divided: those of all ranks' shares add up to those of one process."""

from contextlib import contextmanager

import pytest
import torch

from learner.data.division import divide
from learner.data.rows import Batch
from learner.distributed.ranks import Ranks
from learner.training.trainer import Trainer
from tests.unit.packing.conftest import branching_rows


class OneOf(Ranks):
    """A rank that computes its share and hears nothing from the others; scores it computes of all rows."""

    def __init__(self, rank, size):
        self.share, self.of, self.scores = rank, size, False

    @contextmanager
    def together(self, command, *_, **__):
        self.scores = command == "score"
        yield
        self.scores = False

    def mine(self, rows, form, tokens_max):
        return [], list(range(len(rows))) if self.scores else divide(rows, self.of, form)[self.share]


LOSSES = {
    "token_mean": {"loss": {"entropy_bonus": 0.05}},
    "sequence_mean_of_sequence_ratios": {"loss": {"policy": "gspo", "aggregation": "sequence_mean"}},
    "masks_and_weights": {"importance": {"anchor": "proximal", "weight": "sequence"}},
}


def gradients(kit, sections, rows, ranks):
    """Gradient of each weight before the optimizer step."""
    options = {"grad_clip": 1e9, "tokens_per_microbatch": 150}
    trainer = Trainer(kit.tiny_policy(**options), kit.run_config(options, **sections))
    trainer.policy.ranks, found = ranks, {}

    def keep(*_, **__):
        found.update({name: p.grad.clone() for name, p in trainer.policy.named_parameters if p.grad is not None})

    trainer.optimizer.step = keep
    trainer.step(Batch(0, (), rows), 0)
    return found


@pytest.mark.parametrize("groups", [1, 5])
@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("name", LOSSES)
def test_gradients_of_all_shares_add_up_to_those_of_one_process(kit, name, size, groups):
    rows = branching_rows(groups, seed=groups)
    whole = gradients(kit, LOSSES[name], rows, Ranks())
    parts = [gradients(kit, LOSSES[name], rows, OneOf(rank, size)) for rank in range(size)]
    assert all(parts), "every rank has rows"
    for weight, expected in whole.items():
        torch.testing.assert_close(sum(part[weight] for part in parts), expected, rtol=1e-4, atol=1e-6)
