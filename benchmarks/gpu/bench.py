"""The device under test, its clock and its memory."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from benchmarks.gpu.report import Facts


@dataclass(slots=True)
class Bench:
    """``small``: shapes that a CPU computes in seconds."""

    device: str
    small: bool
    end: float
    """Monotonic seconds at which the check must be over."""
    matmul_flops: float | None = None
    """Rate of a large bfloat16 product on this device, once measured: what shares are taken of."""

    @property
    def cuda(self) -> bool:
        return self.device == "cuda"

    @property
    def seconds_left(self) -> float:
        return self.end - time.monotonic()

    def clock(self, work: Callable[[], object], repeats: int = 3, warm: int = 1) -> float:
        """Median seconds of ``work``, after ``warm`` calls that do not count."""
        seconds = []
        for _ in range(warm + repeats):
            self.synchronize()
            start = time.perf_counter()
            work()
            self.synchronize()
            seconds.append(time.perf_counter() - start)
        return statistics.median(seconds[warm:])

    def synchronize(self) -> None:
        if self.cuda:
            torch.cuda.synchronize()

    def peak(self) -> Facts:
        """Peak of the GPU's memory since :meth:`clean`."""
        return {"peak_gib": torch.cuda.max_memory_allocated() / 2**30} if self.cuda else {}

    def clean(self) -> None:
        """Free what the part before has left."""
        gc.collect()
        if self.cuda:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
