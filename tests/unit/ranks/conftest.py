import pytest
import torch
import torch.distributed as dist

from learner.distributed.collectives import RankGroup
from learner.distributed.ranks import Interrupt
from tests.unit.learner.conftest import _one_thread, kit

__all__ = ["_one_thread", "kit"]


@pytest.fixture(scope="module")
def group():
    """A group of one rank, whose weights are shards all the same."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield RankGroup(torch.device("cpu"), Interrupt(), 10.0)
    dist.destroy_process_group()
