"""Study of the tokens that replay saves: every arm with its own tuned learning rate, on seeds that tuning has not seen.

::

    python -m benchmarks.replay_study --directory study --jobs 2           # all of it, days on two cores
    python -m benchmarks.replay_study --directory study --families locks --jobs 2 --minutes 50
    python -m benchmarks.replay_study --directory study --report           # what is known by now

``benchmarks/replay_study.yaml`` is the protocol: arms, seeds, order and analysis, written before the first run. A
finished run is one JSON file in ``DIRECTORY/FAMILY/results`` and is not made again, so the study can be stopped at any
time and continued. ``DIRECTORY/FAMILY.json`` and a picture beside it have what is known by then. Runs are measured as
:mod:`benchmarks.replay_efficiency` says. Run it from one revision, and name that with the results: a run that was made
with other settings is refused.
"""

from __future__ import annotations

import argparse
import math
import signal
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeVar

import yaml
from pydantic import ConfigDict, Field
from pydantic.dataclasses import dataclass

from benchmarks.replay_efficiency.arms import Job, Protocol, jobs_of
from benchmarks.replay_efficiency.measure import Bench
from benchmarks.replay_efficiency.picture import draw
from benchmarks.replay_efficiency.records import Point, Result, hit_version, on_held_out
from pipeline.config import RunConfig
from pipeline.config.load import load
from pipeline.errors import AfterplayError
from pipeline.runtime.run_directory import write_json_atomically
from pipeline.views.comparison import QUANTITIES, Cost, ratio_of
from tests.support.fork_server import ForkServer

PROTOCOL = Path(__file__).with_suffix(".yaml")
RATES_BOUND = (1 / 16, 16.0)
"""Smallest and largest multiple of a run file's learning rate to which a grid is extended."""
LOWER_GOALS = (0.2, 0.4, 0.6)
"""Success rates for which the tokens are compared as well, to see where on the way they are spent."""
TRIES = 2
"""Of a run that fails, before the study continues without it; the next call tries it again."""
_STRICT = ConfigDict(extra="forbid")
Name = TypeVar("Name", str, float)


@dataclass(config=_STRICT, frozen=True)
class Arm:
    set: tuple[str, ...] = ()
    groups: float = 1.0
    """Multiple of the run file's ``groups.groups_per_step``."""
    rollouts: float = 1.0
    """Multiple of the run file's ``groups.n_rollout``."""
    rival: bool = False
    """Without replay: the best of these is the base, which the other arms are compared with."""


@dataclass(config=_STRICT, frozen=True)
class Family:
    """One run file and what is asked about it."""

    file: Path
    steps: int
    """Updates of a run of ``off`` that never gets there. An arm whose updates generate half as much has twice as
    many, and is measured after twice as many: every arm may generate the same number of tokens."""
    every: int
    """Updates of ``off`` between two measurements."""
    goal: float
    """Success rate to reach."""
    arms: tuple[str, ...]
    rates: tuple[float, ...]
    """First grid of multiples of the run file's learning rate."""
    tuning_seeds: tuple[int, ...]
    seeds: tuple[int, ...]
    first: dict[str, tuple[float, ...]] = Field(default_factory=dict)
    """First grids of arms that have another one than ``rates``."""
    fixed: dict[str, float] = Field(default_factory=dict)
    """Rates of arms that count as their best ones, whatever tuning chooses."""
    set: tuple[str, ...] = ()
    plays: int = 1
    """Plays of each task in a measurement."""
    held_out: int = 0
    """Held-out tasks that are measured beside in the comparison; 0: none."""
    evaluated: bool = False
    """Measured by the runs' own evaluations on held-out tasks."""
    losers: bool = True
    """Also compare the rivals that tuning did not choose."""
    jobs_max: int | None = None
    """Runs at once, at most."""


@dataclass(config=_STRICT, frozen=True)
class Plan:
    """The protocol."""

    seconds_max: float
    """For one run."""
    arms: dict[str, Arm]
    families: dict[str, Family] = Field(min_length=1)


def read_plan(file: Path = PROTOCOL) -> Plan:
    return Plan(**yaml.safe_load(file.read_text()))


