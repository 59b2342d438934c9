"""The command: writes the model, runs the sides one after the other, prints the table."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import learner_step
from benchmarks.learner_step.case import Case, make_rows
from benchmarks.learner_step.sides import BARE, SIDES

VOCABULARY = 49_152
SHAPES: dict[str, dict[str, int]] = {
    "135m": {"hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30, "num_attention_heads": 9,
             "num_key_value_heads": 3},
    "0.5b": {"hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24, "num_attention_heads": 14,
             "num_key_value_heads": 2},
    "1.5b": {"hidden_size": 1536, "intermediate_size": 8960, "num_hidden_layers": 28, "num_attention_heads": 12,
             "num_key_value_heads": 2},
}  # fmt: skip
"""Shapes of SmolLM2-135M, Qwen2.5-0.5B and Qwen2.5-1.5B, all with a vocabulary of 49,152 and tied embeddings."""


def write_model(shape: str, layers: int | None, folder: Path) -> None:
    """A Llama-style decoder of random weights, float32."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    options = {**SHAPES[shape], **({} if layers is None else {"num_hidden_layers": layers})}
    config = LlamaConfig(
        vocab_size=VOCABULARY, max_position_embeddings=8192, tie_word_embeddings=True, dtype="float32", **options
    )
    torch.manual_seed(0)
    model: Any = LlamaForCausalLM(config)
    model.save_pretrained(folder)


def run_side(case: Case, side: str, directory: Path) -> dict[str, Any] | None:
    """Result of the side; None where it failed, with the end of its output on the terminal."""
    command = [sys.executable, "-m", "benchmarks.learner_step.sides", side, json.dumps(asdict(case)),
               "--directory", str(directory / side)]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=3600, stdin=subprocess.DEVNULL)
    lines = [line for line in done.stdout.splitlines() if line.startswith("MEASURED ")]
    if done.returncode or not lines:
        print(f"{side} failed: {(done.stderr or done.stdout)[-2000:]}", flush=True)
        return None
    measured: dict[str, Any] = json.loads(lines[-1].removeprefix("MEASURED "))
    return measured


def step_flops(case: Case) -> float:
    """Multiplications and additions of the model for one step, forward and backward (three times the forward pass):
    6 for each weight of the layers and token, 6 for each weight of the output layer and sampled token, and causal
    attention over half of each row's square. Recomputation is not counted, nor is anything saved by sharing."""
    shape = json.loads((Path(case.model) / "config.json").read_text())
    h, heads = shape["hidden_size"], shape["num_attention_heads"]
    attention = h * h * (2 + 2 * shape["num_key_value_heads"] / heads)
    layer = attention + 3 * h * shape["intermediate_size"]
    rows = make_rows(case, shape["vocab_size"])
    lengths = np.asarray([len(row) for row in rows], dtype=np.float64)
    sampled = sum(row.n_sampled for row in rows)
    per_layer = 6 * layer * lengths.sum() + 6 * h * (lengths**2).sum()
    return float(shape["num_hidden_layers"] * per_layer + 6 * h * shape["vocab_size"] * sampled)


def table(found: dict[str, dict[str, Any]], flops: float, peak_tflops: float | None) -> list[str]:
    lines = [f"{'side':16}{'s/step':>9}{'CPU s':>9}{'tokens/s':>10}{'sampled/s':>10}{'peak MiB':>10}{'MFU':>7}"]
    for side, m in found.items():
        share = "" if peak_tflops is None else f"{flops / m['seconds'] / peak_tflops / 1e12:.3f}"
        lines.append(
            f"{side:16}{m['seconds']:9.2f}{m['cpu_seconds']:9.2f}{m['tokens'] / m['seconds']:10.0f}"
            f"{m['sampled'] / m['seconds']:10.0f}{m['peak_mib']:10.0f}{share:>7}"
        )
    ours = found.get("learner")
    bare = min((found[side] for side in BARE if side in found), key=lambda m: m["seconds"], default=None)
    for name, other, goal in (("fastest bare step", bare, 0.95), ("TRL", found.get("trl"), 1.5)):
        if ours is not None and other is not None:
            lines.append(
                f"learner against {name} ({other['side']}): {other['seconds'] / ours['seconds']:.2f} times its speed "
                f"(goal {goal}; by CPU seconds {other['cpu_seconds'] / ours['cpu_seconds']:.2f}), "
                f"{ours['peak_mib'] / other['peak_mib']:.2f} of its peak memory"
            )
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=(learner_step.__doc__ or "").split("\n")[0])
    parser.add_argument("--model", type=Path, help="a Hugging Face folder; default: random weights of --shape")
    parser.add_argument("--shape", choices=sorted(SHAPES), default="135m")
    parser.add_argument("--layers", type=int, help="fewer or more layers than the shape has")
    parser.add_argument("--sides", nargs="+", choices=SIDES, default=list(SIDES))
    parser.add_argument("--groups", type=int, default=8)
    parser.add_argument("--rollouts", type=int, default=8)
    parser.add_argument("--prompt", type=int, default=80, help="median tokens")
    parser.add_argument("--response", type=int, default=60, help="median tokens")
    parser.add_argument("--longest", type=int, default=1024)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--tokens-per-microbatch", type=int, default=4096)
    parser.add_argument("--compute-dtype", choices=["bfloat16", "float32"], default="bfloat16")
    parser.add_argument("--device", choices=["cpu", "cuda"])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--checkpointing", action="store_true")
    parser.add_argument("--peak-tflops", type=float, help="of the device in the compute type (H100, bfloat16: 989)")
    parser.add_argument("--directory", type=Path, default=Path("runs/learner_step"))
    a = parser.parse_args()
    a.directory.mkdir(parents=True, exist_ok=True)
    folder = a.model
    if folder is None:
        folder = a.directory / f"model-{a.shape}-{a.layers or 'all'}"
        if not (folder / "config.json").is_file():
            write_model(a.shape, a.layers, folder)
    device = a.device or _device()
    case = Case(str(folder), a.groups, a.rollouts, a.prompt, a.response, a.longest, a.steps, a.tokens_per_microbatch,
                a.compute_dtype, device, a.threads, a.checkpointing)  # fmt: skip
    found: dict[str, dict[str, Any]] = {}
    for side in a.sides:
        measured = run_side(case, side, a.directory)
        if measured is not None:
            found[side] = measured
            print(f"{side:16} {measured['seconds']:.2f} s/step {measured['stages'] or ''}", flush=True)
    print("\n".join(table(found, step_flops(case), a.peak_tflops)))
    (a.directory / "result.json").write_text(json.dumps({"case": asdict(case), "sides": found}, indent=1))


def _device() -> str:
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


if __name__ == "__main__":
    main()
