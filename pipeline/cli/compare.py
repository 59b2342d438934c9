"""``afterplay compare A B``: runs of several settings over seeds that can be stopped and continued, and ratios of their
costs to reach a target."""

from __future__ import annotations

import math
import re
import signal
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent import futures
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import orjson
import typer

from pipeline.cli.options import Sets, finite
from pipeline.cli.replay import open_run
from pipeline.errors import ConfigurationError
from pipeline.runtime.children import ChildGroup, OrphanReaper, describe_exit, module_command
from pipeline.runtime.plugins import load_main
from pipeline.runtime.run_directory import RunDirectory, write_bytes_atomically, write_json_atomically
from pipeline.views.step_lines import TARGETS, WINDOWS, Metric
from pipeline.views.tables import plain_console, table

if TYPE_CHECKING:
    from pipeline.config import RunConfig
    from pipeline.runtime.process import ExitCode
    from pipeline.views.comparison import Cost, LearningCurve, Ratio

    Arms = Mapping[str, Sequence[LearningCurve]]

_NAME = re.compile(r"[A-Za-z0-9_.-]{1,60}")
SEEDS, SEEDS_MAX = range(1, 6), 10_000


def compare(
    arms: Annotated[
        list[str],
        typer.Argument(metavar="[NAME=]A [NAME=]B …", help="Run files, or folders of runs. The first is the base."),
    ],
    reach: Annotated[float, typer.Option(callback=finite, metavar="VALUE", help="Target.")],
    seeds: Annotated[
        str | None, typer.Option(metavar="1-12", help="Seeds of each arm. Default 1-5; of a folder, all.")
    ] = None,
    metric: Annotated[
        Metric, typer.Option("--metric", "-m", help="Value that has to reach the target.")
    ] = Metric.SUCCESS,
    window: Annotated[
        int | None, typer.Option(min=1, help="Points whose mean is compared with the target. Default 5; 1 for eval.")
    ] = None,
    out: Annotated[Path, typer.Option(metavar="DIR", help="Runs, table and picture.")] = Path("runs/compare"),
    jobs: Annotated[int, typer.Option("--jobs", "-j", min=1, help="Runs at once; they slow each other down.")] = 1,
    until_reached: Annotated[
        bool, typer.Option("--until-reached", help="Stop a run when it has reached the target.")
    ] = False,
    claim: Annotated[
        float | None,
        typer.Option(
            callback=finite, metavar="RATIO", help="Ratio that the study is to show: how many seeds does it take?"
        ),
    ] = None,
    sets: Sets = None,
    arm_sets: Annotated[
        list[str] | None, typer.Option("--set-arm", metavar="NAME:KEY=VALUE", help="Change one value of one arm.")
    ] = None,
) -> None:
    """Run settings over seeds, and tell how many generated tokens, updates and seconds each needs to reach a target.

    Each run is an ordinary run in OUT/NAME/seed-N. Run the command again to continue: finished runs are read,
    unfinished ones resume. A folder is one run, or holds several. The first call keeps each run file as OUT/NAME.yaml,
    and later calls must mean the same settings.

    A run has reached the target at the first update at which the mean of the last --window points is at least --reach.
    success: share of training rollouts that succeed, as replay.success_threshold says; settings that choose or retire
    tasks change it. reward: mean reward of fresh trajectories. eval: score on held-out tasks, the fair one for such
    settings; it needs evaluation.every. Choose the target, metric and window before the runs.

    Ratios are of geometric means, with 95 % t intervals of the logarithms, paired by seed if all seeds are the same. A
    run that never reaches the target is reported and counts with a cost that is restricted to a horizon; it is not
    left out. What the seeds can show is the ratio nearest to 1 that four of five such studies show; --claim tells how
    many seeds a ratio takes, also from a few pilot runs. Written: compare.json and compare.png. The exit code is 1 if a
    run failed or the command was stopped.

      afterplay compare a.yaml b.yaml --seeds 1-12 --reach 0.8
      afterplay compare off=@replay_tiny on=@replay_tiny --set-arm off:replay.enabled=false --reach 0.8 --seeds 1-12
      afterplay compare runs/compare/off runs/compare/on --reach 0.7 --out seven
    """
    if claim is not None and (claim <= 0 or claim == 1):
        raise ConfigurationError(f"--claim: expected a ratio above 0 other than 1, such as 0.7, got {claim}")
    sources = read_arms(arms)
    own = read_arm_sets(arm_sets or [], sources)
    study = Study(sources, out, metric, reach, window or WINDOWS[metric], until_reached, claim)
    raise typer.Exit(study.run(None if seeds is None else seeds_of(seeds), sets or [], own, jobs))


