"""One rank of ``test_ranks.py``: runs the cases of a file; rank 0 writes what it found beside it."""

from __future__ import annotations

import sys
import threading
from pathlib import Path

import numpy as np
import orjson
import torch
from safetensors.torch import save_file

from learner.making import make_trainer
from learner.ranks.group import RankGroup
from learner.ranks.joining import join, leave, place_of
from learner.ranks.orders import follow
from learner.rows import Batch
from learner.trainer import Trainer
from tests.unit.learner.conftest import make_rows, run_config


def config_of(case):
    return run_config({"tokens_per_microbatch": 40, "ranks_timeout_seconds": 60, **case.get("learner", {})},
                      **case.get("sections", {}))  # fmt: skip


def rows_of(case, update):
    rows = make_rows(case.get("rows", 9), seed=update, replayed=[i % 3 == 0 for i in range(case.get("rows", 9))])
    for i in case.get("without_signal", []):
        rows[i].advantages[:] = 0
    return rows


def train(trainer: Trainer, case, updates) -> dict:
    """Reports of the updates, as JSON."""
    found = []
    for update in updates:
        rows = rows_of(case, update)
        evidence = trainer.gather(rows)
        if evidence.values is not None:
            from dataclasses import replace

            evidence = replace(evidence, returns=np.sin(np.arange(len(evidence.values))).astype(np.float32))
        report = trainer.step(Batch(update, (), rows), policy_version=update, evidence=evidence)
        s = report.statistics
        found.append({
            "loss": report.loss, "grad_norm": report.grad_norm, "entropy": s.all.entropy.value,
            "tokens": s.all.tokens, "ratio": s.all.ratio.mean, "steps": report.optimizer_steps,
            "nonfinite": report.nonfinite, "kl": report.kl_loss, "guard": report.guard_lr_factor,
            "critic": None if report.critic is None else report.critic.loss,
            "critic_norm": None if report.critic is None else report.critic.grad_norm,
        })  # fmt: skip
    return {"updates": found}


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    config = run_config({"ranks_timeout_seconds": 60})
    place = place_of(config.learner)
    device = join(place, config.learner) if place.size > 1 else None
    for name, case in orjson.loads((folder / "cases.json").read_bytes()).items():
        group = None if device is None else RankGroup(device, threading.Event(), 60.0)
        torch.manual_seed(0)
        trainer = make_trainer(config_of(case), folder / "model", None, group)
        if place.rank:
            follow(trainer, group, lambda updates: None)
            continue
        found = train(trainer, case, range(case.get("updates", 3)))
        weights = trainer.policy.snapshot("float32")
        if group is not None:
            group.end()
        out = folder / f"ranks{place.size}"
        out.mkdir(exist_ok=True)
        save_file(weights, out / f"{name}.safetensors")
        (out / f"{name}.json").write_bytes(orjson.dumps(found))
    leave()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
