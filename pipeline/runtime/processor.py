"""Instructions of this machine's processor, read without PyTorch."""

from __future__ import annotations

import functools
import os
import platform
from pathlib import Path
from typing import Literal

CPUINFO = Path("/proc/cpuinfo")
_BFLOAT16 = frozenset({"avx512_bf16", "amx_bf16", "bf16"})
"""Names of x86 and ARM for arithmetic with bfloat16."""


@functools.cache
def processor_flags() -> frozenset[str]:
    """Names that the kernel gives to the processor's instructions; none on systems without ``/proc/cpuinfo``."""
    try:
        lines = CPUINFO.read_text().splitlines()
    except OSError:
        return frozenset()
    found = (line.partition(":")[2].split() for line in lines if line.startswith(("flags", "Features")))
    return frozenset(next(found, ()))


def cores() -> int:
    """Cores that this process may use; all of the machine where the system cannot be asked (macOS)."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def is_x86() -> bool:
    return platform.machine() in ("x86_64", "AMD64")


def fast_dtype() -> Literal["bfloat16", "float32"]:
    """``bfloat16`` on a processor with instructions for it, else ``float32``, which is several times faster there.

    PyTorch and vLLM compute in bfloat16 on every processor. Without such instructions a matrix product takes 2 to 10
    times as long as in float32 (``docs/RESULTS.md``).
    """
    return "bfloat16" if processor_flags() & _BFLOAT16 else "float32"
