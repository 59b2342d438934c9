"""The sides of ``benchmarks.learner_step``: one process trains the same rows for some steps in one way, and prints what
it measured as a line of JSON.

* ``learner``: :class:`learner.training.trainer.Trainer` as a run file without ``learner.packing`` has it;
  ``learner_padded``, ``learner_packed`` and ``learner_shared`` lay the rows out in one way.
* ``bare``: what a short script does with transformers: padded micro-batches of rows of similar length, autocast forward
  with labels, backward, gradient clipping, AdamW. ``bare_rows``: the same one row at a time, so no padding at all.
  ``bare_selecting``: as ``bare``, and only positions with a label pass the output layer.
* ``trl``: ``GRPOTrainer.train`` of TRL with its generation replaced by these rows.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from benchmarks.learner_step.case import Case, make_rows
from benchmarks.learner_step.trl import trl_train
from learner.data.microbatch import Form, plan_microbatches
from learner.data.rows import Batch, Row
from learner.models.model_folder import ModelFolder
from learner.policy.policy import Policy
from learner.training.report import StepReport
from learner.training.trainer import Trainer
from pipeline.config import RunConfig

LEARNER: dict[str, dict[str, Any]] = {
    "learner": {},
    "learner_padded": {"packing": "padded"},
    "learner_packed": {"packing": "packed"},
    "learner_shared": {"packing": "packed"},
}
BARE = ("bare", "bare_rows", "bare_selecting")
SIDES = (*LEARNER, *BARE, "trl")


@dataclass(frozen=True, slots=True)
class Measured:
    side: str
    seconds: float
    """Median of a step."""
    cpu_seconds: float
    """Median of a step, all threads: what a busy machine changes less."""
    peak_mib: float
    """During the timed steps, weights and optimizer included: resident memory, or memory of the GPU."""
    tokens: int
    """Tokens of the rows, with prompts and without padding."""
    sampled: int
    stages: dict[str, float]
    """Seconds of the learner's last step by stage."""


def run_config(case: Case, **learner: Any) -> RunConfig:
    options = {
        "device": case.device,
        "compute_dtype": case.compute_dtype,
        "learning_rate": 1e-6,
        "tokens_per_microbatch": case.tokens_per_microbatch,
        "gradient_checkpointing": case.checkpointing,
    }
    return RunConfig.model_validate({"run": {"total_steps": 1000}, "learner": {**options, **learner}})


def make_trainer(case: Case, model: Any, **learner: Any) -> Trainer:
    config = run_config(case, **learner)
    return Trainer(Policy(model, config.learner, torch.device(case.device)), config)


def learner_steps(trainer: Trainer, rows: Sequence[Row], reports: list[StepReport]) -> Iterator[None]:
    while True:
        reports.append(trainer.step(Batch(trainer.updates, (), tuple(rows)), policy_version=0))
        yield


def bare_steps(case: Case, side: str, model: Any, rows: Sequence[Row]) -> Iterator[None]:
    model = model.to(case.device).train()
    if case.checkpointing:
        model.gradient_checkpointing_enable()
    fused = case.device == "cuda" or None  # the default there holds a copy of the gradients besides
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6, weight_decay=0.0, fused=fused)
    budget = 1 if side == "bare_rows" else case.tokens_per_microbatch
    while True:
        for chosen in plan_microbatches([len(row) for row in rows], budget):
            ids, labels, attention = (torch.from_numpy(a).to(case.device) for a in _padded([rows[i] for i in chosen]))
            inputs = {"input_ids": ids, "use_cache": False} | (
                {} if len(chosen) == 1 else {"attention_mask": attention}
            )
            with torch.autocast(case.device, torch.bfloat16, enabled=case.compute_dtype == "bfloat16"):
                if side == "bare_selecting":
                    hidden = model.base_model(**inputs).last_hidden_state
                    labelled = labels[:, 1:] != -100
                    logits = model.lm_head(hidden[:, :-1][labelled])
                    loss = torch.nn.functional.cross_entropy(logits.float(), labels[:, 1:][labelled])
                else:
                    loss = model(**inputs, labels=labels).loss
            loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        yield


