#!/usr/bin/env python3
"""Writes the tables of docs/MEMORY.md: the estimate of `afterplay plan` for models and GPUs.

.venv/bin/python scripts/memory_page.py          writes the tables
.venv/bin/python scripts/memory_page.py --check  only compares, exit code 1 when the page is not current
"""

import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from learner.models.memory import GIB, MARGIN, Shape, engine_bytes, learner_memory  # noqa: E402
from pipeline.config import RunConfig  # noqa: E402
from pipeline.config.load import loads  # noqa: E402
from scripts.tables import update_tables  # noqa: E402

PAGE = ROOT / "docs" / "MEMORY.md"
SHAPES = {
    "Qwen3-0.6B": Shape(28, 1024, 3072, 16, 8, 128, 151_936, True),
    "Qwen3-1.7B": Shape(28, 2048, 6144, 16, 8, 128, 151_936, True),
    "Qwen3-4B": Shape(36, 2560, 9728, 32, 8, 128, 151_936, True),
    "Qwen3-8B": Shape(36, 4096, 12288, 32, 8, 128, 151_936, False),
    "Qwen3-14B": Shape(40, 5120, 17408, 40, 8, 128, 151_936, False),
    "Qwen3-32B": Shape(64, 5120, 25600, 64, 8, 128, 151_936, False),
}
"""Shapes in the ``config.json`` of the models."""
GPUS = (24, 48, 80, 141)
RANKS = (*range(1, 9), 16)
ENGINE_RANKS = (1, 2, 4, 8)
TABLE = """
environments: {any: {name: arithmetic}}
model: {max_length: 8192}
learner:
  tokens_per_microbatch: 8192
  gradient_checkpointing: true
"""
FULL, LORA = "", "  lora: {rank: 16, frozen_dtype: bfloat16}\n"


def config_of(extra: str) -> RunConfig:
    return loads(TABLE + extra, environment={})


def gpus_needed(shape: Shape, config: RunConfig, gib: int) -> str:
    """Smallest number of ranks with which the learner fits."""
    room = gib * GIB * (1 - MARGIN)
    fitting = (ranks for ranks in RANKS if learner_memory(shape, config, ranks).total <= room)
    return str(next(fitting, "–"))


def learner() -> Iterator[str]:
    full, lora = config_of(FULL), config_of(LORA)
    gpus = " | ".join(f"{gib} GiB" for gib in GPUS)
    yield f"| model | weights | one GPU, full | one GPU, LoRA | {gpus} |"
    yield "|---" * (4 + len(GPUS)) + "|"
    for name, shape in SHAPES.items():
        alone = [f"{learner_memory(shape, config).total / GIB:,.0f} GiB" for config in (full, lora)]
        needed = [f"{gpus_needed(shape, full, gib)} / {gpus_needed(shape, lora, gib)}" for gib in GPUS]
        yield f"| {name} | {shape.parameters / 1e9:.1f} B | {' | '.join((*alone, *needed))} |"


def engine() -> Iterator[str]:
    gpus = " / ".join(map(str, GPUS))
    yield f"| model | without cache | cache for 1,000 tokens | 64 rollouts of 4,096 tokens | GPUs of {gpus} GiB |"
    yield "|---|---|---|---|---|"
    for name, shape in SHAPES.items():
        cache = 64 * 4096 * shape.cache_token_bytes
        needed = []
        for gib in GPUS:
            room = gib * GIB * (1 - MARGIN)
            sizes = (n for n in ENGINE_RANKS if engine_bytes(shape, n) + cache / n <= room)
            needed.append(str(next(sizes, "–")))
        yield (
            f"| {name} | {engine_bytes(shape) / GIB:,.1f} GiB | {1000 * shape.cache_token_bytes / GIB:.2f} GiB "
            f"| {cache / GIB:.0f} GiB | {' / '.join(needed)} |"
        )


def main(*arguments: str) -> int:
    return update_tables(PAGE, {"learner": learner(), "engine": engine()}, check="--check" in arguments)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