def read_arms(texts: Sequence[str]) -> dict[str, str]:
    """Sources by name, ``[NAME=]FILE``. Raises :class:`ConfigurationError`."""
    found: dict[str, str] = {}
    for text in texts:
        name, equals, source = text.partition("=")
        if not equals:
            name, source = Path(text.removeprefix("@")).name.removesuffix(".yaml"), text
        if not _NAME.fullmatch(name) or name in found:
            raise ConfigurationError(
                f"{text}: expected a new name of letters, digits, '.', '_' and '-', got {name!r}: write NAME={source}"
            )
        found[name] = source
    if len(found) < 2:
        raise ConfigurationError(f"compare: expected two run files or folders at least, got {len(found)}")
    return found


def read_arm_sets(texts: Sequence[str], arms: Mapping[str, str]) -> dict[str, list[str]]:
    """Overrides by arm, ``NAME:KEY=VALUE``. Raises :class:`ConfigurationError`."""
    found: dict[str, list[str]] = {name: [] for name in arms}
    for text in texts:
        name, _, override = text.partition(":")
        if name not in arms or not override:
            raise ConfigurationError(
                f"--set-arm {text}: expected NAME:KEY=VALUE with a name of {', '.join(arms)}, got {name!r}"
            )
        found[name].append(override)
    return found


def seeds_of(text: str) -> list[int]:
    """Whole numbers and ranges, in order.

    >>> seeds_of("1-3,7")
    [1, 2, 3, 7]
    """
    found: list[int] = []
    for part in text.split(","):
        low, dash, high = part.strip().partition("-")
        if not low.isdecimal() or (dash and not high.isdecimal()) or (dash and int(high) < int(low)):
            raise ConfigurationError(f"--seeds: expected numbers and ranges such as 1-12 or 1,2,7-9, got {text!r}")
        if int(high or low) - int(low) >= SEEDS_MAX:
            raise ConfigurationError(f"--seeds: expected at most {SEEDS_MAX}, got {text!r}")
        found += range(int(low), int(high or low) + 1)
    return sorted(set(found))


DRAIN_SECONDS_MAX = 90.0
"""For the runs that are left if this process is killed."""
LOOK_SECONDS = 1.0
"""Interval at which signals and, with ``--until-reached``, curves are looked at."""


@dataclass(frozen=True, slots=True)
class Job:
    """One run of a run file with one seed."""

    arm: str
    seed: int
    file: Path
    config: RunConfig
    """Complete, but for the seed."""

    @property
    def directory(self) -> RunDirectory:
        return RunDirectory(self.config.run.directory / f"seed-{self.seed}")

    @property
    def name(self) -> str:
        return f"{self.arm} seed {self.seed}"

    @property
    def log_file(self) -> Path:
        return self.directory.path.with_suffix(".log")

    @property
    def command(self) -> list[str]:
        """The command of the run. A tiny model has random weights of its own seed."""
        path = self.directory.path  # the folder of the study may have moved since its run files were written
        sets = [set_directory(path.parent), f"run.name={path.name}", f"run.seed={self.seed}"]
        if self.config.model.source == "tiny":
            sets.append(f"model.tiny.seed={self.seed}")
        return module_command("pipeline.cli.app", "run", str(self.file), *(f"--set={one}" for one in sets))

    @property
    def finished(self) -> bool:
        return self.directory.has_finished(self.config.run.total_steps)


