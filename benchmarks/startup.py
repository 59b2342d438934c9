"""Time from ``afterplay run`` to each phase of its start, and the CPU time that its processes took until then.

    python -m benchmarks.startup --file configs/quickstart.yaml --starts 2

The first start begins without a cached model, the others find it in the cache. Prints a table of seconds.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path

import psutil

from pipeline.config.load import load
from tests.support.run_handle import RunHandle, start_run

PHASES = ("model prepared", "engine ready", "first rollout", "first step", "third step")
SECONDS_MAX = 600.0


def phases_of(run: RunHandle, begun: float) -> dict[str, tuple[float, float]]:
    """Seconds since ``begun`` and CPU seconds of all processes, at the end of each phase."""
    directory = run.directory

    def engine_ready() -> bool:
        config = load(directory.config_file, environment={})
        try:
            with urllib.request.urlopen(f"{config.engine.addresses()[0]}/health", timeout=2) as answer:
                return bool(answer.status == 200)
        except OSError:
            return False

    def rollouts() -> bool:
        return directory.store_file.is_file() and sum(run.ledger().trajectories.values()) > 0

    looks: dict[str, Callable[[], bool]] = {
        "model prepared": (directory.model / "config.json").exists,
        "engine ready": engine_ready,
        "first rollout": rollouts,
        "first step": lambda: len(run.steps()) >= 1,
        "third step": lambda: len(run.steps()) >= 3,
    }
    ends = {}
    for phase in PHASES:
        run.until(phase, looks[phase], SECONDS_MAX)
        ends[phase] = (time.monotonic() - begun, cpu_seconds(run.process.pid))
    return ends


def cpu_seconds(pid: int) -> float:
    """CPU time of a process and of all its descendants, those that have ended included."""
    total = 0.0
    root = psutil.Process(pid)
    for process in [root, *root.children(recursive=True)]:
        try:
            times = process.cpu_times()
        except psutil.NoSuchProcess:
            continue
        total += times.user + times.system + times.children_user + times.children_system
    return total


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--file", type=Path, default=Path("configs/quickstart.yaml"))
    parser.add_argument("--starts", type=int, default=2)
    parser.add_argument("--cache", type=Path, help="Folder of the cache; default: an empty one.")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        os.environ["AFTERPLAY_CACHE"] = str(options.cache or Path(scratch) / "cache")
        print(f"{'':14}" + "".join(f"{phase:>20}" for phase in PHASES))
        for number in range(1, options.starts + 1):
            load_before = os.getloadavg()[0]
            begun = time.monotonic()
            with start_run(options.file, Path(scratch), f"start-{number}") as run:
                ends = phases_of(run, begun)
            cells = "".join(f"{f'{wall:.1f} s ({cpu:.0f} CPU)':>20}" for wall, cpu in ends.values())
            print(f"start {number:<8}{cells}   load before {load_before:.1f}", flush=True)


if __name__ == "__main__":
    main()
