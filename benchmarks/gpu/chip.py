"""Limits of the chip, and the output layer against them. Needs nothing but PyTorch.

Dimensions: S sampled tokens, H hidden size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from benchmarks.gpu.bench import Bench
from benchmarks.gpu.report import Facts
from learner.policy.logprobs import Head, sampled_logprobs


def limits(bench: Bench) -> Iterator[tuple[str, Facts]]:
    """Rate of a bfloat16 product, of a copy within the device's memory, and of copies from and to host memory."""
    n = 256 if bench.small else 8192
    a, b = (torch.randn(n, n, device=bench.device, dtype=torch.bfloat16) for _ in range(2))
    bench.matmul_flops = 2 * n**3 / bench.clock(lambda: a @ b, 10, 3)
    yield f"bfloat16 product of {n}²", {"tflops": bench.matmul_flops / 1e12}
    size = 2**22 if bench.small else 2**32
    source = torch.ones(size // 4, device=bench.device)
    target = torch.empty_like(source)
    yield f"copy of {size >> 20} MiB", {"gb_per_second": 2 * size / bench.clock(lambda: target.copy_(source)) / 1e9}
    yield "read", {"gb_per_second": size / bench.clock(source.sum) / 1e9}
    if bench.cuda:
        part = source[: 2**28]
        for kind in ("pageable", "pinned"):
            host = torch.empty(part.shape, pin_memory=kind == "pinned")
            seconds = [bench.clock(lambda: host.copy_(part)), bench.clock(lambda: part.copy_(host))]  # noqa: B023
            down, up = (part.nbytes / s / 1e9 for s in seconds)
            yield f"1 GiB of {kind} host memory", {"to_host_gb_per_second": down, "to_device_gb_per_second": up}


def head(bench: Bench) -> Iterator[tuple[str, Facts]]:
    """Log-probabilities alone, forward and backward. Limit: the four products, since logits are computed twice."""
    S, V = (256, 512) if bench.small else (16_384, 151_936)
    for H in (64,) if bench.small else (896, 1536, 3584):
        hidden = torch.randn(S, H, device=bench.device, dtype=torch.bfloat16, requires_grad=True)
        weight = (torch.randn(V, H, device=bench.device) * 0.02).requires_grad_()
        targets = torch.randint(0, V, (S,), device=bench.device)

        def both(hidden=hidden, weight=weight, targets=targets) -> None:
            logprobs, _ = sampled_logprobs(hidden, Head(weight), targets, compute_dtype=torch.bfloat16)
            logprobs.sum().backward()
            hidden.grad = weight.grad = None

        bench.clean()
        seconds = bench.clock(both)
        facts: Facts = {"seconds": seconds}
        if bench.matmul_flops is not None:
            facts["share_of_product_limit"] = 8 * S * H * V / bench.matmul_flops / seconds
        yield f"{S} tokens, hidden {H}", facts | bench.peak()
