"""The recipes pass ``config check`` on a machine with a GPU, and fit into its memory by the estimate on their page."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from learner.policy.memory import GIB, MARGIN, engine_bytes, footprint, learner_memory
from pipeline.config import RunConfig
from pipeline.config.load import load
from pipeline.supervisor import preflight
from pipeline.supervisor.inventory import Inventory, Node

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs" / "RECIPES.md").read_text()
QWEN = {
    "recipe_math": (48, ("qwen2", 28, 1536, 8960, 12, 2)),
    "recipe_tools": (48, ("qwen3", 36, 2560, 9728, 32, 8)),
    "recipe_program": (24, ("qwen2", 24, 896, 4864, 14, 2)),
}
"""Memory of the GPU in GiB, and the values of ``SHAPE`` in the ``config.json`` of the model."""
SHAPE = (
    "model_type", "num_hidden_layers", "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads"
)  # fmt: skip


def recipe(name: str, folder: Path) -> RunConfig:
    """The run file with rows of GSM8K's form in place of the data of the hub."""
    rows = folder / "rows.jsonl"
    row = {"question": "Ann has 3 apples and buys 4. How many?", "answer": "3 + 4 = <<3+4=7>>7\n#### 7"}
    rows.write_text("".join(json.dumps({**row, "question": f"{n}: {row['question']}"}) + "\n" for n in range(40)))
    raw = load(ROOT / "configs" / f"{name}.yaml", [f"run.directory={folder / 'runs'}"], environment={}).model_dump()
    for section in raw["environments"].values():
        if section["tasks_from"]["kind"] == "huggingface":
            section["tasks_from"] |= {"kind": "jsonl", "path": str(rows), "name": None, "subset": None,
                                      "splits": {"train": 0.5, "eval": 0.5}}  # fmt: skip
    return RunConfig.model_validate(raw)


@pytest.mark.parametrize("name", QWEN)
def test_recipe_passes_config_check_where_there_is_a_gpu(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(preflight, "local_inventory", lambda: Inventory((Node("here", gpus=("0",), cpus=16),)))
    assert preflight.check_all(recipe(name, tmp_path)).problems == []


@pytest.mark.parametrize("name", QWEN)
def test_recipe_installs_the_extras_that_it_uses(name: str) -> None:
    """The environment of the tests has them all, so ``config check`` does not miss one."""
    text = (ROOT / "configs" / f"{name}.yaml").read_text()
    config = load(ROOT / "configs" / f"{name}.yaml", environment={})
    needed = {config.engine.kind}
    for section in config.environments.values():
        needed |= {"tools"} if {"python", "mcp"} & {*section.loop.options.get("tools", ())} else set()
        needed |= {"data"} if section.tasks_from and section.tasks_from.kind in ("huggingface", "parquet") else set()
    headers = re.findall(r"^#   uv pip install .*'\.\[(.*)\]'", text, re.MULTILINE)
    assert [set(header.split(",")) for header in headers] == [needed]
    assert needed <= set(re.findall(r"uv pip install .*'\.\[(.*)\]'", PAGE)[0].split(","))


@pytest.mark.parametrize("name", QWEN)
def test_memory_on_the_page_is_the_estimate_and_fits(name: str, tmp_path: Path) -> None:
    gib, shape = QWEN[name]
    config = recipe(name, tmp_path)
    raw = dict(zip(SHAPE, shape, strict=True)) | {"vocab_size": 151_936, "tie_word_embeddings": True}
    raw |= {"head_dim": 128} if raw["model_type"] == "qwen3" else {}
    lora = config.learner.lora
    model = footprint(raw, config.model.max_length, lora if lora.rank else None)
    learner, engine = learner_memory(model, config).total / GIB, engine_bytes(model) / GIB
    assert learner < gib * (1 - MARGIN)
    assert config.engine.memory_share is not None and engine < gib * config.engine.memory_share
    row = next(line for line in PAGE.splitlines() if line.startswith(f"| `configs/{name}.yaml`"))
    assert re.findall(r"(\d+) GiB", row) == [str(round(learner)), str(round(engine)), str(gib)]