@dataclass(frozen=True, slots=True)
class Study:
    """A comparison: its arms, its target, and the folder of its runs and results."""

    sources: Mapping[str, str]
    """Run file, or folder of runs, of each arm by name."""
    out: Path
    metric: Metric
    target: float
    window: int
    until_reached: bool
    claim: float | None = None

    def run(
        self, seeds: Sequence[int] | None, sets: Sequence[str], own: Mapping[str, Sequence[str]], at_once: int
    ) -> ExitCode:
        """Run what is missing, and report. ``seeds`` None: :data:`SEEDS` of run files, and all of folders. SIGINT and
        SIGTERM stop the runs cleanly."""
        from pipeline.runtime.process import ExitCode

        jobs = plan_jobs(self.sources, SEEDS if seeds is None else seeds, sets, own, self.out)
        for name, source in self.sources.items():
            if Path(source).is_dir():
                read_arm(name, source, [], self.metric, seeds)  # it may be refused, and not after hours of runs
        stop = threading.Event()
        previous = {number: signal.signal(number, lambda *_: stop.set()) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            faults = run_jobs(jobs, at_once, self.is_enough, stop)
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)
        if stop.is_set():
            done = sum(job.finished or self.is_enough(job) for job in jobs)
            typer.echo(f"stopped: {done} of {len(jobs)} runs are done. Run the command again to continue")
            return ExitCode.FAILED
        for fault in faults:
            typer.echo(fault, err=True)
        arms = {name: read_arm(name, source, jobs, self.metric, seeds) for name, source in self.sources.items()}
        report(arms, self.metric, self.target, self.window, self.out, self.claim)
        return ExitCode.FAILED if faults else ExitCode.FINISHED

    def is_enough(self, job: Job) -> bool:
        """True when the run has reached the target, and that is all that is wanted."""
        from pipeline.views.comparison import cost_to_reach, read_curve

        if not self.until_reached or not job.directory.metrics_file.exists():
            return False
        points = read_curve(job.config, job.directory, job.seed, self.metric).points
        return cost_to_reach(points, self.target, self.window).reached


def set_directory(folder: Path) -> str:
    """The override of ``run.directory``, as JSON: a path may mean something else as YAML."""
    return f"run.directory={orjson.dumps(str(folder)).decode()}"


def plan_jobs(
    sources: Mapping[str, str], seeds: Sequence[int], sets: Sequence[str], own: Mapping[str, Sequence[str]], out: Path
) -> list[Job]:
    """Runs of the arms that are run files, all arms of a seed together. Keeps each complete configuration as
    ``out/NAME.yaml``. Raises :class:`ConfigurationError` if an earlier call kept another one."""
    from pipeline.config.load import dump, load
    from pipeline.supervisor.history import difference

    if sets and all(Path(source).is_dir() for source in sources.values()):
        raise ConfigurationError(f"--set {sets[0]}: expected a run file among the arms, got folders of runs alone")
    kept: dict[str, tuple[Path, RunConfig]] = {}
    for name, source in sources.items():
        if Path(source).is_dir():
            if own[name]:
                raise ConfigurationError(f"--set-arm {name}: expected a run file, {source} is a folder of runs")
            continue
        folder = (out / name).absolute()
        config = load(source, [*sets, *own[name], set_directory(folder), "stage.store=null"])  # a store for each run
        config = load_main("learner.process.preflight:with_options")(config)
        file = folder.with_name(f"{name}.yaml")
        if not file.exists():
            write_bytes_atomically(file, dump(config).encode())
        elif changed := difference(load(file, environment={}), config):
            raise ConfigurationError(
                f"{file}: expected the settings of the earlier call, got another {', '.join(changed)}. Give another "
                "--out, or the same settings"
            )
        kept[name] = file, config
    return [Job(name, seed, file, config) for seed in seeds for name, (file, config) in kept.items()]