def best(results: Mapping[Name, Sequence[Result]]) -> Name:
    """The name under which most runs reach the goal; among equals that with the smallest geometric mean of tokens."""

    def rank(name: Name) -> tuple[int, float]:
        runs = results[name]
        return -sum(r.hit for r in runs), statistics.fmean(math.log(max(1, r.tokens)) for r in runs)

    return min(results, key=rank)


def cost(result: Result) -> Cost:
    return Cost(result.tokens, result.updates, result.seconds, result.hit)


def cost_until(goal: float, points: Sequence[Point]) -> Cost:
    """Cost until the goal is reached by these measurements."""
    hit = hit_version(points, goal)
    until = next((p for p in points if p.version == hit), points[-1])
    return Cost(until.tokens, until.version, until.seconds, hit is not None)


def generated(config: RunConfig) -> float:
    """Rollouts that an update generates once replay has stored groups."""
    return config.groups.trajectories_per_step * (1 - config.replay.task_ratio if config.replay.enabled else 1)


class Runs:
    """Runs of one family: what is there, and what is still to be made."""

    def __init__(
        self,
        plan: Plan,
        name: str,
        directory: Path,
        stop: threading.Event,
        arms: Sequence[str] | None = None,
        server: ForkServer | None = None,
    ) -> None:
        """``arms``: only these; None: all. ``server`` starts the processes of runs whose engine is embedded."""
        self.family = plan.families[name]
        self.arms = {arm: plan.arms[arm] for arm in self.family.arms if arms is None or arm in arms}
        server = None if self.family.evaluated else server
        self.bench = Bench(directory / name, plan.seconds_max, stop, server)
        self.file = load(self.family.file, (*self.family.set, "replay.enabled=false"))
        self._jobs: dict[tuple[str, float, bool], list[Job]] = {}

    def jobs(self, arm: str, rate: float, *, tuning: bool) -> list[Job]:
        if (arm, rate, tuning) not in self._jobs:
            family, groups, changed = self.family, self.file.groups, self.arms[arm]
            own = [
                *changed.set,
                f"groups.groups_per_step={groups.groups_per_step * changed.groups:g}",
                f"groups.n_rollout={groups.n_rollout * changed.rollouts:g}",
                f"learner.learning_rate={self.file.learner.learning_rate * rate:g}",
            ]
            less = generated(self.file) / generated(load(family.file, (*family.set, *own)))
            steps, every = round(family.steps * less), round(family.every * less)
            if family.evaluated:
                own.append(f"evaluation.every={every}")
            held_out = 0 if tuning else family.held_out
            protocol = Protocol(family.goal, every, family.plays, steps, held_out, family.evaluated)
            seeds = family.tuning_seeds if tuning else family.seeds
            label = f"{arm}.tune{rate:g}" if tuning else arm
            self._jobs[arm, rate, tuning] = jobs_of({label: tuple(own)}, seeds, family.set, protocol, family.file)
        return self._jobs[arm, rate, tuning]

    def finished(self, jobs: Sequence[Job]) -> list[Result]:
        return [r for job in jobs if (r := self.bench.kept(job)) is not None]

    def tuning(self, arm: str) -> dict[float, list[Result]]:
        """Finished tuning runs by rate, smallest first. The grid grows by factors of 2, within :data:`RATES_BOUND`,
        while it is finished and its best rate is at an edge."""
        rates = sorted(self.family.first.get(arm, self.family.rates))
        while True:
            found = {rate: self.finished(self.jobs(arm, rate, tuning=True)) for rate in rates}
            if self._open(found):
                return found
            chosen = self._best_rate(arm, found)
            if rates[0] < chosen < rates[-1] or len(rates) == 1:
                return found
            wider = rates[0] / 2 if chosen <= rates[0] else rates[-1] * 2
            if not RATES_BOUND[0] <= wider <= RATES_BOUND[1]:
                return found
            rates = sorted([*rates, wider])

    def chosen(self, arm: str) -> float | None:
        """The arm's rate; None: its tuning is not finished."""
        found = self.tuning(arm)
        return None if self._open(found) else self._best_rate(arm, found)

    def _best_rate(self, arm: str, found: Mapping[float, Sequence[Result]]) -> float:
        return self.family.fixed.get(arm) or best(found)

    def _open(self, found: Mapping[float, Sequence[Result]]) -> list[float]:
        """Rates whose unfinished runs can still change which one is :func:`best`. With fewer hits than another rate has
        already, even if all their other runs hit, they cannot. Those that have missed come last: a run that misses
        takes longest, and hits of the others may spare it."""
        hits = {rate: sum(r.hit for r in runs) for rate, runs in found.items()}
        missing = {rate: len(self.family.tuning_seeds) - len(runs) for rate, runs in found.items()}
        needed = [rate for rate in found if missing[rate] and hits[rate] + missing[rate] >= max(hits.values())]
        return sorted(needed, key=lambda rate: len(found[rate]) - hits[rate])

    def base(self) -> str | None:
        """The rival that is best on the tuning seeds, each at its own rate; None: their tuning is not finished."""
        rivals = {arm: self.chosen(arm) for arm, own in self.arms.items() if own.rival}
        if not rivals or None in rivals.values():
            return None
        return best({arm: self.tuning(arm)[rate] for arm, rate in rivals.items() if rate is not None})

    def compared(self, arm: str) -> list[Job]:
        """Runs of the comparison; none before the arm is tuned."""
        rate = self.chosen(arm)
        return [] if rate is None else self.jobs(arm, rate, tuning=False)

    def missing(self, *, losers: bool) -> list[Job]:
        """Jobs that can be run now, seed by seed: all of tuning, then the comparison of the base with the arms that are
        no rivals, then with ``losers`` that of the other rivals."""
        first = [arm for arm, own in self.arms.items() if not own.rival or arm == self.base()]
        last = [arm for arm in self.arms if arm not in first] if losers and self.family.losers else []
        stages = (
            [
                job
                for arm in self.arms
                for rate in self._open(self.tuning(arm))
                for job in self.jobs(arm, rate, tuning=True)
            ],
            *([job for arm in arms for job in self.compared(arm)] for arms in (first, last)),
        )
        for jobs in stages:
            if waiting := [job for job in jobs if self.bench.kept(job) is None]:
                return sorted(waiting, key=lambda job: job.seed)
        return []

    def report(self) -> dict[str, Any]:
        """Everything that is known: tuning, costs, and ratios over the seeds that an arm shares with the base."""
        base, arms = self.base(), dict[str, Any]()
        runs = {arm: {r.seed: r for r in self.finished(self.compared(arm))} for arm in self.arms}
        for arm, own in runs.items():
            rate, tried = self.chosen(arm), self.tuning(arm)
            arms[arm] = {
                "rate": rate,
                "at_edge": rate in (min(tried), max(tried)),
                "tuning": {f"{rate:g}": [[r.seed, r.tokens, r.hit] for r in found] for rate, found in tried.items()},
                "runs": [asdict(r) for r in own.values()],
            }
            if base not in (None, arm):
                arms[arm] |= self._ratios(own, runs[base])
        return {"goal": self.family.goal, "base": base, "arms": arms}

    def _ratios(self, own: Mapping[int, Result], others: Mapping[int, Result]) -> dict[str, Any]:
        """Ratios over the seeds that both have; none with fewer than two."""
        if len(shared := sorted(own.keys() & others.keys())) < 2:
            return {}

        def ratio_at(goal: float, points_of: Callable[[Sequence[Point]], Sequence[Point]] = list) -> dict[str, Any]:
            left, right = (
                {seed: cost_until(goal, points_of(of[seed].points)) for seed in shared} for of in (own, others)
            )
            return asdict(ratio_of(left, right, "tokens"))

        left, right = ({seed: cost(of[seed]) for seed in shared} for of in (own, others))
        found: dict[str, Any] = {"ratios": {q: asdict(ratio_of(left, right, q)) for q in QUANTITIES}}
        if self.family.held_out:
            found["held_out"] = ratio_at(self.family.goal, on_held_out)
        found["lower"] = {f"{goal:g}": ratio_at(goal) for goal in LOWER_GOALS}
        return found


