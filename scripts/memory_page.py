#!/usr/bin/env python3
"""Writes docs/MEMORY.md: the estimate of `afterplay plan` for models and GPUs.

.venv/bin/python scripts/memory_page.py          writes the page
.venv/bin/python scripts/memory_page.py --check  only compares, exit code 1 when the page is not current
"""

import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from learner.models.memory import ENGINE_WORK_BYTES, GIB, MARGIN, Shape, engine_bytes, learner_memory  # noqa: E402
from pipeline.config import RunConfig  # noqa: E402
from pipeline.config.load import loads  # noqa: E402

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
RANKS = (1, 2, 4, 8, 16)
TABLE = """
environments: {any: {name: arithmetic}}
model: {max_length: 8192}
learner:
  tokens_per_microbatch: 8192
  logits_tokens_max: 2048
  gradient_checkpointing: true
"""
FULL, LORA = "", "  lora: {rank: 16, frozen_dtype: bfloat16}\n"
HEAD = """# Memory

Does the model fit, on how many GPUs, and which key makes it smaller? The tables are made by
`python scripts/memory_page.py` with the estimate that `afterplay plan FILE` prints for a model
whose `config.json` is on the machine (`learner/models/memory.py`).

**It is an estimate.** The shares of activations are tested against what autograd keeps on a CPU; no
number has been compared with a GPU. It is for dense decoders with full attention; for mixtures of
experts nothing is estimated. A GPU counts as full at {used:.0f} % of its memory: CUDA, fragmentation and
buffers of collectives need the rest.

## The learner

Bytes on each of R GPUs, for P weights, T tokens of a micro-batch (`learner.tokens_per_microbatch`,
at least one row), L layers, hidden size H and vocabulary V:

| part | all weights | LoRA |
|---|---|---|
| weights, gradients, moments | 16 P / R | 2 P / R (`frozen_dtype: bfloat16`) or 4 P / R; 16 for each adapter weight |
| copies in bfloat16, one GPU | 2 P | 0; with float32 weights and no checkpointing 2 P |
| gathered from other ranks | two layers in bfloat16, embeddings twice in float32 | two layers, embeddings once |
| activations | T L a | T L a |
| with `gradient_checkpointing` | T (4 L H + a) | the same |
| logits | 10 V × `logits_tokens_max`, 6 T H, and 4 V H | without 4 V H |

a = 26 H + 8 I + 10 Q + 10 K bytes is what one layer keeps of a token: I is the size of the MLP, Q
and K are the sizes of all queries and all keys. Moments take 8 of the 16 bytes; they take 4 with
`optimizer_dtype: bfloat16` and 2 with `optimizer: adamw_8bit`. A reference copy adds 4 P / R (2 P /
R with `reference.dtype: bfloat16`, nothing with LoRA), a critic with its own backbone as much as
the policy.

GPUs that the learner needs, all weights / LoRA of rank 16, for rows of up to 8,192 tokens with
gradient checkpointing, `tokens_per_microbatch: 8192` and `logits_tokens_max: 2048`; "–" is more
than {ranks}:

| model | weights | one GPU, all weights | one GPU, LoRA | {gpus} |
|---|---|---|---|{rules}|
"""
ENGINE = """
## The engine

Bytes on each of its GPUs: 2 P / `placement.tensor_parallel`, {work:.0f} GiB of work memory (assumed), and
a cache of 4 × layers × K bytes for each token of every conversation at once.

| model | without cache | cache for 1,000 tokens | 64 rollouts of 4,096 tokens | GPUs of {gpus} |
|---|---|---|---|---|
"""
TAIL = """
The last column counts weights and cache of these 64 rollouts. A smaller cache works too: requests
wait for room, and `actor.concurrency` bounds them. `engine.gpu_memory_share` is vLLM's share of the
GPU.

## One GPU for both

* **In turns** (`engine.colocate: sleep`, `learner.offload: true`): each needs what its table says,
  and not the sum. While one works, the other's weights are in host memory: 16 P bytes of the
  learner (with LoRA 2 to 4 P), and 2 P of the engine unless `engine.sleep_level: 2`.
* **At the same time** (`engine.colocate: split`): the sum must fit. vLLM takes
  `engine.gpu_memory_share` (0.5), the learner at most the rest less 0.05.

## What to change

| change | saves | costs |
|---|---|---|
| `learner.gradient_checkpointing: true` | most of the activations | a third more computation |
| `learner.tokens_per_microbatch` down, to the longest row | activations, in proportion | speed |
| `learner.logits_tokens_max` down | logits | little |
| `learner.optimizer_dtype: bfloat16` | 4 P / R | moments are rounded |
| `learner.optimizer: adamw_8bit` | 6 P / R; one rank only | needs torchao or bitsandbytes |
| `learner.lora: {rank: 16, frozen_dtype: bfloat16}` | all but 2 P / R of the states | only adapters are trained |
| `learner.ranks` up | states, in proportion | communication |
| `model.max_length` down | activations and cache | longer rollouts are cut |
| `engine.max_sequences`, `actor.concurrency` down | cache | throughput |

`peak_memory_bytes` in `metrics.jsonl` is the peak of a real run. If it runs out of memory, see
[When it fails](TROUBLESHOOTING.md#out-of-memory).
"""


