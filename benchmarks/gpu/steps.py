"""One step of the learner against the bare Hugging Face step on the same rows, and the kernels that it spends time in.

MFU is the share of the measured rate of a large bfloat16 product (part ``chip``). Tokens are those of the rows without
padding; a shared prompt counts for each row.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from benchmarks.gpu.bench import Bench
from benchmarks.gpu.layouts import form_of
from benchmarks.gpu.report import Facts
from benchmarks.learner_step.case import Case, make_rows
from benchmarks.learner_step.model import make_model, step_flops
from benchmarks.learner_step.sides import LEARNER, Clock, bare_steps, learner_steps, make_trainer, timed
from learner.data.rows import Batch, Row
from learner.training.report import StepReport

LARGE = {"optimizer_dtype": "bfloat16"}
"""Setting with which 7B and all its states fit into 140 GB."""


def groups_case(bench: Bench, shape: str) -> Case:
    """Groups of rollouts of one prompt, with a long tail; in full 64 rows of up to 4,096 tokens."""
    if bench.small:
        return Case(model="tiny", groups=2, rollouts=4, prompt=40, response=30, longest=128, steps=1,
                    tokens_per_microbatch=512, compute_dtype="bfloat16", device=bench.device, threads=0,
                    checkpointing=False)  # fmt: skip
    return Case(model=shape, groups=8, rollouts=8, prompt=400, response=800, longest=4096, steps=2,
                tokens_per_microbatch=16_384, compute_dtype="bfloat16", device=bench.device, threads=0,
                checkpointing=shape == "7b")  # fmt: skip


def learner(bench: Bench, shape: str, side: str = "learner", **options: Any) -> Iterator[tuple[str, Facts]]:
    case = groups_case(bench, shape)
    options = {**(LARGE if shape == "7b" else {}), **LEARNER[side], **options}
    yield f"{shape} {side}", learner_facts(bench, case, options)


def bare(bench: Bench, shape: str, side: str = "bare_selecting") -> Iterator[tuple[str, Facts]]:
    """A short script with transformers. ``bare_selecting`` is the fastest: only labelled positions pass the output
    layer."""
    case = groups_case(bench, shape)
    model = make_model(case.model, bench.device)
    rows = make_rows(case, model.config.vocab_size)
    clock = timed(bare_steps(case, side, model, rows), case.steps, case.device)
    yield f"{shape} {side}", step_facts(bench, clock, rows, model.config)


def long_rows(bench: Bench) -> Iterator[tuple[str, Facts]]:
    """Four rows of 16,384 tokens on Qwen3-0.6B, one a micro-batch, with recomputation. prime-rl publishes 11,900
    tokens/s, 1.38 s a micro-batch and 12.5 GiB for this length, model and method on one H100 (its
    ``benchmarks/results/BENCHMARKS.md``, 16 January 2026). Its time may leave out what ours counts, and the chip may
    be another: an order of magnitude, not a race."""
    case = groups_case(bench, "0.6b")
    if not bench.small:
        case = replace(case, groups=4, rollouts=1, prompt=64, response=10**9, longest=16_384, checkpointing=True)
    yield "0.6b at 16,384 tokens", learner_facts(bench, case, {}) | {"prime_rl_tokens_per_second_h100": 11_900}


def kernels(bench: Bench, shape: str) -> Iterator[tuple[str, Facts]]:
    """Shares of the GPU's time in one step by kind of kernel, and the longest kernels."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    case = groups_case(bench, shape)
    model = make_model(case.model, bench.device)
    trainer = make_trainer(case, model)
    rows = make_rows(case, model.config.vocab_size)
    trainer.step(Batch(trainer.updates, (), rows), policy_version=0)
    activities = [ProfilerActivity.CUDA if bench.cuda else ProfilerActivity.CPU]
    with profile(activities=activities) as profiler:
        trainer.step(Batch(trainer.updates, (), rows), policy_version=0)
        bench.synchronize()
    seconds = {
        event.key: (event.self_device_time_total if bench.cuda else event.self_cpu_time_total) / 1e6
        for event in profiler.key_averages()
        if not bench.cuda or event.device_type == torch.autograd.DeviceType.CUDA
    }
    total = sum(seconds.values()) or 1.0
    kinds = {
        "product": ("gemm", "cutlass", "nvjet", "xmma", "::mm", "addmm", "::bmm"),
        "attention": ("flash", "attn", "attention"),
    }
    shares: dict[str, float] = dict.fromkeys((*kinds, "other"), 0.0)
    for name, spent in seconds.items():
        kind = next((k for k, words in kinds.items() if any(w in name.lower() for w in words)), "other")
        shares[kind] += spent / total
    longest = sorted(seconds.items(), key=lambda item: -item[1])[:12]
    yield f"{shape} learner", {"busy_seconds": total, "shares": shares}
    yield f"{shape} longest kernels", {name[:60]: spent for name, spent in longest}


def learner_facts(bench: Bench, case: Case, options: dict[str, Any]) -> Facts:
    trainer = make_trainer(case, make_model(case.model, bench.device), **options)
    config = trainer.policy.model.config
    rows = make_rows(case, config.vocab_size)
    reports: list[StepReport] = []
    clock = timed(learner_steps(trainer, rows, reports), case.steps, case.device)
    last = reports[-1]
    skipped = {} if last.skipped is None else {"skipped_steps": len(last.skipped.steps)}
    return step_facts(bench, clock, rows, config) | {
        "laid": form_of(trainer),
        "microbatches": last.n_microbatches,
        "stages": {name: round(spent, 3) for name, spent in last.seconds.items() if spent > 0.001},
        **skipped,
    }


def step_facts(bench: Bench, clock: Clock, rows: tuple[Row, ...], config: Any) -> Facts:
    seconds = statistics.median(clock.wall[1:])
    tokens = sum(len(row) for row in rows)
    facts: Facts = {"seconds": seconds, "tokens": tokens, "tokens_per_second": tokens / seconds}
    if bench.matmul_flops is not None:
        facts["mfu"] = step_flops(config, rows) / seconds / bench.matmul_flops
    return facts | {"peak_gib": clock.peak_mib() / 1024}
