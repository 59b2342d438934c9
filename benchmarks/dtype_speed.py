"""Time of a linear layer of SmolLM2-135M in float32 and bfloat16 on this processor.

::

    python -m benchmarks.dtype_speed --json results.json

``engine.dtype`` and ``learner.compute_dtype`` choose by it: see :func:`pipeline.runtime.processor.fast_dtype`.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

import torch

from pipeline.runtime.processor import fast_dtype

ROWS = (1, 16, 64, 256, 1024)
INPUTS, OUTPUTS = 576, 1536
ROUNDS, ROUND_SECONDS = 5, 0.2


def seconds(rows: int, dtype: torch.dtype) -> float:
    """Median over rounds of the mean time of a call."""
    hidden, weight = torch.randn(rows, INPUTS, dtype=dtype), torch.randn(OUTPUTS, INPUTS, dtype=dtype)
    means = []
    for _ in range(ROUNDS):
        begun, calls = time.perf_counter(), 0
        while time.perf_counter() - begun < ROUND_SECONDS:
            torch.nn.functional.linear(hidden, weight)
            calls += 1
        means.append((time.perf_counter() - begun) / calls)
    return statistics.median(means)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--json", type=Path, help="file to write the numbers to")
    arguments = parser.parse_args()
    found: dict[str, Any] = {
        "capability": torch.backends.cpu.get_cpu_capability(),
        "threads": torch.get_num_threads(),
        "auto": fast_dtype(),
        "rows": {},
    }
    print(f"{found['capability']}, {found['threads']} threads; auto is {found['auto']}")
    print("rows   float32 µs   bfloat16 µs   ratio")
    for rows in ROWS:
        single, half = (1e6 * seconds(rows, dtype) for dtype in (torch.float32, torch.bfloat16))
        found["rows"][rows] = {"float32_us": single, "bfloat16_us": half, "ratio": half / single}
        print(f"{rows:>4} {single:>12.0f} {half:>13.0f} {half / single:>7.1f}")
    if arguments.json:
        arguments.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
