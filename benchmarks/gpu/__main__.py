"""The command: walks the cases in order, each in a process and a share of the time, and writes what they find."""

from __future__ import annotations

import argparse
import json
import os
import platform
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
import transformers

from benchmarks import gpu
from benchmarks.gpu.case import MARK, Case, Facts, Machine

ROOT = Path(__file__).parents[2]
SECONDS_MIN = 5.0
"""Time left with which no other case begins."""
LORA = {"lora": {"rank": 16, "frozen_dtype": "bfloat16"}}
LONG = {"groups": 4, "rollouts": 1, "prompt": 64, "response": 10**9, "longest": 16_384}
GROUPS = {"groups": 8, "rollouts": 8, "prompt": 400, "response": 800, "longest": 4096}
FEW = {**GROUPS, "groups": 3}


def study(name: str, weight: float, shape: str, rows: dict[str, int], settings: Facts, **options: bool) -> Case:
    options_all = {"shape": shape, "rows": rows, "settings": settings, **options}
    return Case(name, "benchmarks.gpu.learner:study", weight, options_all)


MODELS = (
    study("0.6b-16k", 180, "0.6b", LONG, {}, checkpointing=True),
    study("1.7b-4k", 180, "1.7b", GROUPS, {}),
    study("7b-lora", 240, "7b", FEW, LORA, checkpointing=True),
    study("7b-full", 240, "7b", FEW, {"optimizer_dtype": "bfloat16"}, checkpointing=True, if_fits=True),
    study("moe", 120, "moe", GROUPS, {}),
)
CASES = (
    *MODELS,
    Case("loop", "benchmarks.gpu.loop:turns", 300),
    Case("layouts", "benchmarks.gpu.layouts:equality", 120),
    Case("ranks", "benchmarks.gpu.ranks:one_rank", 120),
)
COMPILED = tuple(replace(c, name=f"{c.name}-compiled", options={**c.options, "compiled": True}) for c in MODELS)


class Results:
    """Parts and end of each case, in a file that is complete after every part."""

    def __init__(self, path: Path, about: Facts) -> None:
        """Raises :class:`SystemExit` where the file is of another machine."""
        self._path = path
        held = json.loads(path.read_text()) if path.is_file() else {"about": about, "cases": {}}
        differing = [name for name in ("device", "shapes") if held["about"][name] != about[name]]
        if differing:
            raise SystemExit(f"{path} has another {' and '.join(differing)} than this machine: give another --out")
        self.cases: dict[str, dict[str, Any]] = held["cases"]
        self._about = about

    def begin(self, case: str) -> None:
        self.cases[case] = {"revision": self._about["revision"], "parts": {}}

    def add(self, case: str, part: str, facts: Facts) -> None:
        self.cases[case]["parts"][part] = facts
        self._write()

    def end(self, case: str, how: str) -> None:
        self.cases[case]["ended"] = how
        self._write()

    def ended(self, case: str) -> bool:
        """False for a case that was interrupted with the walk."""
        return "ended" in self.cases.get(case, {})

    def failures(self) -> list[str]:
        found = [f"{name}: {case['ended']}" for name, case in self.cases.items() if case.get("ended", "done") != "done"]
        parts = (
            (f"{name} {part}", facts) for name, case in self.cases.items() for part, facts in case["parts"].items()
        )
        return found + [f"{where}: {facts['failed']}" for where, facts in parts if "failed" in facts]

    def _write(self) -> None:
        scratch = self._path.with_suffix(".part")
        scratch.write_text(json.dumps({"about": self._about, "cases": self.cases}, indent=1) + "\n")
        os.replace(scratch, self._path)