def config_of(extra: str) -> RunConfig:
    return loads(TABLE + extra, environment={})


def gpus_needed(shape: Shape, config: RunConfig, gib: int) -> str:
    """Smallest number of ranks with which the learner fits."""
    room = gib * GIB * (1 - MARGIN)
    fitting = (ranks for ranks in RANKS if learner_memory(shape, config, ranks).total <= room)
    return str(next(fitting, "–"))


def learner_rows() -> Iterator[str]:
    full, lora = config_of(FULL), config_of(LORA)
    for name, shape in SHAPES.items():
        alone = [f"{learner_memory(shape, config).total / GIB:,.0f} GiB" for config in (full, lora)]
        needed = [f"{gpus_needed(shape, full, gib)} / {gpus_needed(shape, lora, gib)}" for gib in GPUS]
        yield f"| {name} | {shape.parameters / 1e9:.1f} B | {' | '.join((*alone, *needed))} |"


def engine_rows() -> Iterator[str]:
    for name, shape in SHAPES.items():
        cache = 64 * 4096 * shape.cache_token_bytes
        needed = []
        for gib in GPUS:
            room = gib * GIB * (1 - MARGIN)
            sizes = (n for n in RANKS[:4] if engine_bytes(shape, n) + cache / n <= room)
            needed.append(str(next(sizes, "–")))
        yield (
            f"| {name} | {engine_bytes(shape) / GIB:,.1f} GiB | {1000 * shape.cache_token_bytes / GIB:.2f} GiB "
            f"| {cache / GIB:.0f} GiB | {' / '.join(needed)} |"
        )


def page() -> str:
    head = HEAD.replace("{used:.0f}", f"{100 * (1 - MARGIN):.0f}").replace("{ranks}", str(RANKS[-1]))
    head = head.replace("{gpus}", " | ".join(f"{gib} GiB" for gib in GPUS)).replace(
        "{rules}", "|".join("---" for _ in GPUS)
    )
    engine = ENGINE.replace("{work:.0f}", f"{ENGINE_WORK_BYTES / GIB:.0f}")
    engine = engine.replace("{gpus}", " / ".join(map(str, GPUS)) + " GiB")
    return head + "\n".join(learner_rows()) + "\n" + engine + "\n".join(engine_rows()) + "\n" + TAIL


def main(*arguments: str) -> int:
    if "--check" in arguments:
        return int(not PAGE.exists() or PAGE.read_text() != page())
    PAGE.write_text(page())
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
