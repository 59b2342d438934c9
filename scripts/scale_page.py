#!/usr/bin/env python3
"""Writes the tables of docs/SCALE.md on a run of 512 GPUs: arithmetic from measured and assumed constants.

.venv/bin/python scripts/scale_page.py          writes the tables
.venv/bin/python scripts/scale_page.py --check  only compares, exit code 1 when the page is not current
"""

import json
import math
import statistics
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from actors.engine.pool import LOAD_SECONDS, PROBE_SECONDS, READ_MAX  # noqa: E402
from actors.process.role import READINGS_MAX  # noqa: E402
from learner.policy.memory import GIB, MARGIN, footprint, learner_memory  # noqa: E402
from learner.weights.fan_out import GROUPS_MAX  # noqa: E402
from pipeline.config.load import loads  # noqa: E402
from pipeline.stage.engine_watch import RELAYED_MAX  # noqa: E402
from scripts.memory_page import shape  # noqa: E402
from scripts.tables import update_tables  # noqa: E402

PAGE = ROOT / "docs" / "SCALE.md"
COSTS = json.loads((ROOT / "benchmarks" / "results" / "cost-of-rooms-2026-11-25.json").read_text())["rounds"]

GPUS, LEARNER, ENGINE = 512, 128, 8
"""GPUs of the run, of the learner, and of an engine."""
ENGINES = (GPUS - LEARNER) // ENGINE
ACTORS = 2000
TRAJECTORIES = 512
"""Of an update."""
TURNS, TOKENS, SAMPLED = 64.3, 27_000, 10_600
"""Of a trajectory: those of benchmarks.routing.conversations.coding."""
LINK, FLOPS, ENGINE_TOKENS, GPU_GIB = 50e9, 400e12, 2000.0, 80
"""Assumed: bytes a second of a GPU's network link, operations a second of a GPU in training, tokens that an engine
samples in a second, memory of a GPU."""
PROBE_REQUESTS = 2
"""/health and /weight_info."""
ROW_BYTES, OUTLINE_BYTES = 25, (1 / 8, 8)
"""Of a token in :class:`learner.data.rows.Row`. Of a token in an outline, which every rank gets of every row, and of a
sampled token in addition."""
CONTEXT_RANKS = 8
STORED_TOKENS = 2000
"""Of a trajectory in the benchmark of the stage."""


@dataclass(frozen=True)
class Model:
    name: str
    weights: float
    active: float
    experts_bytes: int = 0
    """Bytes of a token's experts, with learner.routing_replay."""


DENSE = Model("70B", 70.6e9, 70.6e9)
MIXTURE = Model("235B-A22B", 235.1e9, 22.2e9, 94 * 8)
DENSE_SHAPE = shape(80, 8192, 28672, 64, 8, model_type="llama", vocab_size=128_256)
LENGTHS = (8192, 16_384, 32_768, 65_536, 131_072, 262_144, 524_288)


def measured(benchmark: str, number: str) -> float:
    return statistics.median(one[benchmark]["after"][number] for one in COSTS)


def rollouts_per_second() -> float:
    return ENGINES * ENGINE_TOKENS / SAMPLED


def longest_row(context_ranks: int = 1) -> int:
    """Tokens of the longest row of LENGTHS that fits on ranks of the dense model, divided over ``context_ranks``."""
    fitting = 0
    for tokens in LENGTHS:
        text = (
            f"environments: {{any: {{name: arithmetic}}}}\nmodel: {{max_length: {tokens}}}\n"
            f"learner: {{ranks: {LEARNER}, context_ranks: {context_ranks}, gradient_checkpointing: true, "
            f"tokens_per_microbatch: {tokens // context_ranks}}}\n"
        )
        config = loads(text, environment={})
        memory = learner_memory(footprint(DENSE_SHAPE, tokens, None), config, LEARNER)
        if memory.total <= GPU_GIB * GIB * (1 - MARGIN):
            fitting = tokens
    return fitting