def run_jobs(jobs: Sequence[Job], at_once: int, is_enough: Callable[[Job], bool], stop: threading.Event) -> list[str]:
    """Run all jobs that are not finished; sentences about those that failed. ``is_enough`` ends a run early, ``stop``
    all of them."""
    from pipeline.supervisor.processes import child_environment

    environment = child_environment({}, ends_with_us=False)  # the run file of an arm has the values of variables
    waiting, live, faults = deque(jobs), dict[int, tuple[Job, ChildGroup]](), list[str]()
    ending: set[int] = set()
    console = plain_console()  # the runs continue when nobody reads any more
    with OrphanReaper(DRAIN_SECONDS_MAX) as reaper:
        while live or (waiting and not stop.is_set()):
            while waiting and len(live) < at_once and not stop.is_set():
                job = waiting.popleft()
                if job.finished or is_enough(job):
                    continue
                console.print(f"{job.name}: {'continues' if job.directory.path.exists() else 'starts'}")
                job.log_file.parent.mkdir(parents=True, exist_ok=True)
                with job.log_file.open("ab") as output:
                    child = ChildGroup(job.command, reaper, environment=environment, output=output)
                live[child.pid] = job, child
            futures.wait([c.end for _, c in live.values()], LOOK_SECONDS, return_when=futures.FIRST_COMPLETED)
            for pid, (job, child) in list(live.items()):
                if child.end.done():
                    del live[pid]
                    done = job.finished or is_enough(job)
                    console.print(f"{job.name}: {'finished' if done else 'ended'}")
                    if not (done or stop.is_set()):
                        code = describe_exit(child.end.result())
                        faults.append(f"{job.name} ended before its last update ({code}); see {job.log_file}")
                elif pid not in ending and (stop.is_set() or is_enough(job)):
                    ending.add(pid)
                    child.terminate()
    return faults


def read_arm(
    name: str, source: str, jobs: Sequence[Job], metric: Metric, seeds: Sequence[int] | None = None
) -> list[LearningCurve]:
    """Curves of the runs of an arm by seed, of a folder those of ``seeds`` (None: all). A run of a run file that failed
    before its first update is not among them. Raises :class:`ConfigurationError` when there is none, one has no points,
    a seed comes twice, or a folder lacks one."""
    from pipeline.views.comparison import read_curve

    if Path(source).is_dir():
        folders = [Path(source), *sorted(p for p in Path(source).iterdir() if p.is_dir())]
        runs = (RunDirectory(folder) for folder in folders)
        opened = [open_run(run.path) for run in runs if run.metrics_file.exists() and run.config_file.exists()]
        has = {config.run.seed for config, _ in opened}
        wanted = has if seeds is None else {*seeds}
        if opened and (missing := sorted(wanted - has)):
            raise ConfigurationError(
                f"{name}: expected a run for each of --seeds, {source} has none of {', '.join(map(str, missing))}"
            )
        opened = [(config, directory) for config, directory in opened if config.run.seed in wanted]
        curves = [read_curve(config, directory, config.run.seed, metric) for config, directory in opened]
    else:
        own = [job for job in jobs if job.arm == name and job.directory.metrics_file.exists()]
        curves = [read_curve(job.config, job.directory, job.seed, metric) for job in own]
    curves.sort(key=lambda curve: curve.seed)
    if not curves:
        raise ConfigurationError(f"{name}: expected runs with updates in {source}, found none")
    if empty := [str(curve.seed) for curve in curves if not curve.points]:
        raise ConfigurationError(
            f"{name}: expected values of {metric} in every run, got none for seeds {', '.join(empty)}. --metric eval "
            "needs evaluation.every in the run file"
        )
    found = [curve.seed for curve in curves]
    if len({*found}) < len(found):
        raise ConfigurationError(f"{name}: expected a run for each seed, {source} has two of the same: {found}")
    return curves