def lines(name: str, report: Mapping[str, Any]) -> Iterator[str]:
    """Lines of each arm: its tuning, and its comparison."""
    for arm, known in report["arms"].items():
        runs, text = known["runs"], f"{name:17} {arm:14} "
        if tuned := [_tuned(rate, found) for rate, found in known["tuning"].items() if found]:
            yield text + "tuning " + "  ".join(tuned)
        if known["rate"] is None:
            continue
        text += f"rate x{known['rate']:<5g}"
        if known["at_edge"]:
            text += " (edge of the grid)"
        text += f" {sum(r['hit'] for r in runs):2} of {len(runs):2} reach it"
        if runs:
            text += f"  {statistics.median(r['tokens'] for r in runs):8,.0f} tokens"
        if arm == report["base"]:
            text += "  the base"
        yield text + _told(known)


def _tuned(rate: str, found: Sequence[tuple[int, float, bool]]) -> str:
    """Geometric mean of the tokens of the tuning runs at ``rate``, and how many of them reach the goal."""
    mean = math.exp(statistics.fmean(math.log(max(1, tokens)) for _, tokens, _ in found))
    return f"x{rate} {mean:,.0f} ({sum(hit for _, _, hit in found)} of {len(found)})"


def _told(known: Mapping[str, Any]) -> str:
    """Ratios in one line; empty without any."""
    ratios = {**known.get("ratios", {}), **({"held-out": known["held_out"]} if "held_out" in known else {})}
    text = "".join(f"  {name} {_interval(r)}" for name, r in ratios.items())
    if ratios:
        text += f"  can show {ratios['tokens']['can_show']:.2f}  tokens to "
        text += ", ".join(f"{goal}: {_interval(r)}" for goal, r in known["lower"].items())
    return text