def parts() -> Iterator[str]:
    """Parts of the run that depend on the number of engines and actors."""
    rate, stored = rollouts_per_second(), 1 / measured("replay_stage", "wall, durable ingest")
    turn, send = measured("actor_turns", "CPU, turn, 100 episodes") / 1e6, measured("transport", "CPU, acknowledged")
    load_before, load_now = max(LOAD_SECONDS, ACTORS / READINGS_MAX), max(LOAD_SECONDS, ENGINES / READ_MAX)
    copies = min(GROUPS_MAX, ENGINES)
    probes = PROBE_REQUESTS / PROBE_SECONDS
    weights = 2 * DENSE.weights
    relays = ACTORS / LOAD_SECONDS
    yield "| part | before | now |"
    yield "|---|---|---|"
    yield f"| weights to {ENGINES} engines | {ENGINES * weights / LINK:.0f} s | {copies * weights / LINK:.1f} s |"
    yield f"| probes of an engine | {probes * ACTORS:,.0f}/s | {probes:.0f}/s |"
    yield f"| probes of all engines | {probes * ACTORS * ENGINES:,.0f}/s | {probes * ENGINES:.0f}/s |"
    yield f"| an actor knows the load of an engine as of | {load_before:.0f} s ago | {load_now:.0f} s ago |"
    yield (
        f"| states of engines that the stage sends | none | {relays:,.0f}/s, at most {RELAYED_MAX:,}/s: "
        f"{relays * send / 1e6:.2f} to {RELAYED_MAX * send / 1e6:.2f} cores for both ends |"
    )
    share = rate * TOKENS / STORED_TOKENS / stored
    yield f"| the stage stores {rate:.1f} rollouts/s | {share:.1%} of what it can | the same |"
    cores = rate * TURNS * turn
    yield f"| actors play {rate * TURNS:.0f} turns/s | {cores:.2f} cores of {ACTORS:,} actors | the same |"


def learner() -> Iterator[str]:
    """Needs of the learner, for both models."""
    models = (DENSE, MIXTURE)
    tokens, longest = TRAJECTORIES * TOKENS, longest_row()
    passes = math.ceil(tokens / LEARNER / longest)
    yield f"| an update of {TRAJECTORIES} trajectories | {' | '.join(m.name for m in models)} |"
    yield "|---|---|---|"
    rows = {
        "time in which the engines sample it": [TRAJECTORIES / rollouts_per_second()] * 2,
        "arithmetic of the learner": [8 * m.active * tokens / LEARNER / FLOPS for m in models],
        f"gathers and reductions of {passes} passes": [passes * (2 * 2 + 4) * m.weights / LINK for m in models],
        f"weights to {ENGINES} engines": [GROUPS_MAX * 2 * m.weights / LINK for m in models],
    }
    for name, seconds in rows.items():
        yield f"| {name} | {' | '.join(f'{one:.0f} s' for one in seconds)} |"
    states = [f"{16 * m.weights / LEARNER / GIB:.0f} GiB" for m in models]
    yield f"| weights, gradients and moments on each rank | {' | '.join(states)} |"
    whole = [tokens * (ROW_BYTES + m.experts_bytes) / 1e9 for m in models]
    outlines = TRAJECTORIES * (TOKENS * OUTLINE_BYTES[0] + SAMPLED * OUTLINE_BYTES[1]) / 1e9
    sizes = [f"{size:.1f}, now {outlines + size / LEARNER:.2f} GB" for size in whole]
    yield f"| rows that each rank gets, before and now | {' | '.join(sizes)} |"
    yield f"| longest row that fits, a power of two | {longest // 1024}k | – |"
    yield f"| with `learner.context_ranks: {CONTEXT_RANKS}` | {longest_row(CONTEXT_RANKS) // 1024}k | – |"


def main(*arguments: str) -> int:
    return update_tables(PAGE, {"parts": parts(), "learner": learner()}, check="--check" in arguments)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
