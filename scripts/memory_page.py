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

from learner.policy.memory import GIB, MARGIN, Footprint, engine_bytes, footprint, learner_memory  # noqa: E402
from pipeline.config import RunConfig  # noqa: E402
from pipeline.config.load import loads  # noqa: E402
from scripts.tables import update_tables  # noqa: E402

PAGE = ROOT / "docs" / "MEMORY.md"


def shape(layers: int, hidden: int, inner: int, heads: int, kv_heads: int, **others: object) -> dict[str, object]:
    """The part of a ``config.json`` that decides the size of a Qwen model."""
    return {
        "model_type": "qwen3", "num_hidden_layers": layers, "hidden_size": hidden, "intermediate_size": inner,
        "num_attention_heads": heads, "num_key_value_heads": kv_heads, "head_dim": 128, "vocab_size": 151_936,
        "tie_word_embeddings": False, **others,
    }  # fmt: skip


EXPERTS = {"model_type": "qwen3_moe", "num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768}
CONFIGS = {
    "Qwen3-0.6B": shape(28, 1024, 3072, 16, 8, tie_word_embeddings=True),
    "Qwen3-1.7B": shape(28, 2048, 6144, 16, 8, tie_word_embeddings=True),
    "Qwen3-4B": shape(36, 2560, 9728, 32, 8, tie_word_embeddings=True),
    "Qwen2.5-7B": shape(28, 3584, 18944, 28, 4, model_type="qwen2", vocab_size=152_064),
    "Qwen3-8B": shape(36, 4096, 12288, 32, 8),
    "Qwen3-14B": shape(40, 5120, 17408, 40, 8),
    "Qwen3-32B": shape(64, 5120, 25600, 64, 8),
    "Qwen3-30B-A3B": shape(48, 2048, 6144, 32, 4, **EXPERTS),
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
SMALL = "  optimizer_dtype: bfloat16\n"
CASES = (
    ("Qwen2.5-7B", 1, LORA), ("Qwen2.5-7B", 2, ""), ("Qwen2.5-7B", 2, SMALL), ("Qwen3-32B", 8, ""),
    ("Qwen3-32B", 8, SMALL), ("Qwen3-32B", 16, ""), ("Qwen3-30B-A3B", 8, ""), ("Qwen3-30B-A3B", 8, SMALL),
)  # fmt: skip
"""Model, GPUs of 80 GiB, and what is set."""


def config_of(extra: str) -> RunConfig:
    return loads(TABLE + extra, environment={})


def traced(name: str, extra: str) -> Footprint:
    config = config_of(extra)
    lora = config.learner.lora if config.learner.lora.rank else None
    return footprint(CONFIGS[name], config.model.max_length, lora)


def gpus_needed(name: str, extra: str, gib: int) -> str:
    """Smallest number of ranks with which the learner fits."""
    model, config, room = traced(name, extra), config_of(extra), gib * GIB * (1 - MARGIN)
    fitting = (ranks for ranks in RANKS if learner_memory(model, config, ranks).total <= room)
    return str(next(fitting, "–"))


def learner() -> Iterator[str]:
    gpus = " | ".join(f"{gib} GiB" for gib in GPUS)
    yield f"| model | weights | one GPU, full | one GPU, LoRA | {gpus} |"
    yield "|---" * (4 + len(GPUS)) + "|"
    for name in CONFIGS:
        alone = [f"{learner_memory(traced(name, x), config_of(x)).total / GIB:,.0f} GiB" for x in (FULL, LORA)]
        needed = [f"{gpus_needed(name, FULL, gib)} / {gpus_needed(name, LORA, gib)}" for gib in GPUS]
        yield f"| {name} | {traced(name, FULL).weights / 1e9:.1f} B | {' | '.join((*alone, *needed))} |"


def cases() -> Iterator[str]:
    yield "| model, GPUs of 80 GiB | set besides | states | copies | activations | logits | sum, GiB | fits |"
    yield "|---|---|---|---|---|---|---|---|"
    for name, ranks, extra in CASES:
        memory = learner_memory(traced(name, extra), config_of(extra), ranks)
        parts = " | ".join(f"{value / GIB:.1f}" for value in memory.parts.values())
        fits = "yes" if memory.total <= 80 * GIB * (1 - MARGIN) else "no"
        keys = f"`{extra.strip()}`" if extra else "–"
        yield f"| {name}, {ranks} | {keys} | {parts} | {memory.total / GIB:.1f} | {fits} |"


def engine() -> Iterator[str]:
    gpus = " / ".join(map(str, GPUS))
    yield f"| model | without cache | cache for 1,000 tokens | 64 rollouts of 4,096 tokens | GPUs of {gpus} GiB |"
    yield "|---|---|---|---|---|"
    for name in CONFIGS:
        model = traced(name, FULL)
        needed = []
        for gib in GPUS:
            room = gib * GIB * (1 - MARGIN)
            sizes = (n for n in ENGINE_RANKS if engine_bytes(model, n) + 64 * model.cache_bytes(4096, n) <= room)
            needed.append(str(next(sizes, "–")))
        yield (
            f"| {name} | {engine_bytes(model) / GIB:,.1f} GiB | {model.cache_bytes(1000) / GIB:.2f} GiB "
            f"| {64 * model.cache_bytes(4096) / GIB:.0f} GiB | {' / '.join(needed)} |"
        )


def main(*arguments: str) -> int:
    tables = {"learner": learner(), "cases": cases(), "engine": engine()}
    return update_tables(PAGE, tables, check="--check" in arguments)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