def report(arms: Arms, metric: Metric, target: float, window: int, out: Path, claim: float | None = None) -> None:
    """Print the table and what was found, and write ``compare.json`` and ``compare.png`` into ``out``."""
    from pipeline.views.comparison import LEVEL, POWER, QUANTITIES, band, cost_to_reach, describe_ratio, ratio_of
    from pipeline.views.plots import draw_comparison

    costs = {name: {c.seed: cost_to_reach(c.points, target, window) for c in curves} for name, curves in arms.items()}
    base, *others = arms
    ratios = {name: [ratio_of(costs[name], costs[base], quantity) for quantity in QUANTITIES] for name in others}
    sentences = [
        *(
            describe_ratio(name, base, found[0], f"{TARGETS[metric]} {target:g}", claim)
            for name, found in ratios.items()
        ),
        *notes(arms, costs),
    ]
    _print(costs, ratios, sentences)
    found = {
        "metric": metric, "target": target, "window": window, "level": LEVEL, "power": POWER, "claim": claim,
        "base": base, "found": sentences,
        "ratios": ratios,
        "arms": {
            name: [{**asdict(curve), **asdict(costs[name][curve.seed])} for curve in curves]
            for name, curves in arms.items()
        },
    }  # fmt: skip
    write_json_atomically(out / "compare.json", found)
    forest = [
        (f"{name}: {QUANTITIES[r.quantity]}", r.ratio, r.low, r.high) for name, found in ratios.items() for r in found
    ]
    picture = out / "compare.png"
    bands = {name: band(curves, window) for name, curves in arms.items()}
    draw_comparison(bands, forest, (metric.value, base, target), picture)
    typer.echo(f"{out / 'compare.json'}  {picture}")


def notes(arms: Arms, costs: Mapping[str, Mapping[int, Cost]]) -> list[str]:
    """Sentences about runs whose numbers need care."""
    found = []
    for name, curves in arms.items():
        for text, seeds in (
            ("unfinished, and count as if they ended here",
             [c.seed for c in curves if not c.finished and not costs[name][c.seed].reached]),
            ("resumed from an older checkpoint, and the tokens of the updates made again count",
             [c.seed for c in curves if c.redone]),
        ):  # fmt: skip
            if seeds:
                found.append(f"{name}: runs of seeds {', '.join(map(str, seeds))} are {text}.")
    return found


def _print(
    costs: Mapping[str, Mapping[int, Cost]], ratios: Mapping[str, Sequence[Ratio]], sentences: Sequence[str]
) -> None:
    from pipeline.views.comparison import QUANTITIES, median_of

    rows = []
    for name, own in costs.items():
        arm = name, f"{sum(c.reached for c in own.values())} of {len(own)}"
        for i, (quantity, what) in enumerate(QUANTITIES.items()):
            values, median = [getattr(c, quantity) for c in own.values()], median_of([*own.values()], quantity)
            middle = "not reached" if math.isinf(median) else f"{median:,.0f}"
            ratio, can_show = "1", ""
            if name in ratios:
                found = ratios[name][i]
                ends = "none" if math.isinf(found.high) else f"{found.low:.2f}–{found.high:.2f}"
                ratio, can_show = f"{found.ratio:.2f} ({ends})", f"{found.can_show:.2f}" if found.can_show else ""
            cost = f"{middle} ({min(values):,.0f}–{max(values):,.0f})"
            rows.append([*(arm if i == 0 else ("", "")), what, cost, ratio, can_show])
    console = plain_console()
    console.print(table(("arm", "reached", "cost", ">median (range)", ">ratio (95 %)", ">can show"), rows))
    for sentence in sentences:
        console.print(sentence)
