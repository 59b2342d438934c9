"""``auto`` numbers of ranks and engines: whatever numbers fit the memory of the GPUs, the chosen ones do."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from learner.policy.memory import GIB, Footprint, estimate, learner_memory
from pipeline.config import RunConfig
from pipeline.config.load import loads
from pipeline.supervisor.inventory import Inventory, Node
from pipeline.supervisor.plan import plan
from scripts.memory_page import CONFIGS, FULL, LORA, SMALL, traced
from tests.support.quick import slow_but
from tests.unit.placement.test_plan import nodes

PLACED = """
engine: {kind: vllm, weight_transfer: files}
placement: {engine_gpus: auto, learner_gpus: auto}
environments: {any: {name: arithmetic}}
learner:
  tokens_per_microbatch: 8192
  gradient_checkpointing: true
"""
SIZES = (1, 2, 4, 8)


def written_out(folder: Path, name: str, extra: str) -> RunConfig:
    """A run file with the model, of which there is a folder."""
    model = folder / name
    model.mkdir(exist_ok=True)
    for file in ("model.safetensors", "tokenizer.json", "tokenizer_config.json"):
        (model / file).write_text("{}")
    (model / "config.json").write_text(json.dumps(CONFIGS[name]))
    return loads(f"model: {{source: {model}, max_length: 8192}}{PLACED}{extra}", environment={})


def machine(gpus: int, gib: int) -> Inventory:
    return Inventory((Node("here", tuple(map(str, range(gpus))), gpu_bytes=gib * GIB),))


def serves(model: Footprint, heads: int, key_heads: int, size: int, gib: float) -> bool:
    """An engine of ``size`` GPUs, of which each gives ``gib``, has room for a rollout."""
    cache = model.cache_bytes(8192) / min(size, key_heads)
    return heads % size == 0 and 2 * model.weights / size + 2 * GIB + cache <= gib * GIB


@pytest.mark.parametrize("name", slow_but(("Qwen2.5-7B", "Qwen3-30B-A3B"), CONFIGS))
def test_the_chosen_numbers_fit_whenever_any_do(name: str, tmp_path: Path) -> None:
    raw: dict[str, Any] = CONFIGS[name]
    for extra in (FULL, LORA, SMALL):
        config, model = written_out(tmp_path, name, extra), traced(name, extra)
        for gib in (24, 40, 80, 141):
            heads = raw["num_attention_heads"], raw["num_key_value_heads"]
            sizes = [size for size in SIZES if serves(model, *heads, size, 0.92 * gib)]
            enough = [n for n in range(1, 8) if learner_memory(model, config, n).total <= 0.9 * gib * GIB]
            for gpus in (1, 2, 4, 8):
                found = plan(config, machine(gpus, gib))
                assert not found.problems
                fits = not estimate(found.config, gib * GIB).problems
                if gpus == 1:  # in turns, where vLLM has another share of the memory
                    assert fits == (1 in enough and serves(model, *heads, 1, 0.8 * gib))
                    continue
                size = min(sizes, default=gpus)
                counts = [n for n in enough if n + size <= gpus]
                assert fits == bool(counts), (extra, gib, gpus)
                if counts:
                    least = min((n for n in counts if n >= gpus // 4), default=max(counts))
                    ranks = found.config.learner.ranks
                    assert ranks >= least and (gpus - ranks) // size == (gpus - least) // size
                    assert found.config.placement.tensor_parallel == size


def test_what_was_chosen_is_said_in_a_sentence(tmp_path: Path) -> None:
    found = plan(written_out(tmp_path, "Qwen2.5-7B", ""), machine(8, 40))
    assert (found.config.learner.ranks, found.config.engine.replicas) == (4, 4)
    assert found.reasons == (
        "8 GPUs on here: 4 for the learner and 4 for 4 engines; by its estimated memory the learner does not fit on a "
        "quarter of them (2)",
    )
    large = plan(written_out(tmp_path, "Qwen3-32B", LORA), machine(8, 48))
    assert (large.config.learner.ranks, large.config.placement.tensor_parallel) == (2, 2)
    assert large.reasons[1] == "an engine takes 2 GPUs: by its estimated memory the model does not fit on fewer"


def test_numbers_of_the_run_file_are_kept_and_without_known_memory_a_quarter_is_the_learners(tmp_path: Path) -> None:
    config = written_out(tmp_path, "Qwen2.5-7B", "")
    assert plan(config, nodes(8)).config.learner.ranks == 2
    given = plan(config.updated(placement={"learner_gpus": 3, "tensor_parallel": 4}), machine(8, 40)).config
    assert (given.learner.ranks, given.placement.tensor_parallel, given.engine.replicas) == (3, 4, 1)
