"""A tiny model that speaks, sums to learn, and files that demonstrate them."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import orjson
import pytest
import torch

from actors.environments.arithmetic import Arithmetic
from pipeline.config import RunConfig
from pipeline.rundir import RunDirectory
from pipeline.schema import Task
from tests.unit.learner.conftest import _one_thread, kit

__all__ = ["_one_thread", "kit"]
SEEDS = range(24)
GAME = Arithmetic(low=0, high=3, attempts=1)


def answer_of(seed: int) -> str:
    return GAME.start(Task(f"arithmetic/{seed}", "arithmetic", seed)).hint.rstrip(".").split()[-1]


def question_of(seed: int) -> str:
    return GAME.start(Task(f"arithmetic/{seed}", "arithmetic", seed)).messages[0].content


def write_demonstrations(path: Path, **more: Any) -> Path:
    """Right answers to all the sums, as text; and one wrong answer, which nobody should learn."""
    lines = [
        {"environment": "arithmetic", "seed": seed, "reward": 1.0, "messages": [
            {"role": "user", "content": question_of(seed)}, {"role": "assistant", "content": answer_of(seed)}]}
        for seed in SEEDS
    ]  # fmt: skip
    wrong = [{"role": "user", "content": question_of(0)}, {"role": "assistant", "content": "60"}]
    lines.append({"environment": "arithmetic", "seed": 0, "reward": 0.0, "messages": wrong})
    path.write_bytes(b"".join(orjson.dumps({**line, **more}) + b"\n" for line in lines))
    return path


@pytest.fixture
def game(tmp_path: Path) -> Any:
    """``run(**warm_start)`` makes configuration and directory of a run with the file of demonstrations."""
    file = write_demonstrations(tmp_path / "demonstrations.jsonl")

    def run(name: str = "run", learner: dict[str, Any] | None = None, sections: dict[str, Any] | None = None,
            **warm: Any) -> tuple[RunConfig, RunDirectory]:  # fmt: skip
        warm = {"demonstrations": str(file), "learning_rate": 1e-2, "batch": 8, **warm}
        config = RunConfig.model_validate(
            {
                "run": {"directory": str(tmp_path), "name": name, "total_steps": 4},
                "model": {"source": "tiny", "max_length": 64, "tiny": {"hidden_size": 32, "layers": 1, "heads": 2}},
                "sampling": {"max_tokens": 4},
                "environments": {"arithmetic": {}},
                "groups": {"n_rollout": 2, "groups_per_step": 2},
                "checkpoint": {"every": 3},
                "learner": {"device": "cpu", "compute_dtype": "float32", "warm_start": warm, **(learner or {})},
                **(sections or {}),
            }
        )
        return config, RunDirectory(config.run.path).create()

    return SimpleNamespace(run=run, file=file, seeds=SEEDS, solve_rate=solve_rate)


@torch.no_grad()
def solve_rate(policy: Any, folder: Path) -> float:
    """Share of the sums that greedy replies of a plain model with the policy's weights solve."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModelForCausalLM.from_pretrained(folder)
    model.load_state_dict(policy.snapshot("float32"), strict=False)
    solved = 0
    for seed in SEEDS:
        messages = [{"role": "user", "content": question_of(seed)}]
        ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)
        out = model.generate(**ids, max_new_tokens=3, do_sample=False)
        reply = tokenizer.decode(out[0, ids["input_ids"].shape[1] :], skip_special_tokens=True)
        solved += reply.strip() == answer_of(seed)
    return solved / len(SEEDS)
