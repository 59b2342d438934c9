"""The learner on one model: memory predicted and measured, MFU, speed against the bare step, kernels, publication.

MFU is the share of the measured rate of a large bfloat16 product. Recomputation, padding and output-layer positions
without a sampled token do not count as work; a shared prompt counts for each row, as do its tokens.
"""

from __future__ import annotations

import gc
import os
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch.profiler import ProfilerActivity, profile
from transformers import AttentionInterface

from benchmarks.gpu.case import Facts, Machine, attempt
from benchmarks.learner_step.case import Case, make_rows
from benchmarks.learner_step.model import make_config, make_model, step_flops
from benchmarks.learner_step.sides import Clock, bare_steps, learner_steps, make_trainer, run_config, timed
from learner.data.microbatch import PassCost
from learner.data.rows import Batch, Row
from learner.policy.attention import NAME, packed_attention
from learner.policy.logprobs import TILE
from learner.policy.lora import Adapters
from learner.policy.memory import GIB, MARGIN, footprint, learner_memory
from learner.policy.policy import DTYPES, pass_cost
from learner.training.report import StepReport
from learner.training.trainer import Trainer
from learner.weights.publisher import write_weights
from pipeline.config import RunConfig

SMALL_ROWS = {"groups": 2, "rollouts": 4, "prompt": 40, "response": 30, "longest": 128}
KINDS = {
    "product": ("gemm", "cutlass", "nvjet", "xmma", "::mm", "addmm", "::bmm"),
    "attention": ("flash", "attn", "attention"),
}
"""Parts of the names of kernels."""


def study(
    machine: Machine,
    shape: str,
    rows: dict[str, int],
    settings: dict[str, Any],
    checkpointing: bool = False,
    if_fits: bool = False,
    compiled: bool = False,
) -> Iterator[tuple[str, Facts]]:
    """``settings``: of the section ``learner``. ``if_fits``: not run where the predicted memory is more than there is.
    ``compiled``: the decoder layers by ``torch.compile``; the learner's step alone."""
    if machine.small:
        shape, rows = "tiny-moe" if shape == "moe" else "tiny", SMALL_ROWS
    case = Case(model=shape, **rows, steps=1 if machine.small else 2, tokens_per_microbatch=rows["longest"],
                compute_dtype="bfloat16", device=machine.device, threads=0, checkpointing=checkpointing)  # fmt: skip
    config = run_config(case, **settings).updated(model={"max_length": case.longest})
    memory = memory_bytes(machine)
    predicted = learner_memory(
        footprint(
            make_config(shape).to_dict(), case.longest, config.learner.lora if config.learner.lora.rank else None
        ),
        config,
        tile=TILE[machine.device],
    )
    yield "predicted", {"gib": predicted.total / GIB, **{part: n / GIB for part, n in predicted.parts.items()}}
    if if_fits and predicted.total > memory * (1 - MARGIN):
        yield "skipped", {"needs_gib": predicted.total / GIB, "has_gib": memory / GIB, "left_free": MARGIN}
        return
    flops = product_flops(machine)
    yield "chip", {"product_tflops": flops / 1e12, "memory_gib": memory / GIB}
    data = make_rows(case, make_config(shape).vocab_size)
    yield from learner(machine, case, data, settings, flops, compiled=compiled)
    gc.collect()
    torch.cuda.empty_cache()
    if not compiled:
        yield attempt("bare", lambda: bare(case, config, data, flops))


def learner(
    machine: Machine, case: Case, data: tuple[Row, ...], settings: dict[str, Any], flops: float, *, compiled: bool
) -> Iterator[tuple[str, Facts]]:
    """``flops``: of a large product."""
    trainer = make_trainer(case, make_model(case.model, machine.device), **settings)
    if compiled:
        if (
            not machine.cuda
        ):  # one call a row: past ``recompile_limit`` shapes a layer would be computed again otherwise
            AttentionInterface.register(NAME, torch.compiler.disable(packed_attention))
        for layer in trainer.policy.layers:
            layer.compile(backend="inductor" if machine.cuda else "eager", dynamic=True)
    reports: list[StepReport] = []
    clock = timed(learner_steps(trainer, data, reports), case.steps, machine.device)
    yield (
        "learner",
        step_facts(clock, data, trainer.policy.form.cost, flops)
        | {
            "form": reports[-1].form.name,
            "micro_batches": reports[-1].n_microbatches,
            "stages": {name: round(seconds, 3) for name, seconds in reports[-1].seconds.items() if seconds > 0.001},
            "skipped_steps": sum(any(report.nonfinite.values()) for report in reports),
        },
    )
    if not compiled:
        yield attempt("publication", lambda: publication(trainer))
        yield attempt("kernels", lambda: kernels(machine, trainer, data))


