"""Wall time and reward of Afterplay against TRL's ``GRPOTrainer``: same model, task, rollouts a step, optimizer and
clip.

::

    pip install 'trl>=1.16,<1.17'
    python -m benchmarks.against_trl --steps 10

Both sides train SmolLM2-135M on "What is a + b?" with 8 tasks of 8 rollouts a step, at most 24 new tokens, temperature
1, AdamW at 2e-5, clip 0.2/0.28, advantage (R - mean)/std, one attempt a task. TRL generates with transformers inside
its trainer (its form for a machine without a GPU); Afterplay samples from a real vLLM server while it trains. Each
side runs alone, one after the other, on all cores; the first step of each side, which pays for warming up, is left out
of the median.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

GROUPS, ROLLOUTS, NEW_TOKENS = 8, 8, 24
LEARNING_RATE = 2e-5


def run_afterplay(directory: Path, steps: int) -> list[dict[str, Any]]:
    """Steps of ``afterplay run configs/quickstart.yaml`` with one attempt a task, as its metrics tell them."""
    overrides = [
        f"run.directory={directory}",
        "run.name=afterplay",
        f"run.total_steps={steps}",
        "environments.arithmetic.options.attempts=1",
        f"sampling.max_tokens={NEW_TOKENS}",
        f"learner.learning_rate={LEARNING_RATE}",
        "checkpoint.at_end=false",
        "checkpoint.every=1000",
    ]
    command = [sys.executable, "-m", "pipeline.cli.app", "run", "configs/quickstart.yaml", "--fresh"]
    for override in overrides:
        command += ["--set", override]
    subprocess.run(command, check=True, timeout=3600, stdin=subprocess.DEVNULL)
    lines = (directory / "afterplay" / "metrics.jsonl").read_text().splitlines()
    return [{"time": row["time"], "reward": row["reward_mean"]} for row in map(json.loads, lines)]


def run_trl(model: Path, directory: Path, steps: int) -> list[dict[str, Any]]:
    """The same with ``GRPOTrainer``, in this process."""
    import torch
    from datasets import Dataset
    from transformers import AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    rows: list[dict[str, Any]] = []

    class Record(TrainerCallback):  # type: ignore[misc]
        def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **_: Any) -> None:
            if logs and "reward" in logs:
                rows.append({"time": time.time(), "reward": logs["reward"]})

    def reward(completions: Sequence[Any], answer: Sequence[int], **_: Any) -> list[float]:
        return [float(last_integer(c[0]["content"]) == a) for c, a in zip(completions, answer, strict=True)]

    generator = torch.Generator().manual_seed(0)
    pairs = [torch.randint(1, 10, (2,), generator=generator).tolist() for _ in range(GROUPS * steps)]
    question = "What is {} + {}? Reply with only the number."
    data = Dataset.from_list(
        [{"prompt": [{"role": "user", "content": question.format(a, b)}], "answer": a + b} for a, b in pairs]
    )
    config = GRPOConfig(
        output_dir=str(directory / "trl"),
        per_device_train_batch_size=GROUPS * ROLLOUTS,
        num_generations=ROLLOUTS,
        max_completion_length=NEW_TOKENS,
        temperature=1.0,
        learning_rate=LEARNING_RATE,
        lr_scheduler_type="constant",
        epsilon=0.2,
        epsilon_high=0.28,
        beta=0.0,
        max_grad_norm=1.0,
        max_steps=steps,
        bf16=True,
        use_cpu=True,
        gradient_checkpointing=False,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        model_init_kwargs={"dtype": "float32"},
    )
    trainer = GRPOTrainer(
        model=str(model),
        reward_funcs=reward,
        args=config,
        train_dataset=data,
        processing_class=AutoTokenizer.from_pretrained(model),
        callbacks=[Record()],
    )
    trainer.train()
    return rows


def last_integer(text: str) -> int | None:
    """The last run of digits in ``text``: the reward of the environment ``arithmetic``."""
    import re

    found = re.findall(r"\d+", text)
    return int(found[-1]) if found else None


def summary(rows: list[dict[str, Any]], target: float) -> dict[str, float]:
    """Median seconds between steps, seconds from the first step to the first one at ``target``, and the last reward."""
    gaps = [b["time"] - a["time"] for a, b in pairwise(rows)]
    reached = [row["time"] - rows[0]["time"] for row in rows if row["reward"] >= target]
    return {
        "seconds_per_step": statistics.median(gaps),
        "seconds_to_target": reached[0] if reached else float("nan"),
        "last_reward": rows[-1]["reward"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--target", type=float, default=0.9, help="mean reward of a step to time")
    parser.add_argument("--directory", type=Path, default=Path("runs/against_trl"))
    arguments = parser.parse_args()
    arguments.directory.mkdir(parents=True, exist_ok=True)
    ours = summary(run_afterplay(arguments.directory, arguments.steps), arguments.target)
    theirs = summary(
        run_trl(arguments.directory / "afterplay" / "model", arguments.directory, arguments.steps), arguments.target
    )
    print(f"{'':26}{'Afterplay':>12}{'TRL':>12}{'TRL / ours':>12}")
    for name in ("seconds_per_step", "seconds_to_target", "last_reward"):
        print(f"{name:26}{ours[name]:12.2f}{theirs[name]:12.2f}{theirs[name] / ours[name]:12.2f}")
    (arguments.directory / "result.json").write_text(json.dumps({"afterplay": ours, "trl": theirs}, indent=1))


if __name__ == "__main__":
    main()
