"""FSDP2 with one rank on the device: its gradient against that of no FSDP, its snapshot, a checkpoint and the step
after resuming from it."""

from __future__ import annotations

import copy
import os
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch.distributed import HashStore

from benchmarks.gpu.case import Facts, Machine
from benchmarks.gpu.layouts import distance, form_of, gradients_of, small_case, small_model
from benchmarks.learner_step.case import make_rows
from benchmarks.learner_step.sides import make_trainer, run_config
from learner.checkpoints.checkpoint import CheckpointState, restore_training, save_checkpoint
from learner.data.rows import Batch
from learner.distributed.collectives import ProcessRank, RankGroup, join, leave
from learner.models.model_folder import ModelFolder
from learner.policy.fsdp import shard
from learner.policy.policy import Policy
from learner.training.trainer import Trainer

WAIT_SECONDS = 60.0


def one_rank(machine: Machine) -> Iterator[tuple[str, Facts]]:
    case, model = small_case(machine), small_model(machine)
    config = run_config(case, ranks_timeout_seconds=WAIT_SECONDS)
    rows = make_rows(case, model.config.vocab_size)
    plain = gradients_of(make_trainer(case, copy.deepcopy(model)), rows)
    for library in ("GLOO", "NCCL"):  # a machine without a network may not know its own name
        os.environ.setdefault(f"{library}_SOCKET_IFNAME", "lo")
    device = join(ProcessRank(), config.learner, HashStore())
    try:
        group = RankGroup(device, threading.Event(), WAIT_SECONDS)

        def divided(weights: Any) -> Trainer:
            policy = Policy(weights, config.learner, device)
            shard(policy, group)
            return Trainer(policy, config)

        expected = make_trainer(case, copy.deepcopy(model)).policy.snapshot("float32")
        trainer = divided(model)
        whole = trainer.policy.snapshot("float32")
        same = whole.keys() == expected.keys() and all(torch.equal(whole[name], t) for name, t in expected.items())
        gradients = gradients_of(trainer, rows)
        facts: Facts = {"laid": form_of(trainer), "gradient_distance": distance(gradients, plain)}
        yield "FSDP2, one rank", facts | {"snapshot_equals_weights": same, "weights": len(whole)}
        with tempfile.TemporaryDirectory() as scratch:
            root = Path(scratch)
            path = save_checkpoint(root, trainer, CheckpointState(trainer.updates, 0, {}), root, keep=1)
            resumed = divided(ModelFolder(path / "model").read(device))
            restore_training(path, resumed)
        steps = [one.step(Batch(one.updates, (), rows), policy_version=0) for one in (trainer, resumed)]
        after = [one.policy.snapshot("float32") for one in (trainer, resumed)]
        facts = {"loss_difference": abs(steps[0].loss - steps[1].loss)}
        yield "resumed from its checkpoint", facts | {"weight_distance_after_a_step": distance(after[1], after[0])}
    finally:
        leave()
