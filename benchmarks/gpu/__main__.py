"""The command: runs the parts in the order of their worth within the time, and prints and writes what they find."""

from __future__ import annotations

import argparse
import faulthandler
import importlib
import importlib.util
import platform
import subprocess
import time
import tomllib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
import transformers

from benchmarks import gpu
from benchmarks.gpu.bench import Bench
from benchmarks.gpu.report import Facts, Report

ROOT = Path(__file__).parents[2]
IMPORTED_AS = {"pyyaml": "yaml", "pyzmq": "zmq"}
OVERRUN_SECONDS = 20.0
"""A part that still runs this long after the end is cut, with a traceback of where it was."""


@dataclass(frozen=True, slots=True)
class Part:
    """``function``: ``module:name`` of a generator of cases and facts; imported when its turn comes, because packages
    may be missing. ``seconds``: it is skipped where less is left."""

    name: str
    function: str
    seconds: float
    options: dict[str, Any] = field(default_factory=dict)

    def run(self, bench: Bench) -> Iterator[tuple[str, Facts]]:
        module, _, name = self.function.partition(":")
        function: Callable[..., Iterator[tuple[str, Facts]]] = getattr(
            importlib.import_module(f"benchmarks.gpu.{module}"), name
        )
        return function(bench, **self.options)

    @property
    def title(self) -> str:
        return " ".join(map(str, self.options.values())) or self.function.partition(":")[2].replace("_", " ")


def step(shape: str, side: str, seconds: float) -> Part:
    return Part("step", f"steps:{'bare' if side.startswith('bare') else 'learner'}", seconds,
                {"shape": shape, "side": side})  # fmt: skip


PARTS = (
    Part("chip", "chip:limits", 10),
    Part("layouts", "layouts:equality", 20),
    step("1.5b", "learner", 40),
    step("1.5b", "bare_selecting", 30),
    Part("step", "steps:long_rows", 30),
    Part("weights", "weights:publication", 30, {"shape": "1.5b"}),
    Part("ranks", "ranks:one_rank", 20),
    Part("loop", "loop:turns", 60),
    Part("head", "chip:head", 20),
    Part("weights", "weights:turns", 40, {"shape": "1.5b"}),
    Part("kernels", "steps:kernels", 30, {"shape": "1.5b"}),
    step("7b", "learner", 60),
    step("0.5b", "learner", 20),
    step("0.5b", "bare_selecting", 20),
    step("0.5b", "learner_packed", 20),
    step("0.5b", "learner_padded", 20),
    step("0.5b", "bare", 20),
)
SMALL = tuple(part for part in PARTS if part.options.get("shape") != "0.5b")
"""Without a GPU each kind of case once: all shapes are the same there."""


def about(bench: Bench) -> Facts:
    facts: Facts = {"device": platform.processor() or platform.machine()}
    if bench.cuda:
        properties = torch.cuda.get_device_properties(0)
        facts = {
            "device": properties.name,
            "memory_gib": round(properties.total_memory / 2**30),
            "cuda": torch.version.cuda,
        }
    versions = {
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "python": platform.python_version(),
    }
    git = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True)
    shapes = "small" if bench.small else "full"
    return {**facts, **versions, "revision": git.stdout.strip() or "unknown", "shapes": shapes,
            "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M")}  # fmt: skip


def missing_packages() -> list[str]:
    """Dependencies of the project that cannot be imported here."""
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    names = [line.partition(";")[0].partition(">")[0].strip() for line in declared]
    return [name for name in names if importlib.util.find_spec(IMPORTED_AS.get(name, name)) is None]


def run_part(part: Part, bench: Bench, report: Report) -> None:
    """Add what the part finds, or why it found nothing."""
    if bench.seconds_left < (part.seconds if not bench.small else 1.0):
        report.add(part.name, part.title, {"skipped": f"{bench.seconds_left:.0f} s left, it needs {part.seconds:g}"})
        return
    try:
        for case, facts in part.run(bench):
            report.add(part.name, case, facts)
    except ModuleNotFoundError as error:
        report.add(part.name, part.title, {"not_run": f"needs the package {error.name}"})
    except Exception as error:  # out of memory, a missing kernel: the other parts are still worth their time
        report.add(part.name, part.title, {"failed": f"{type(error).__name__}: {error}"[:500]})


def check(bench: Bench, parts: Sequence[Part], path: Path) -> Report:
    report = Report(path, about(bench))
    if missing := missing_packages():
        report.add("packages", "missing", {"names": " ".join(missing), "see": "the docstring of benchmarks.gpu"})
    for part in parts:
        bench.clean()
        run_part(part, bench, report)
    return report


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(gpu.__doc__ or "").split("\n")[0])
    parser.add_argument("--seconds", type=float, default=540.0, help="for everything")
    parser.add_argument("--shapes", choices=["full", "small"], help="default: full on a GPU, else small")
    parser.add_argument("--device", choices=["cpu", "cuda"], help="default: the GPU, if there is one")
    parser.add_argument("--only", nargs="+", choices=sorted({part.name for part in PARTS}), help="parts")
    parser.add_argument("--out", type=Path, default=Path("runs/gpu"), help="folder of gpu.json")
    a = parser.parse_args(arguments)
    device = a.device or ("cuda" if torch.cuda.is_available() else "cpu")
    small = (a.shapes or ("full" if device == "cuda" else "small")) == "small"
    a.out.mkdir(parents=True, exist_ok=True)
    faulthandler.dump_traceback_later(a.seconds + OVERRUN_SECONDS, exit=True)
    transformers.utils.logging.disable_progress_bar()
    bench = Bench(device, small, time.monotonic() + a.seconds)
    parts = [part for part in (SMALL if small else PARTS) if not a.only or part.name in a.only]
    report = check(bench, parts, a.out / "gpu.json")
    faulthandler.cancel_dump_traceback_later()
    bad = [f"{finding['part']} {finding['case']}" for finding in report.findings if "failed" in finding]
    print(f"\n{len(report.findings)} findings in {a.out / 'gpu.json'}" + (f"; failed: {', '.join(bad)}" if bad else ""))
    return 1 if bad else 0


if __name__ == "__main__":
    raise SystemExit(main())