def _padded(rows: list[Row]) -> tuple[npt.NDArray[np.int64], ...]:
    """Token ids, labels (-100 where not sampled) and attention mask, ``[rows, longest]``."""
    width = max(len(row) for row in rows)
    ids, attention = np.zeros((len(rows), width), np.int64), np.zeros((len(rows), width), np.int64)
    labels = np.full((len(rows), width), -100, np.int64)
    for b, row in enumerate(rows):
        ids[b, : len(row)], attention[b, : len(row)] = row.token_ids, 1
        labels[b, : len(row)] = np.where(row.loss_mask, row.token_ids, -100)
    return ids, labels, attention


class Clock:
    """Wall and processor seconds of steps, and the peak of memory since the first one ended."""

    def __init__(self, device: str) -> None:
        self._cuda = device == "cuda"
        self.wall: list[float] = []
        self.cpu: list[float] = []

    def start(self) -> None:
        if self._cuda:
            torch.cuda.synchronize()
        self._from = time.perf_counter(), time.process_time()

    def stop(self) -> None:
        if self._cuda:
            torch.cuda.synchronize()
        self.wall.append(time.perf_counter() - self._from[0])
        self.cpu.append(time.process_time() - self._from[1])
        if len(self.wall) == 1:
            self._forget_peak()

    def peak_mib(self) -> float:
        if self._cuda:
            return torch.cuda.max_memory_allocated() / 2**20
        try:
            lines = Path("/proc/self/status").read_text().splitlines()
            return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) / 1024
        except (OSError, StopIteration):
            return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024

    def _forget_peak(self) -> None:
        if self._cuda:
            torch.cuda.reset_peak_memory_stats()
            return
        try:
            Path("/proc/self/clear_refs").write_text("5")
        except OSError:
            print("the peak of memory counts loading too: this system does not let it be reset", flush=True)


def timed(steps: Iterator[None], count: int, device: str) -> Clock:
    """The clock of ``count`` steps after a first one."""
    clock = Clock(device)
    for _ in range(count + 1):
        clock.start()
        next(steps)
        clock.stop()
    return clock


def _model(case: Case) -> Any:
    return ModelFolder(Path(case.model)).read(torch.device(case.device))


def measure(case: Case, side: str, directory: Path) -> Measured:
    torch.set_num_threads(case.threads)
    reports: list[StepReport] = []
    rows = make_rows(case, json.loads((Path(case.model) / "config.json").read_text())["vocab_size"])
    if side == "trl":
        clock = Clock(case.device)
        trl_train(case, clock.start, clock.stop, directory)
    elif side in LEARNER:
        trainer = make_trainer(case, _model(case), **LEARNER[side])
        if side == "learner_packed":
            trainer.policy.form = Form(packed=True)  # without sharing prefixes
        clock = timed(learner_steps(trainer, rows, reports), case.steps, case.device)
    else:
        clock = timed(bare_steps(case, side, _model(case), rows), case.steps, case.device)
    stages = reports[-1].seconds if reports else {}
    return Measured(
        side=side,
        seconds=statistics.median(clock.wall[1:]),
        cpu_seconds=statistics.median(clock.cpu[1:]),
        peak_mib=clock.peak_mib(),
        tokens=sum(len(row) for row in rows),
        sampled=sum(row.n_sampled for row in rows),
        stages={name: round(value, 4) for name, value in stages.items()},
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("side", choices=SIDES)
    parser.add_argument("case", help="JSON of Case")
    parser.add_argument("--directory", type=Path, default=Path("runs/learner_step"))
    arguments = parser.parse_args()
    measured = measure(Case(**json.loads(arguments.case)), arguments.side, arguments.directory)
    print("MEASURED " + json.dumps(asdict(measured)), flush=True)


if __name__ == "__main__":
    main()
