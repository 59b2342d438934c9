"""One of the ranks of ``test_memory.py``: the peak of its allocator in an update, with its weights and moments."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import transformers

from learner.data.rows import Batch
from learner.distributed.collectives import RankGroup, join, leave, process_rank
from learner.distributed.ranks import Interrupt
from learner.policy.fsdp import shard
from learner.policy.policy import Policy
from learner.process.rank_processes import execute_commands
from learner.training.trainer import Trainer
from tests.unit.learner.conftest import run_config
from tests.unit.models.test_memory import MEASURED, TOKENS, allocated, learner_options, rows


def peak(name: str, options: Mapping[str, Any], group: RankGroup, trace: Path) -> int:
    """Bytes of this rank at the peak of its second update, with two micro-batches for each rank."""
    config = run_config(learner_options(options), model={"max_length": TOKENS})
    torch.manual_seed(0)
    model: Any = transformers.AutoModelForCausalLM.from_config(getattr(transformers, name)(**MEASURED[name]))
    policy = Policy(model, config.learner, torch.device("cpu"))
    shard(policy, group)
    trainer = Trainer(policy, config)

    def step(update: int) -> None:
        if group.rank:
            execute_commands(trainer, group, lambda updates: None)
        else:
            trainer.step(Batch(update, (), rows(update, 2 * group.size)), update)
            group.end()

    step(0)
    states = sum(p.to_local().nbytes for p in model.parameters())
    states += sum(m.to_local().nbytes for s in trainer.optimizer.state.values() for m in s.values() if m.ndim)
    return states + allocated(lambda: step(1), trace)


def main(folder: Path, cases: list[tuple[str, dict[str, Any]]]) -> None:
    """Write the peaks of this rank."""
    torch.set_num_threads(1)
    config = run_config().learner
    group = RankGroup(join(process_rank(config), config), Interrupt(), 600.0)
    found = [peak(name, options, group, folder / f"trace{group.rank}.json") for name, options in cases]
    (folder / f"peaks{group.rank}.json").write_text(json.dumps(found))
    leave()


if __name__ == "__main__":
    main(Path(sys.argv[1]), json.loads(sys.argv[2]))