def memory_bytes(machine: Machine) -> int:
    if machine.cuda:
        return int(torch.cuda.get_device_properties(0).total_memory)
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def product_flops(machine: Machine) -> float:
    """Operations per second of a large bfloat16 product."""
    n = 256 if machine.small else 8192
    a, b = (torch.randn(n, n, device=machine.device, dtype=torch.bfloat16) for _ in range(2))

    def products() -> Iterator[None]:
        while True:
            for _ in range(10):
                a @ b
            yield

    return 10 * 2 * n**3 / statistics.median(timed(products(), 3, machine.device).wall[1:])


def step_facts(clock: Clock, rows: Sequence[Row], cost: PassCost, flops: float) -> Facts:
    seconds = statistics.median(clock.wall[1:])
    tokens = sum(len(row) for row in rows)
    return {
        "gib": clock.peak_mib() / 1024,
        "mfu": step_flops(cost, rows) / flops / seconds,
        "tokens_per_second": tokens / seconds,
        "tokens": tokens,
        "seconds": seconds,
        "first_seconds": clock.wall[0],
    }


def publication(trainer: Trainer) -> Facts:
    """The way of a version to an engine on the same machine, over a folder, but for the upload."""
    start = time.perf_counter()
    copies = trainer.policy.snapshot("bfloat16")
    copied = time.perf_counter()
    with tempfile.TemporaryDirectory() as scratch:
        size = write_weights(trainer.policy.model, Path(scratch) / "v", copies)
        written = time.perf_counter()
        read = {name: t for file in (Path(scratch) / "v").glob("*.safetensors") for name, t in load_file(file).items()}
        seconds = {"copy_seconds": copied - start, "write_seconds": written - copied,
                   "read_seconds": time.perf_counter() - written}  # fmt: skip
    equal = copies.keys() == read.keys() and all(torch.equal(read[name], t) for name, t in copies.items())
    return {"gib": size / GIB, **seconds, "equal": equal}


def kernels(machine: Machine, trainer: Trainer, rows: tuple[Row, ...]) -> Facts:
    """Shares of the device's time in one step by kind of kernel, and the longest kernels."""
    with profile(activities=[ProfilerActivity.CUDA if machine.cuda else ProfilerActivity.CPU]) as profiler:
        trainer.step(Batch(trainer.updates, (), rows), policy_version=0)
        if machine.cuda:
            torch.cuda.synchronize()
    seconds = {
        event.key: (event.self_device_time_total if machine.cuda else event.self_cpu_time_total) / 1e6
        for event in profiler.key_averages()
        if not machine.cuda or event.device_type == torch.autograd.DeviceType.CUDA
    }
    total = sum(seconds.values()) or 1.0
    shares = dict.fromkeys((*KINDS, "other"), 0.0)
    for name, spent in seconds.items():
        kind = next((kind for kind, words in KINDS.items() if any(word in name.lower() for word in words)), "other")
        shares[kind] += spent / total
    longest = sorted(seconds.items(), key=lambda item: -item[1])[:12]
    return {"busy_seconds": total, "shares": shares, "longest": {name[:60]: spent for name, spent in longest}}


def bare(case: Case, config: RunConfig, rows: tuple[Row, ...], flops: float) -> Facts:
    """A short script with transformers, the fastest: only labelled positions pass the output layer. Its AdamW has
    float32 moments; it has the learner's adapters."""
    model, lora = make_model(case.model, case.device), config.learner.lora
    if lora.rank:
        Adapters(model, lora)
        for weight in model.parameters():
            if not weight.requires_grad:
                weight.data = weight.data.to(DTYPES[lora.frozen_dtype])
    clock = timed(bare_steps(case, "bare_selecting", model, rows), case.steps, case.device)
    return step_facts(clock, rows, pass_cost(model), flops)