class Walk:
    """Runs cases one after the other until ``seconds`` are over. What a case leaves of its share is for the others."""

    def __init__(
        self,
        results: Results,
        machine: Machine,
        folder: Path,
        seconds: float,
        clock: Callable[[], float] = time.monotonic,
        timer: Callable[[float, Callable[[], None]], threading.Timer] = threading.Timer,
    ) -> None:
        self._results = results
        self._machine = machine
        self._folder = folder
        self._clock = clock
        self._timer = timer
        self._end = clock() + seconds

    def run(self, cases: Sequence[Case]) -> None:
        for i, case in enumerate(cases):
            left = self._end - self._clock()
            if left < SECONDS_MIN:
                print(f"the time is over; the same command goes on with: {', '.join(c.name for c in cases[i:])}")
                return
            self._one(case, left * case.weight / sum(c.weight for c in cases[i:]))

    def _one(self, case: Case, seconds: float) -> None:
        print(f"\n{case.name}, at most {seconds:.0f} s", flush=True)
        self._results.begin(case.name)
        arguments = [case.function, case.options, asdict(replace(self._machine, seconds=seconds))]
        command = [sys.executable, "-m", "benchmarks.gpu.case", json.dumps(arguments)]
        late = threading.Event()
        log = self._folder / f"{case.name}.log"
        with (
            log.open("w") as errors,
            subprocess.Popen(command, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, errors="replace",
                             stderr=errors, start_new_session=True) as process,
        ):  # fmt: skip

            def stop() -> None:
                late.set()
                kill_session(process)

            timer = self._timer(seconds, stop)
            timer.start()
            try:
                for line in process.stdout or ():
                    if line.startswith(MARK):
                        part, facts = json.loads(line.removeprefix(MARK))
                        self._results.add(case.name, part, facts)
                        print(f"  {part}: {shown(facts)}", flush=True)
                code = process.wait()
            finally:
                timer.cancel()
                kill_session(process)
        lines = log.read_text(errors="replace").strip().splitlines()
        failure = f"failed with exit code {code}: {lines[-1][:500] if lines else ''} ({log})"
        how = "done" if code == 0 else f"not done within its {seconds:.0f} s ({log})" if late.is_set() else failure
        self._results.end(case.name, how)
        print(f"  {how}", flush=True)


def kill_session(process: subprocess.Popen[str]) -> None:
    """The process and what it has started."""
    with suppress(ProcessLookupError, PermissionError):  # macOS refuses where only zombies are left
        os.killpg(process.pid, signal.SIGKILL)


def shown(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name.replace('_', ' ')} {shown(v)}" for name, v in value.items() if name != "longest")
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"
    return str(value)


def table(cases: dict[str, dict[str, Any]]) -> list[str]:
    lines = [
        "| model | predicted GiB | measured GiB | MFU | tokens/s | of the bare step | published in s |",
        "|---" * 7 + "|",
    ]
    for name, case in cases.items():
        parts = case["parts"]
        if "predicted" not in parts:
            continue
        step, published = parts.get("learner", {}), parts.get("publication", {})
        bare = cases.get(name.removesuffix("-compiled"), case)["parts"].get("bare", {})
        rate, other = step.get("tokens_per_second"), bare.get("tokens_per_second")
        seconds = sum(value for part, value in published.items() if part.endswith("_seconds"))
        cells = [parts["predicted"]["gib"], step.get("gib"), step.get("mfu"), rate, rate and other and rate / other,
                 seconds or None]  # fmt: skip
        lines.append(f"| {' | '.join([name, *('–' if cell is None else shown(cell) for cell in cells)])} |")
    return lines


def about(machine: Machine) -> Facts:
    revision = ""
    with suppress(OSError):  # a machine that was lent may have no git
        command = ["git", "rev-parse", "--short", "HEAD"]
        revision = subprocess.run(command, cwd=ROOT, capture_output=True, text=True).stdout.strip()
    return {
        "device": torch.cuda.get_device_name() if machine.cuda else platform.processor() or platform.machine(),
        "shapes": "small" if machine.small else "full",
        "cuda": torch.version.cuda,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "python": platform.python_version(),
        "revision": revision or "unknown",
        "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M"),
    }


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(gpu.__doc__ or "").split("\n")[0])
    parser.add_argument("--minutes", type=float, default=25.0, help="for all cases of this call")
    parser.add_argument("--only", nargs="+", choices=[c.name for c in (*CASES, *COMPILED)], metavar="CASE",
                        help="these, also where they have been run: %(choices)s")  # fmt: skip
    parser.add_argument("--compile", action="store_true", help="torch.compile of the decoder layers: models once more")
    parser.add_argument("--shapes", choices=["full", "small"], help="default: full on a GPU, else small")
    parser.add_argument("--device", choices=["cpu", "cuda"], help="default: the GPU, if there is one")
    parser.add_argument("--out", type=Path, default=Path("runs/gpu"), help="folder of gpu.json and the cases' logs")
    a = parser.parse_args(arguments)
    device = a.device or ("cuda" if torch.cuda.is_available() else "cpu")
    machine = Machine(device, small=(a.shapes or ("full" if device == "cuda" else "small")) == "small")
    a.out.mkdir(parents=True, exist_ok=True)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    results = Results(a.out / "gpu.json", about(machine))
    cases = [c for c in (*CASES, *COMPILED) if a.only and c.name in a.only]
    if not a.only:
        cases = [c for c in (*CASES, *(COMPILED if a.compile else ())) if not results.ended(c.name)]
    Walk(results, machine, a.out, 60 * a.minutes).run(cases)
    print("\n" + "\n".join(table(results.cases)))
    failures = results.failures()
    print("\n".join(("", *failures, f"{len(results.cases)} cases in {a.out / 'gpu.json'}")))
    return 1 if failures else 0


if __name__ == "__main__":
    raise SystemExit(main())
