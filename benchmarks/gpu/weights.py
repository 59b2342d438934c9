"""Seconds that weights take: copied to host memory, written, read back by an engine; models moved to the host for the
engine's turn on the device, and back."""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors.torch import load_file

from benchmarks.gpu.bench import Bench
from benchmarks.gpu.report import Facts
from benchmarks.gpu.steps import groups_case
from benchmarks.learner_step.case import make_rows
from benchmarks.learner_step.model import make_model
from benchmarks.learner_step.sides import make_trainer
from learner.data.rows import Batch
from learner.process.device_turn import Offload
from learner.weights.publisher import write_weights


def publication(bench: Bench, shape: str) -> Iterator[tuple[str, Facts]]:
    """The way of a version to an engine on the same machine, over a folder."""
    case = groups_case(bench, shape)
    trainer = make_trainer(case, make_model(case.model, bench.device))
    policy = trainer.policy
    seconds = bench.clock(lambda: policy.snapshot("bfloat16"), 2)
    copies = policy.snapshot("bfloat16")
    size = sum(tensor.nbytes for tensor in copies.values())
    yield f"{shape} snapshot", {"gib": size / 2**30, "seconds": seconds, "gb_per_second": size / seconds / 1e9}
    scratch = Path(tempfile.mkdtemp())
    try:
        start = time.perf_counter()
        write_weights(policy.model, scratch / "v", copies)
        written = time.perf_counter() - start
        start = time.perf_counter()
        read = [tensor for file in sorted((scratch / "v").glob("*.safetensors")) for tensor in load_file(file).items()]
        loaded = time.perf_counter() - start
    finally:
        shutil.rmtree(scratch)
    yield f"{shape} folder", {"write_seconds": written, "read_seconds": loaded}
    live = policy.model.state_dict()
    up = bench.clock(lambda: [live[name].copy_(tensor) for name, tensor in read], 2)
    facts: Facts = {"seconds": up, "gb_per_second": size / up / 1e9}
    yield f"{shape} upload", facts | {"equal": all(torch.equal(live[n].cpu().bfloat16(), t) for n, t in copies.items())}


def turns(bench: Bench, shape: str) -> Iterator[tuple[str, Facts]]:
    """A learner that gives the device to an engine and takes it back, with the states of its optimizer."""
    case = groups_case(bench, shape)
    trainer = make_trainer(case, make_model(case.model, bench.device))
    rows = make_rows(case, trainer.policy.model.config.vocab_size)
    trainer.step(Batch(trainer.updates, (), rows), policy_version=0)
    offload, seconds, left = Offload(trainer), {}, 0.0
    start = time.perf_counter()
    size = offload.to_host()
    seconds["to_host_seconds"] = time.perf_counter() - start
    if bench.cuda:
        left = torch.cuda.memory_reserved() / 2**30
    start = time.perf_counter()
    offload.to_device()
    bench.synchronize()
    seconds["to_device_seconds"] = time.perf_counter() - start
    report = trainer.step(Batch(trainer.updates, (), rows), policy_version=0)
    facts: Facts = {"gib": size / 2**30, **seconds, "left_on_device_gib": left}
    yield f"{shape} offload", facts | {"trains_on": report.skipped is None}
