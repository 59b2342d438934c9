"""The estimate of GPU memory: its counts are those of real models, its activations those that autograd keeps."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM
from typer.testing import CliRunner

from learner.models.memory import TILE, Shape, learner_memory, shape_of
from learner.policy import logprobs
from pipeline.cli.app import app
from pipeline.config.load import loads

ROOT = Path(__file__).parents[3]
SMALL = {
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "num_hidden_layers": 2,
    "vocab_size": 128,
    "tie_word_embeddings": False,
}


def model(**options: Any) -> Any:
    return Qwen3ForCausalLM(Qwen3Config(**{**SMALL, **options}))


def shape(**options: Any) -> Shape:
    found = shape_of({**SMALL, **options})
    assert found is not None
    return found


def kept(layers: int, tokens: int, checkpointing: bool) -> int:
    """Bytes of the tensors that autograd keeps of a forward pass in bfloat16, weights left out."""
    decoder = model(num_hidden_layers=layers).model
    decoder.train(checkpointing)
    if checkpointing:
        decoder.gradient_checkpointing_enable()
    weights = {p.untyped_storage().data_ptr() for p in decoder.parameters()}
    found: dict[int, torch.Tensor] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.untyped_storage().data_ptr() not in weights:
            found[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    hooks = torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor)
    with hooks, torch.autocast("cpu", dtype=torch.bfloat16):
        decoder(input_ids=torch.randint(0, 128, (1, tokens)), use_cache=False)
    return sum(tensor.untyped_storage().nbytes() for tensor in found.values())


@pytest.mark.parametrize("tied", [True, False])
def test_parameters_are_those_of_the_model_but_for_its_norms(tied: bool) -> None:
    with torch.device("meta"):
        real = model(tie_word_embeddings=tied)
    assert shape(tie_word_embeddings=tied).parameters == sum(p.numel() for p in real.parameters() if p.ndim > 1)


@pytest.mark.parametrize("checkpointing", [False, True])
def test_activations_of_a_layer_and_token_are_those_that_autograd_keeps(checkpointing: bool) -> None:
    difference = kept(4, 128, checkpointing) - kept(2, 128, checkpointing)
    difference -= kept(4, 64, checkpointing) - kept(2, 64, checkpointing)  # without the weights' copies
    measured = difference / (2 * 64)
    expected = 4 * SMALL["hidden_size"] if checkpointing else shape().layer_token_bytes
    assert measured == pytest.approx(expected, rel=0.02)


def test_ranks_and_adapters_need_less_and_experts_are_not_estimated() -> None:
    def total(extra: str = "", ranks: int = 1) -> float:
        config = loads(f"environments: {{any: {{name: arithmetic}}}}\nlearner: {{{extra}}}", environment={})
        return learner_memory(shape(hidden_size=4096, num_hidden_layers=32), config, ranks).total

    whole = total()
    smaller = (total(ranks=4), total("gradient_checkpointing: true"), total("optimizer_dtype: bfloat16"),
               total("lora: {rank: 16}"))  # fmt: skip
    assert max(smaller) < whole
    assert total("lora: {rank: 16, frozen_dtype: bfloat16}") < total("lora: {rank: 16}")
    assert shape_of({**SMALL, "num_experts": 8}) is None
    assert shape_of({"text_config": SMALL}) == shape()


def test_a_tile_of_logits_is_that_of_the_output_layer() -> None:
    assert logprobs.TILE["cuda"] == TILE


SEVEN = {
    "hidden_size": 3584, "intermediate_size": 18944, "num_attention_heads": 28, "num_key_value_heads": 4,
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
    code, text = planned(tmp_path, SMALL, "--gpus", "1")
    assert code == 0 and "estimated GPU memory: learner" in text
    code, text = planned(tmp_path, {**SMALL, "num_experts": 8}, "--gpus", "1")
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
    )
    code, text = planned(tmp_path, SEVEN, "--gpus", "8", "--gpu-memory", "17", *adapters)
    assert code == 2 and "does not fit: an engine needs" in text and "placement.tensor_parallel" in text


def test_the_page_is_current() -> None:
    page = [sys.executable, str(ROOT / "scripts" / "memory_page.py"), "--check"]
    assert subprocess.run(page, timeout=120, check=False).returncode == 0, "run python scripts/memory_page.py"