def _interval(ratio: Mapping[str, float]) -> str:
    return f"{ratio['ratio']:.2f} ({ratio['low']:.2f}–{ratio['high']:.2f})"


def run_family(runs: Runs, at_once: int, until: float, *, losers: bool) -> list[str]:
    """Make what is missing until it is all there or the time is over; sentences about runs that failed, each after
    :data:`TRIES`."""
    faults: dict[str, list[str]] = {}

    def make(job: Job) -> None:
        if time.monotonic() < until and not runs.bench.stop.is_set() and job in runs.missing(losers=losers):
            try:
                runs.bench.measure(job)
            except AfterplayError as error:
                fault = f"{job.name}: {str(error).splitlines()[0]}"
                print(fault, file=sys.stderr, flush=True)
                faults.setdefault(job.name, []).append(fault)

    while time.monotonic() < until and not runs.bench.stop.is_set():
        waiting = [job for job in runs.missing(losers=losers) if len(faults.get(job.name, ())) < TRIES]
        if not waiting:
            break
        with ThreadPoolExecutor(min(at_once, runs.family.jobs_max or at_once)) as pool:
            list(pool.map(make, waiting))
    return [found[-1] for found in faults.values() if len(found) == TRIES]


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.replay_study",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--directory", type=Path, required=True, help="results and runs; a later call continues there")
    parser.add_argument("--families", nargs="+", metavar="NAME", help="only these")
    parser.add_argument("--arms", nargs="+", metavar="NAME", help="only these arms of each family")
    parser.add_argument("--jobs", type=int, default=1, help="runs at once; wall times then disturb each other")
    parser.add_argument("--minutes", type=float, default=math.inf, help="start no run after that")
    parser.add_argument("--report", action="store_true", help="run nothing")
    given = parser.parse_args(argv)
    plan, stop = read_plan(), threading.Event()
    until = time.monotonic() + 60 * given.minutes
    names = given.families or list(plan.families)
    if unknown := [name for name in names if name not in plan.families]:
        parser.error(f"--families {unknown[0]}: there are {', '.join(plan.families)}")
    known = {arm for name in names for arm in plan.families[name].arms}
    if unknown := [arm for arm in given.arms or () if arm not in known]:
        parser.error(f"--arms {unknown[0]}: there are {', '.join(sorted(known))}")
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stop.set())
    faults: list[str] = []
    directory = given.directory.absolute()
    server = None if given.report else ForkServer()
    for losers in (False, True):
        for name in names:
            if stop.is_set():
                break
            runs = Runs(plan, name, directory, stop, given.arms, server)
            if not given.report:
                faults += run_family(runs, given.jobs, until, losers=losers)
            elif losers:
                continue
            report = runs.report()
            write_json_atomically(directory / f"{name}.json", report)
            if compared := [r for arm in runs.arms for r in runs.finished(runs.compared(arm))]:
                draw(compared, runs.family.goal, directory / f"{name}.png")
            print("\n".join(lines(name, report)), flush=True)
    if server is not None:
        server.close()
    return 1 if faults else 0


if __name__ == "__main__":
    import torch

    torch.set_num_threads(1)
    sys.exit(main())
