"""``python -m benchmarks.replay_efficiency``; see the package's docstring."""

from __future__ import annotations

import argparse
import signal
import sys
import threading
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path

from benchmarks.replay_efficiency import __doc__ as description
from benchmarks.replay_efficiency.arms import BASE, Job, Protocol, arms_of, jobs_of
from benchmarks.replay_efficiency.measure import Bench, Stopped
from benchmarks.replay_efficiency.picture import draw
from benchmarks.replay_efficiency.records import Result
from benchmarks.replay_efficiency.summary import lower_table, summarise, table
from pipeline.errors import AfterplayError, ConfigurationError
from pipeline.runtime.run_directory import write_bytes_atomically, write_json_atomically


def arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.replay_efficiency",
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    protocol = Protocol()
    parser.add_argument("--directory", type=Path, required=True, help="results and runs; a second call continues there")
    parser.add_argument("--arms", nargs="+", metavar="NAME", help="only these (default: the five and every --extra)")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2, 3, 4])
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="for all arms")
    parser.add_argument("--extra", action="append", nargs="+", default=[], metavar=("NAME", "KEY=VALUE,..."))
    parser.add_argument("--jobs", type=int, default=1, help="runs at once; wall times then disturb each other")
    parser.add_argument("--base", type=Path, default=BASE, help="run file")
    parser.add_argument("--goal", type=float, default=protocol.goal, help="success rate to reach")
    parser.add_argument("--every", type=int, default=protocol.every, help="versions between measurements")
    parser.add_argument("--plays", type=int, default=protocol.plays, help="plays of each task in a measurement")
    parser.add_argument("--steps", type=int, default=protocol.steps, help="updates of a run that never gets there")
    parser.add_argument("--seconds-max", type=float, default=1800.0, help="for one run")
    parser.add_argument("--keep", action="store_true", help="keep the weights of finished runs")
    parser.add_argument("--picture", type=Path, help="where the picture goes (default: in the directory)")
    found = parser.parse_args(argv)
    if not found.jobs > 0 < found.every <= found.steps or found.plays < 1:
        parser.error("expected jobs, every, plays of at least 1, and steps of at least every")
    return found


def run_all(bench: Bench, jobs: Sequence[Job], at_once: int) -> tuple[list[Result], list[str]]:
    """Results in the order of the jobs, and what went wrong with the others."""
    results, faults = [], []
    with ThreadPoolExecutor(at_once) as pool:
        futures: list[tuple[Job, Future[Result]]] = [(job, pool.submit(bench.measure, job)) for job in jobs]
        for job, future in futures:
            try:
                results.append(future.result())
            except Stopped:
                faults.append(f"{job.name}: not measured, the benchmark was stopped")
            except AfterplayError as error:
                print(f"{job.name} FAILED: {error}", flush=True)
                faults.append(f"{job.name}: {str(error).splitlines()[0]}")
            except BaseException:
                bench.stop.set()
                raise
    return results, faults


def main(argv: Sequence[str] | None = None) -> int:
    import torch

    given = arguments(argv)
    torch.set_num_threads(1)
    stop = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stop.set())
    protocol = Protocol(given.goal, given.every, given.plays, given.steps)
    directory = given.directory.absolute()
    try:
        arms = arms_of(given.extra)
        if unknown := [name for name in given.arms or () if name not in arms]:
            raise ConfigurationError(f"--arms {unknown[0]}: there are {', '.join(arms)}")
        chosen = {name: own for name, own in arms.items() if not given.arms or name in given.arms}
        jobs = jobs_of(chosen, given.seeds, given.set, protocol, given.base)
        bench = Bench(directory, given.seconds_max, given.keep, stop)
        for job in jobs:
            bench.kept(job)
    except AfterplayError as error:
        print(error, file=sys.stderr)
        return 2
    results, faults = run_all(bench, jobs, given.jobs)
    if results:
        text = table(results, protocol) + "\n\n" + lower_table(results, protocol)
        print("\n" + text)
        write_json_atomically(
            directory / "results.json", {**summarise(results, protocol), "runs": [asdict(r) for r in results]}
        )
        write_bytes_atomically(directory / "results.md", (text + "\n").encode())
        draw(results, protocol, given.picture or directory / "replay_efficiency.png")
    for fault in faults:
        print(fault, file=sys.stderr)
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
