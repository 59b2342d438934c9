"""The estimate of GPU memory: its sizes are those of real models, its peaks those of the allocator in an update."""

from __future__ import annotations

import gc
import json
import os
import re
import socket
import subprocess
import sys
from collections.abc import Mapping
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from torch.profiler import ProfilerActivity, profile
from typer.testing import CliRunner

from learner.checkpoints.checkpoint import CheckpointState, take_image
from learner.data.rows import Batch
from learner.policy.logprobs import TILE
from learner.policy.memory import footprint, host_memory, learner_memory
from learner.policy.policy import Policy
from learner.training.trainer import Trainer
from learner.weights.publisher import weights_to_publish
from pipeline.cli.app import app
from pipeline.config.learner import LoraConfig
from pipeline.config.load import loads
from pipeline.errors import ConfigurationError
from scripts import memory_page
from tests.support.families import FAMILIES, SMALL
from tests.unit.learner.conftest import run_config
from tests.unit.packing.conftest import row_of

ROOT = Path(__file__).parents[3]
TOKENS, VOCABULARY = 512, 2048
MIDDLE = {
    "vocab_size": VOCABULARY, "hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 4, "head_dim": 16,
    "num_attention_heads": 8, "num_key_value_heads": 4, "max_position_embeddings": 1024, "tie_word_embeddings": False,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
EXPERTS = {
    "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 96, "n_routed_experts": 8, "n_group": 1,
    "topk_group": 1, "first_k_dense_replace": 1,
}  # fmt: skip
WINDOWS = {"sliding_window": 64, "layer_types": ["sliding_attention", "full_attention"] * 2}
WIDE = {"hidden_size": 32, "intermediate_size": 8192, "num_hidden_layers": 2}
PLAIN = ("Llama", "Qwen2", "Qwen3", "Mistral", "Phi3", "Glm4", "Olmo2", "SmolLM3", "Granite")
MEASURED = {
    **{f"{name}Config": MIDDLE for name in PLAIN},
    **{f"{name}Config": MIDDLE | WINDOWS for name in ("Olmo3", "Gemma3Text")},
    **{f"{name}Config": MIDDLE | EXPERTS for name in ("Qwen3Moe", "Glm4Moe")},
    **{f"{name}Config, wide": MIDDLE | WIDE for name in ("Llama", "Phi3")},
}


def written(config: Any) -> dict[str, Any]:
    """The ``config.json``."""
    found: dict[str, Any] = json.loads(config.to_json_string())
    return found


def learner_options(others: Mapping[str, Any]) -> dict[str, Any]:
    return {"compute_dtype": "bfloat16", "tokens_per_microbatch": TOKENS, **others}


def rows(update: int, count: int = 2) -> tuple[Any, ...]:
    rng = np.random.default_rng(update)
    ids = [rng.integers(3, VOCABULARY, TOKENS) for _ in range(count)]
    return tuple(row_of(x, np.arange(TOKENS) >= 1, i, 1 - 2 * (i % 2)) for i, x in enumerate(ids))


def run_ranks(command: list[str], size: int, environment: Mapping[str, str]) -> None:
    """Run ``command`` as each of the ranks that meet on this machine."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    meeting = {"WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    shared = {**os.environ, **environment, **meeting}
    ranks = [subprocess.Popen(command, env={**shared, "RANK": str(rank)}) for rank in range(size)]
    assert [rank.wait() for rank in ranks] == [0] * size


def allocated(work: Any, file: Path) -> int:
    """Most bytes that ``work`` had allocated at a time."""
    gc.collect()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        work()
    profiler.export_chrome_trace(str(file))
    events = json.loads(file.read_text())["traceEvents"]
    found = sorted(
        ((event["ts"], event["args"]) for event in events if event.get("name") == "[memory]"), key=lambda pair: pair[0]
    )
    before = found[0][1]["Total Allocated"] - found[0][1]["Bytes"]  # what an earlier call has counted
    return max(arguments["Total Allocated"] for _, arguments in found) - before


@pytest.mark.slow
@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("name", MEASURED)
def test_the_estimate_of_an_update_is_the_allocators_peak_within_a_tenth(
    name: str, checkpointing: bool, tmp_path: Path
) -> None:
    learner = learner_options({"gradient_checkpointing": checkpointing})
    config = run_config(learner, model={"max_length": TOKENS})
    made = getattr(transformers, name.split(",")[0])(**MEASURED[name])
    torch.manual_seed(0)
    model: Any = transformers.AutoModelForCausalLM.from_config(made)
    trainer = Trainer(Policy(model, config.learner, torch.device("cpu")), config)
    assert trainer.policy.form.packed
    trainer.step(Batch(0, (), rows(0)), 0)
    before = sum(12 * p.numel() for p in model.parameters())  # weights and moments
    peak = before + allocated(lambda: trainer.step(Batch(1, (), rows(1)), 1), tmp_path / "trace.json")
    expected = learner_memory(footprint(written(made), TOKENS), config, tile=TILE["cpu"]).total
    assert expected == pytest.approx(peak, rel=0.1)


DIVIDED = [
    (name, {"gradient_checkpointing": checkpointing, **({"lora": {"rank": 4}} if adapted else {})})
    for name in ("LlamaConfig", "Qwen3MoeConfig")
    for checkpointing, adapted in ((False, False), (True, False), (True, True))
]


@pytest.mark.slow
def test_the_estimate_of_two_ranks_is_the_peak_of_their_allocators_within_a_tenth(tmp_path: Path) -> None:
    environment = {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "tests.unit.models.rank_memory", str(tmp_path), json.dumps(DIVIDED)]
    run_ranks(command, 2, environment)
    peaks = zip(*(json.loads((tmp_path / f"peaks{rank}.json").read_text()) for rank in range(2)), strict=True)
    for (name, options), (first, second) in zip(DIVIDED, peaks, strict=True):
        config = run_config(learner_options(options), model={"max_length": TOKENS})
        lora = config.learner.lora if config.learner.lora.rank else None
        raw = written(getattr(transformers, name)(**MEASURED[name]))
        expected = learner_memory(footprint(raw, TOKENS, lora), config, 2, tile=TILE["cpu"]).total
        assert expected == pytest.approx(max(first, second), rel=0.1), (name, options)


@pytest.mark.parametrize("name", FAMILIES)
def test_weights_are_those_of_the_model_in_every_family(name: str) -> None:
    family = FAMILIES[name]
    config = getattr(transformers, family.config)(**SMALL | family.options)
    with torch.device("meta"):
        model: Any = transformers.AutoModelForCausalLM.from_config(config)
    found = footprint(written(config), 16)
    assert found.weights == sum(p.numel() for p in model.parameters())
    assert len(found.layers) == config.num_hidden_layers


def test_a_layer_of_a_llama_keeps_what_the_page_says_of_a_token() -> None:
    config = transformers.LlamaConfig(**MIDDLE)
    H, inner, Q, K = 128, 384, 128, 64
    found = footprint(written(config), 64)
    log_sums = 4 * MIDDLE["num_attention_heads"]
    assert found.layers[0].token_bytes == 4 * H + 4 * inner + 4 * Q + 4 * K + log_sums
    assert found.cache_bytes(10) == 10 * 4 * 4 * K
    qwen = footprint(written(transformers.Qwen3Config(**MIDDLE)), 64)
    assert qwen.layers[0].token_bytes == found.layers[0].token_bytes + 2 * Q + 2 * K


def test_layers_with_a_window_keep_no_more_of_a_sequence_in_the_cache() -> None:
    found = footprint(written(transformers.Gemma3TextConfig(**MIDDLE | WINDOWS)), 128)
    assert found.cache_bytes(64) == 64 * found.cache_bytes(1)
    assert found.cache_bytes(1064) == found.cache_bytes(64) + 1000 * found.cache_bytes(1) // 2


def test_a_replica_needs_what_a_learner_of_its_ranks_needs() -> None:
    model = footprint(written(transformers.LlamaConfig(**MIDDLE)), TOKENS)
    for ranks, replicas in ((8, 2), (8, 4)):
        mesh, alone = (
            run_config(learner_options({"ranks": n, "replicas": r}), engine={"kind": "vllm"})
            for n, r in ((ranks, replicas), (ranks // replicas, 1))
        )
        assert learner_memory(model, mesh) == learner_memory(model, alone)
        assert host_memory(model, mesh) == host_memory(model, alone)


def test_ranks_adapters_and_smaller_moments_need_less() -> None:
    raw = written(transformers.Qwen3MoeConfig(**MIDDLE | EXPERTS))

    def total(extra: str = "", ranks: int = 1) -> float:
        config = loads(f"environments: {{any: {{name: arithmetic}}}}\nlearner: {{{extra}}}", environment={})
        lora: LoraConfig | None = config.learner.lora if config.learner.lora.rank else None
        return learner_memory(footprint(raw, 512, lora), config, ranks).total

    whole = total()
    smaller = (total(ranks=8), total("gradient_checkpointing: true"), total("optimizer_dtype: bfloat16"),
               total("lora: {rank: 4}"))  # fmt: skip
    assert max(smaller) < whole
    assert total("lora: {rank: 4, frozen_dtype: bfloat16}") < total("lora: {rank: 4}")


def test_a_row_divided_over_ranks_needs_the_memory_of_its_part() -> None:
    made = footprint(written(transformers.LlamaConfig(**MIDDLE)), TOKENS)

    def memory(length: int, context: int) -> dict[str, float]:
        learner = {"ranks": 8, "context_ranks": context, "tokens_per_microbatch": 256}
        return learner_memory(made, run_config(learner, model={"max_length": length})).parts

    assert memory(4096, 4) == memory(1024, 1)
    assert memory(512, 4) == memory(256, 1)
    kept = 512 * sum(layer.cache_bytes for layer in made.layers)
    repeated = memory(4096, 8)["activations"] - memory(512, 1)["activations"]
    assert repeated == pytest.approx(kept), "each of eight ranks has a copy of one of four key heads"


@pytest.mark.parametrize(
    "sections",
    [{}, {"learner": {"optimizer_dtype": "bfloat16"}}, {"checkpoint": {"optimizer": False}},
     {"learner": {"lora": {"rank": 4}}}, {"learner": {"lora": {"rank": 4}}, "publish": {"lora": "adapter"}}],
)  # fmt: skip
def test_host_memory_is_that_of_the_copies_of_a_checkpoint_and_of_two_published_versions(
    sections: dict[str, Any],
) -> None:
    sections = {"engine": {"kind": "vllm"}, **sections}
    learner = learner_options(sections.pop("learner", {}))
    config, made = run_config(learner, **sections), transformers.LlamaConfig(**MIDDLE)
    model: Any = transformers.AutoModelForCausalLM.from_config(made)
    trainer = Trainer(Policy(model, config.learner, torch.device("cpu")), config)
    trainer.step(Batch(0, (), rows(0)), 0)
    image = take_image(trainer, CheckpointState(0, 0, {}))
    held: list[torch.Tensor] = [*image.weights.values(), *(image.adapters or {}).values()]
    states = image.training.get("optimizer", {"state": {}})["state"].values()
    held += [m for state in states for m in state.values() if isinstance(m, torch.Tensor)]
    raw, lora = written(made), config.learner.lora if config.learner.lora.rank else None
    expected = host_memory(footprint(raw, TOKENS, lora), config)
    assert sum(t.nbytes for t in held) == pytest.approx(expected["checkpoint"], rel=1e-3)
    published = weights_to_publish(trainer.policy, config.publish)
    assert 2 * sum(t.nbytes for t in published.values()) == expected["publication"]


def test_a_model_that_cannot_be_traced_is_an_error_with_its_type() -> None:
    with pytest.raises(ConfigurationError, match="does not know the model_type nothing"):
        footprint({"model_type": "nothing"}, 16)
    with pytest.raises(ConfigurationError, match="a model of the type llama cannot be traced"):
        footprint({"model_type": "llama", "hidden_size": "wide"}, 16)


SEVEN = {
    "model_type": "qwen2", "hidden_size": 3584, "intermediate_size": 18944, "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "num_hidden_layers": 28, "vocab_size": 152064, "tie_word_embeddings": False,
}  # fmt: skip
"""Qwen2.5-7B."""


def planned(folder: Path, config: dict[str, Any], *options: str) -> tuple[int, str]:
    model_folder = folder / "model"
    model_folder.mkdir(exist_ok=True)
    (model_folder / "config.json").write_text(json.dumps(config))
    for name in ("model.safetensors", "tokenizer.json", "tokenizer_config.json"):
        (model_folder / name).write_text("{}")
    file = folder / "run.yaml"
    file.write_text(f"model: {{source: {model_folder}, max_length: 4096}}\nengine: {{kind: vllm}}\n"
                    "environments: {a: {name: arithmetic}}\n")  # fmt: skip
    done = CliRunner().invoke(app, ["plan", str(file), *options])
    return done.exit_code, " ".join(done.output.split())


def test_plan_prints_the_estimate_where_the_shape_is_known(tmp_path: Path) -> None:
    code, text = planned(tmp_path, {"model_type": "qwen3", **MIDDLE}, "--gpus", "1")
    assert code == 0 and "estimated GPU memory: learner" in text and "estimated host memory: learner" in text
    code, text = planned(tmp_path, {"model_type": "nothing"}, "--gpus", "1")
    assert code == 0 and "GPU memory is not estimated" in text


def test_plan_refuses_what_cannot_fit_and_every_remedy_that_it_names_with_a_sufficient_size_fits(
    tmp_path: Path,
) -> None:
    code, text = planned(tmp_path, SEVEN, "--gpus", "2", "--gpu-memory", "80")
    assert code == 2 and "does not fit: the learner needs" in text
    room = float(re.findall(r"may use ([\d.]+)", text)[0])
    changes = dict(re.findall(r"(learner\.[a-z_]+: (?:\{[^}]*\}|\w+)) \(([\d.]+) GiB\)", text))
    assert len(changes) == 3
    for change, size in changes.items():
        gpus = "8" if "ranks" in change else "2"
        code, text = planned(
            tmp_path, SEVEN, "--gpus", gpus, "--gpu-memory", "80", "--set", change.replace(": ", "=", 1)
        )
        assert f"learner {size} GiB" in text and (code == 0) == (float(size) <= room), change
    assert planned(tmp_path, SEVEN, "--gpus", "2", "--gpu-memory", "192")[0] == 0


def test_plan_refuses_an_engine_without_room_for_one_rollout(tmp_path: Path) -> None:
    adapters = (
        "--set",
        "learner.lora={rank: 8, frozen_dtype: bfloat16}",
        "--set",
        "learner.gradient_checkpointing=true",
        "--set",
        "placement.tensor_parallel=1",
    )
    code, text = planned(tmp_path, SEVEN, "--gpus", "8", "--gpu-memory", "17", *adapters)
    assert code == 2 and "does not fit: an engine needs" in text and "placement.tensor_parallel" in text


def test_the_first_model_of_the_page_is_current() -> None:
    *_, row = islice(memory_page.learner(), 3)
    assert row in memory_page.PAGE.read_text(), "run python scripts/memory_page.py"


@pytest.mark.slow
def test_the_page_is_current() -> None:
    assert memory_page.main("--check") == 0, "run python scripts/memory_page.py"
