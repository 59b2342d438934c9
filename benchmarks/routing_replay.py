"""Mismatch of engine and learner with and without routing replay, on a small random mixture of experts in bfloat16.

::

    python -m benchmarks.routing_replay --json results.json

Protocol: ``configs/tiny.yaml`` (guess a number in three turns, embedded engine) for 20 updates of 32 rollouts, with a
random Qwen3-MoE of 4 layers, 16 experts and 2 for each token. Engine and learner compute in bfloat16, and the learner
has float32 weights. Arms differ in ``learner.routing_replay`` alone, with ``staleness.max`` 0, then 1; a seed is of
weights and run. Numbers are those that a run writes to ``metrics.jsonl``: of each run the mean over updates of
KL(mu||pi) (k3), of the ESS over N, and of |learner - engine log-probability| at version lag 0, and the largest ratio of
all updates.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
UPDATES = 20
SETTINGS = {
    "groups.groups_per_step": "4",
    "engine.dtype": "bfloat16",
    "learner.compute_dtype": "bfloat16",
    "learner.learning_rate": "1e-3",
    "publish.dtype": "bfloat16",
    "run.total_steps": str(UPDATES),
    "metrics.port": "0",
}
SECONDS_MAX = 900


def write_model(folder: Path, seed: int) -> None:
    """A random Qwen3-MoE with the tokenizer of ``model.source: tiny``."""
    import torch
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    from learner.models.tiny import DEFAULT_WORDS, END, PAD, build_tokenizer

    tokenizer = build_tokenizer(8, DEFAULT_WORDS)
    ids = tokenizer.get_vocab()
    torch.manual_seed(seed)
    config = Qwen3MoeConfig(
        vocab_size=len(ids), hidden_size=64, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2,
        head_dim=16, num_experts=16, num_experts_per_tok=2, moe_intermediate_size=64, norm_topk_prob=True,
        max_position_embeddings=256, initializer_range=0.2, bos_token_id=None, eos_token_id=ids[END],
        pad_token_id=ids[PAD],
    )  # fmt: skip
    model: Any = Qwen3MoeForCausalLM(config)
    model.generation_config.eos_token_id, model.generation_config.pad_token_id = [ids[END]], ids[PAD]
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def measured(seed: int, staleness: int, replay: bool) -> dict[str, float]:
    """Numbers of one run. Raises ``CalledProcessError`` where it fails."""
    with tempfile.TemporaryDirectory() as scratch:
        model, run = Path(scratch, "model"), Path(scratch, "run")
        write_model(model, seed)
        settings = SETTINGS | {
            "model.source": str(model),
            "model.tiny": "{}",
            "run.directory": str(run),
            "run.seed": str(seed),
            "staleness.max": str(staleness),
            "learner.routing_replay": str(replay).lower(),
        }
        sets = [part for key, value in settings.items() for part in ("--set", f"{key}={value}")]
        command = [sys.executable, "-m", "pipeline.cli.app", "run", "configs/tiny.yaml", *sets]
        subprocess.run(command, cwd=ROOT, check=True, timeout=SECONDS_MAX, stdout=subprocess.DEVNULL)
        (file,) = run.rglob("metrics.jsonl")
        lines = [json.loads(line) for line in file.read_text().splitlines()]
    assert len(lines) == UPDATES, f"expected {UPDATES} updates, got {len(lines)}"

    def mean(key: str) -> float:
        return statistics.fmean(line[key] for line in lines if line[key] is not None)

    return {
        "kl_k3": mean("kl_k3"),
        "ess_ratio": mean("ess_ratio"),
        "logprob_diff_mean": mean("logprob_diff_mean"),
        "ratio_max": max(line["ratio_max"] for line in lines),
        "reward_last5": statistics.fmean(line["reward_mean"] for line in lines[-5:]),
        "seconds": lines[-1]["time"] - lines[0]["time"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--json", type=Path, help="file of the numbers; runs that it has are not made again")
    arguments = parser.parse_args()
    known = arguments.json is not None and arguments.json.exists()
    found: list[dict[str, Any]] = json.loads(arguments.json.read_text()) if known else []
    for staleness, seed, replay in itertools.product((0, 1), range(arguments.seeds), (False, True)):
        run = {"seed": seed, "staleness": staleness, "routing_replay": replay}
        if any(run.items() <= row.items() for row in found):
            continue
        found.append(run | measured(seed, staleness, replay))
        print({key: f"{value:.4g}" for key, value in found[-1].items()}, flush=True)
        if arguments.json:
            arguments.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
