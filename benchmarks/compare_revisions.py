"""Runs the same benchmarks in two checkouts in turn and prints how much the second costs of the first.

    git worktree add ../before REVISION
    python -m benchmarks.compare_revisions ../before . --rounds 9 --json benchmarks/results/FILE.json

Each round runs every benchmark once in each checkout, in alternating order, so that a machine that gets slower or
faster slows both. A figure's ratio is taken round by round; the table gives the median ratio and its 95 % interval
(percentile bootstrap over rounds). Figures are cost (seconds, CPU time), so a ratio above 1 says that the second is
slower. Both checkouts run under the interpreter of this process.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

SEED = 0
RESAMPLES = 10_000
SECONDS_MAX = 900


@dataclass(frozen=True)
class Benchmark:
    """``arguments`` of the interpreter, and one pattern for each figure. A group named ``rate`` is turned into a cost
    (its reciprocal), one named ``cost`` is one."""

    arguments: tuple[str, ...]
    figures: Mapping[str, str]


NUMBER = r"(?P<{}>[\d,.]+)"
RATE, COST = NUMBER.format("rate"), NUMBER.format("cost")
BENCHMARKS: dict[str, Benchmark] = {
    "transport": Benchmark(
        ("-m", "benchmarks.transport", "--trajectories", "6000", "--rounds", "1", "hub/link + ack", "hub/link + codec"),
        {
            "wall, acknowledged": rf"hub/link \+ ack +{RATE}",
            "CPU, acknowledged": rf"hub/link \+ ack +\S+ +\S+ +{COST}",
            "wall, decoded": rf"hub/link \+ codec +{RATE}",
            "CPU, decoded": rf"hub/link \+ codec +\S+ +\S+ +{COST}",
        },
    ),
    "replay_ingest": Benchmark(
        ("-m", "benchmarks.replay_ingest", "--trajectories", "5000"),
        {"wall, apply": rf"apply {COST} us", "CPU, apply": rf"{COST} us of CPU", "wall, in all": rf"stage +{RATE} /s"},
    ),
    "replay_stage": Benchmark(
        ("-m", "benchmarks.replay_stage", "--reopen", "5000", "--folder", "{scratch}"),
        {"wall, durable ingest": rf"each \| {RATE} /s", "wall, reopening": rf"5,000 \| {COST} s"},
    ),
    "learner_step": Benchmark(
        ("-m", "benchmarks.learner_step", "--layers", "2", "--groups", "2", "--rollouts", "4", "--steps", "5",
         "--sides", "learner", "--directory", "{scratch}"),
        {"wall, step": rf"learner +{COST}", "CPU, step": rf"learner +\S+ +{COST}"},
    ),
    "actor_turns": Benchmark(
        ("-m", "benchmarks.actor_turns"),
        {f"CPU, turn, {n:,} episodes": rf"\s{n} +{COST}" for n in (1, 100, 2000)},
    ),
    "actor_scale": Benchmark(
        ("-m", "benchmarks.actor_scale", "--episodes", "100", "--latency", "0.4"),
        {
            figure: rf"{loop}{column}"
            for loop in ("multi_turn", "tool_agent")
            for figure, column in (
                (f"CPU, {loop}", rf" +\S+ +\S+ +{COST}"),
                (f"wall, {loop}", rf" +\S+ +\S+ +\S+ +\S+ +{RATE}"),
            )
        },
    ),
}  # fmt: skip


def measure(benchmark: Benchmark, checkout: Path) -> dict[str, float]:
    """One run's figures, as costs. Raises :class:`RuntimeError` with the output where a figure is missing."""
    with tempfile.TemporaryDirectory() as scratch:
        arguments = [part.replace("{scratch}", scratch) for part in benchmark.arguments]
        environment = {**os.environ, "PYTHONPATH": str(checkout)}
        done = subprocess.run(
            [sys.executable, *arguments], cwd=checkout, env=environment, capture_output=True, text=True,
            timeout=SECONDS_MAX, stdin=subprocess.DEVNULL, check=False,
        )  # fmt: skip
    output = done.stdout + done.stderr
    figures = {}
    for name, pattern in benchmark.figures.items():
        found = re.search(pattern, output)
        if done.returncode or found is None:
            raise RuntimeError(f"{arguments} in {checkout} printed no figure {name!r}:\n{output[-3000:]}")
        kind, text = next(iter(found.groupdict().items()))
        value = float(text.replace(",", ""))
        figures[name] = 1 / value if kind == "rate" else value
    return figures


def interval(ratios: Sequence[float]) -> tuple[float, float, float]:
    """Median of the ratios, and the 95 % interval of that median by resampling rounds."""
    values = np.asarray(ratios)
    generator = np.random.default_rng(SEED)
    medians = np.median(generator.choice(values, (RESAMPLES, len(values))), axis=1)
    low, high = np.percentile(medians, [2.5, 97.5])
    return float(np.median(values)), float(low), float(high)


def revision(checkout: Path) -> str:
    command = ["git", "-C", str(checkout), "rev-parse", "--short", "HEAD"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("before", type=Path, help="a checkout of the older revision")
    parser.add_argument("after", type=Path, help="a checkout of the newer revision")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--benchmarks", nargs="+", choices=sorted(BENCHMARKS), default=list(BENCHMARKS))
    parser.add_argument("--json", type=Path, help="every figure of every round; written after each round")
    options = parser.parse_args()
    sides = {"before": options.before.resolve(), "after": options.after.resolve()}
    rounds: list[dict[str, dict[str, dict[str, float]]]] = []
    document: dict[str, Any] = {
        "revisions": {side: revision(path) for side, path in sides.items()}, "python": platform.python_version(),
        "machine": f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores", "rounds": rounds,
        "commands": {name: " ".join(BENCHMARKS[name].arguments) for name in options.benchmarks},
    }  # fmt: skip
    for number in range(options.rounds):
        found: dict[str, dict[str, dict[str, float]]] = {name: {} for name in options.benchmarks}
        for name in options.benchmarks:
            for side in sorted(sides, reverse=number % 2 == 0):
                found[name][side] = measure(BENCHMARKS[name], sides[side])
        rounds.append(found)
        print(f"round {number + 1} of {options.rounds} done", file=sys.stderr, flush=True)
        if options.json:
            options.json.write_text(json.dumps(document, indent=1) + "\n")
    print(f"{'cost, after / before':36}{'median':>8}{'95 % interval':>18}")
    for name in options.benchmarks:
        for figure in BENCHMARKS[name].figures:
            pairs = [found[name] for found in rounds]
            middle, low, high = interval([pair["after"][figure] / pair["before"][figure] for pair in pairs])
            print(f"{name + ': ' + figure:36}{middle:8.3f}{low:10.3f} to {high:.3f}")


if __name__ == "__main__":
    main()
