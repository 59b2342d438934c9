"""Afterplay against TRL's ``GRPOTrainer``: reward over steps, tokens and seconds, and the price of asynchrony.

::

    python -m benchmarks.against_trl --directory against_trl              # runs or continues; an hour on two cores
    python -m benchmarks.against_trl --directory against_trl --report     # what is known by now, and a picture

Protocol. SmolLM2-135M on "What is a + b?", one attempt, 8 tasks of 8 rollouts a step, at most 24 new tokens,
temperature 1, AdamW at 2e-5 without weight decay, clip 0.2 and 0.28, advantage (R - mean) / std, no KL, the gradient's
norm clipped at 1. Seed s has the tasks ``1000 s, 1000 s + 1, ...`` of the environment ``arithmetic``, in this order, on
every side. The learning rate is the same on every side and tuned on none.

Arms: ``staleness0``, ``staleness1`` and ``staleness4`` are Afterplay with that ``staleness.max`` and a vLLM server;
``trl`` generates with transformers inside its trainer, its form for a machine without a GPU, and computes in the type
that Afterplay chooses on this machine. One run at a time, on all cores; the arms of a seed follow each other.

Measures. Reward is the mean over the rollouts that a step trains on. *Lag* is the number of steps by which an arm's
rewards are behind those of ``staleness0``: the difference of the sums of rewards over all steps, divided by
``staleness0``'s gain from the first quarter of the steps to the last. Seconds count from the first step's end, which
pays for loading and compiling, so they belong to steps 2 to N. The goal is a mean reward of 0.8 over two steps in a
row. Intervals are of Student's t over the seeds.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from actors.adapters.games import Arithmetic
from pipeline.config.learner import LearnerConfig
from pipeline.runtime.run_directory import write_json_atomically
from pipeline.schema import Task
from pipeline.views.comparison import t_interval

GROUPS, ROLLOUTS, NEW_TOKENS = 8, 8, 24
LEARNING_RATE = 2e-5
GOAL = 0.8
RUN_SECONDS_MAX = 3600
ARMS = ("staleness0", "staleness1", "trl", "staleness4")
UNITS = ("steps", "tokens", "seconds")
Steps = list[dict[str, float]]
"""Of each step: ``time`` in seconds, ``reward``, and ``tokens``: sampled ones of its rollouts."""


def first_task(seed: int) -> int:
    return 1000 * seed


def run_afterplay(directory: Path, seed: int, steps: int, staleness: int) -> Steps:
    """Steps of ``afterplay run configs/quickstart.yaml`` with the settings of the protocol, by its metrics."""
    overrides = [
        f"run.directory={directory}",
        "run.name=afterplay",
        f"run.total_steps={steps}",
        f"run.seed={seed}",
        f"environments.arithmetic.seed={first_task(seed)}",
        "environments.arithmetic.options.attempts=1",
        f"sampling.max_tokens={NEW_TOKENS}",
        f"staleness.max={staleness}",
        f"actor.concurrency={GROUPS * ROLLOUTS}",
        f"learner.learning_rate={LEARNING_RATE}",
        "learner.weight_decay=0",
        "checkpoint.at_end=false",
        "checkpoint.every=1000",
    ]
    command = [sys.executable, "-m", "pipeline.cli.app", "run", "configs/quickstart.yaml", "--fresh"]
    for override in overrides:
        command += ["--set", override]
    subprocess.run(command, check=True, timeout=RUN_SECONDS_MAX, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
    rows = map(json.loads, (directory / "afterplay" / "metrics.jsonl").read_text().splitlines())
    return [{"time": r["time"], "reward": r["reward_mean"], "tokens": r["sampled_tokens_fresh"]} for r in rows]


def run_trl(directory: Path, seed: int, steps: int) -> Steps:
    """The same with ``GRPOTrainer``, in a process of its own, on the model that a run of Afterplay has prepared."""
    command = [sys.executable, "-m", "benchmarks.against_trl", "--directory", str(directory), "--trl", str(seed)]
    subprocess.run([*command, "--steps", str(steps)], check=True, timeout=RUN_SECONDS_MAX, stdout=subprocess.DEVNULL)
    found: Steps = json.loads((directory / "trl.json").read_text())
    return found


def train_with_trl(directory: Path, seed: int, steps: int) -> Steps:
    import torch
    from datasets import Dataset
    from transformers import AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    from learner.policy.policy import compute_dtype

    rows: Steps = []
    environment = Arithmetic(attempts=1)
    episodes = [environment.start(Task(f"t{i}", "arithmetic", first_task(seed) + i)) for i in range(GROUPS * steps)]
    data = Dataset.from_list(
        [{"prompt": [{"role": "user", "content": e.messages[0].content}], "index": i} for i, e in enumerate(episodes)]
    )

    class Record(TrainerCallback):  # type: ignore[misc]
        def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **_: Any) -> None:
            if logs and "reward" in logs:
                tokens = logs["completions/mean_length"] * GROUPS * ROLLOUTS
                rows.append({"time": time.time(), "reward": logs["reward"], "tokens": tokens})

    def reward(completions: Sequence[Any], index: Sequence[int], **_: Any) -> list[float]:
        def of(completion: Any, i: int) -> float:
            task = Task(f"t{i}", "arithmetic", first_task(seed) + i)
            return environment.start(task).step(completion[0]["content"]).reward

        return [of(c, i) for c, i in zip(completions, index, strict=True)]

    model = directory.parent.parent / "model"
    config = GRPOConfig(
        output_dir=str(directory / "trl"),
        per_device_train_batch_size=GROUPS * ROLLOUTS,
        num_generations=ROLLOUTS,
        max_completion_length=NEW_TOKENS,
        temperature=1.0,
        learning_rate=LEARNING_RATE,
        lr_scheduler_type="constant",
        weight_decay=0.0,
        epsilon=0.2,
        epsilon_high=0.28,
        beta=0.0,
        max_grad_norm=1.0,
        max_steps=steps,
        bf16=compute_dtype(LearnerConfig(), torch.device("cpu")) == torch.bfloat16,
        use_cpu=True,
        gradient_checkpointing=False,
        shuffle_dataset=False,
        seed=seed,
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


def measure(directory: Path, arm: str, seed: int, steps: int) -> None:
    """One run, unless its result is there."""
    result = directory / "results" / f"{arm}-{seed}.json"
    if result.exists():
        return
    work = directory / "runs" / f"{arm}-{seed}"
    work.mkdir(parents=True, exist_ok=True)
    begun = time.monotonic()
    if arm == "trl":
        made = run_trl(work, seed, steps)
    else:
        made = run_afterplay(work, seed, steps, int(arm.removeprefix("staleness")))
        if not (directory / "model").exists():
            (work / "afterplay" / "model").rename(directory / "model")
    shutil.rmtree(work)
    if len(made) != steps:
        raise RuntimeError(f"expected {steps} steps of {arm} with seed {seed}, got {len(made)}")
    result.parent.mkdir(exist_ok=True)
    write_json_atomically(result, {"arm": arm, "seed": seed, "steps": made})
    print(f"{arm} {seed}: {time.monotonic() - begun:.0f} s, rewards " + _joined(s["reward"] for s in made), flush=True)


def _joined(values: Iterable[float]) -> str:
    return " ".join(f"{v:.2f}" for v in values)


def results(directory: Path) -> dict[str, dict[int, Steps]]:
    """Steps by arm and seed."""
    found: dict[str, dict[int, Steps]] = {}
    for arm in ARMS:
        for file in sorted((directory / "results").glob(f"{arm}-*.json")):
            run = json.loads(file.read_text())
            found.setdefault(arm, {})[run["seed"]] = run["steps"]
    return found


def to_goal(steps: Steps) -> dict[str, float] | None:
    """Steps, sampled tokens and seconds until the second of two steps in a row at the goal; None: never."""
    for k in range(1, len(steps)):
        if min(steps[k - 1]["reward"], steps[k]["reward"]) >= GOAL:
            tokens = sum(s["tokens"] for s in steps[: k + 1])
            return {"steps": k + 1, "tokens": tokens, "seconds": steps[k]["time"] - steps[0]["time"]}
    return None


def lag(arm: Steps, base: Steps) -> float:
    """Steps by which the rewards of ``arm`` are behind those of ``base``."""
    quarter = max(1, len(base) // 4)
    gain = statistics.fmean(s["reward"] for s in base[-quarter:]) - statistics.fmean(
        s["reward"] for s in base[:quarter]
    )
    return sum(b["reward"] - a["reward"] for a, b in zip(arm, base, strict=True)) / gain


def report(found: dict[str, dict[int, Steps]]) -> str:
    """A line for each arm: means over the seeds with half the width of their intervals."""
    half = len(next(iter(next(iter(found.values())).values()))) // 2
    titles = (f"reward at {half}", "last 4", "s a step", "lag, steps", *(f"{u} to {GOAL}" for u in UNITS), "reached")
    lines = [f"{'':12}" + "".join(f"{title:>18}" for title in titles)]
    for arm, seeds in found.items():
        runs, base = list(seeds.values()), found.get("staleness0", {})
        goals = [goal for run in runs if (goal := to_goal(run)) is not None]
        columns = [
            [statistics.fmean(s["reward"] for s in run[half - 1 : half + 1]) for run in runs],
            [statistics.fmean(s["reward"] for s in run[-4:]) for run in runs],
            [(run[-1]["time"] - run[0]["time"]) / (len(run) - 1) for run in runs],
            [lag(run, base[seed]) for seed, run in seeds.items() if seed in base],
            *([goal[unit] for goal in goals] for unit in UNITS),
        ]
        lines.append(
            f"{arm:12}"
            + "".join(f"{_told(column):>18}" for column in columns)
            + f"{len(goals)} of {len(runs)}".rjust(18)
        )
    return "\n".join(lines)


def _told(values: Sequence[float]) -> str:
    if not values:
        return "-"
    middle, half = t_interval(values)
    digits = 0 if middle >= 100 else 1 if middle >= 10 else 2
    return f"{middle:,.{digits}f}" + (f" ± {half:,.{digits}f}" if len(values) > 1 else "")


def draw(found: dict[str, dict[int, Steps]], picture: Path) -> None:
    """Mean reward over steps, tokens and seconds; bands are the intervals of the mean."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib.figure import Figure

    colours = {"staleness0": "#2a6f97", "staleness1": "#81b29a", "staleness4": "#e0a458", "trl": "#5c6b73"}
    names = {"trl": "TRL"} | {f"staleness{n}": f"Afterplay, staleness.max {n}" for n in (0, 1, 4)}
    figure = Figure(figsize=(12, 3.6), dpi=110, layout="constrained", facecolor="white")
    for axis, unit in zip(figure.subplots(1, 3, sharey=True), UNITS, strict=True):
        for arm, seeds in found.items():
            runs = list(seeds.values())
            at = {
                "steps": lambda run, k: k + 1,
                "tokens": lambda run, k: sum(s["tokens"] for s in run[: k + 1]),
                "seconds": lambda run, k: run[k]["time"] - run[0]["time"],
            }[unit]
            x = [statistics.fmean(at(run, k) for run in runs) for k in range(len(runs[0]))]
            told = [t_interval([run[k]["reward"] for run in runs]) for k in range(len(runs[0]))]
            axis.plot(x, [m for m, _ in told], color=colours[arm], lw=1.8, label=names[arm])
            if len(runs) > 1:
                low, high = [m - h for m, h in told], [m + h for m, h in told]
                axis.fill_between(x, low, high, color=colours[arm], alpha=0.15, lw=0)
        axis.set_xlabel(
            {"tokens": "sampled tokens of trained rollouts", "seconds": "seconds since step 1"}.get(unit, unit)
        )
        axis.grid(alpha=0.25)
        axis.set_ylim(0, 1)
    figure.axes[0].set_ylabel("reward")
    figure.axes[0].legend(fontsize=8, loc="upper left")
    picture.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(picture, format="png")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    parser.add_argument("--directory", type=Path, default=Path("runs/against_trl"))
    parser.add_argument("--report", action="store_true", help="only tell what is known by now")
    parser.add_argument("--trl", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    directory = arguments.directory.resolve()
    if arguments.trl is not None:
        write_json_atomically(directory / "trl.json", train_with_trl(directory, arguments.trl, arguments.steps))
        return
    if not arguments.report:
        for seed in arguments.seeds:
            for arm in ARMS:
                measure(directory, arm, seed, arguments.steps)
    found = results(directory)
    if not found:
        raise SystemExit(f"no results in {directory}")
    print(report(found))
    draw(found, directory / "against_trl.png")


if __name__ == "__main__":
    main()
