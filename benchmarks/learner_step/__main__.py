"""The command: writes the model, runs the sides one after the other, prints the table."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from benchmarks import learner_step
from benchmarks.learner_step.case import Case, make_rows
from benchmarks.learner_step.model import SHAPES, step_flops, write_model
from benchmarks.learner_step.sides import BARE, SIDES
from learner.policy.policy import pass_cost

VOCABULARY = 49_152
"""Of all shapes here: what the recorded results had."""


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
            layers = {} if a.layers is None else {"num_hidden_layers": a.layers}
            write_model(a.shape, folder, vocab_size=VOCABULARY, tie_word_embeddings=True, **layers)
    device = a.device or ("cuda" if torch.cuda.is_available() else "cpu")
    case = Case(str(folder), a.groups, a.rollouts, a.prompt, a.response, a.longest, a.steps, a.tokens_per_microbatch,
                a.compute_dtype, device, a.threads, a.checkpointing)  # fmt: skip
    found: dict[str, dict[str, Any]] = {}
    for side in a.sides:
        measured = run_side(case, side, a.directory)
        if measured is not None:
            found[side] = measured
            print(f"{side:16} {measured['seconds']:.2f} s/step {measured['stages'] or ''}", flush=True)
    config = AutoConfig.from_pretrained(folder)
    with torch.device("meta"):
        cost = pass_cost(AutoModelForCausalLM.from_config(config))
    print("\n".join(table(found, step_flops(cost, make_rows(case, config.vocab_size)), a.peak_tflops)))
    (a.directory / "result.json").write_text(json.dumps({"case": asdict(case), "sides": found}, indent=1))


if __name__ == "__main__":
    main()
