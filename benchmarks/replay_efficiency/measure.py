"""One run from its start until it reaches the goal, measured while it goes."""

from __future__ import annotations

import shutil
import subprocess
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeVar

from benchmarks.replay_efficiency.arms import Job
from benchmarks.replay_efficiency.examine import Examination, load_examination, load_score
from benchmarks.replay_efficiency.records import (
    Point,
    Result,
    finished_at,
    first_order_at,
    hit_version,
    load_result,
    on_held_out,
    save,
    tokens_until,
    training_of,
)
from pipeline.config.load import load
from pipeline.errors import AfterplayError
from pipeline.runtime.run_directory import write_bytes_atomically
from pipeline.store.evaluation_results import read_results
from pipeline.views.step_lines import read_lines
from tests.support.fork_server import ForkServer
from tests.support.run_handle import RunHandle, start_run

Value = TypeVar("Value")
END_SECONDS_MAX = 900.0
"""For a run that is stopping, or has made its last update and draws its curves, on a busy machine."""


class Stopped(AfterplayError):
    """The benchmark was asked to stop."""


@dataclass(frozen=True, slots=True)
class Bench:
    """Settings that all runs share."""

    directory: Path
    seconds_max: float
    """For one run."""
    stop: threading.Event
    server: ForkServer | None = None
    """Forks the processes of the runs, so that a start costs no imports."""

    def result_file(self, job: Job) -> Path:
        return self.directory / "results" / f"{job.name}.json"

    def kept(self, job: Job) -> Result | None:
        """The result of an earlier time. Raises :class:`AfterplayError` when it was made with other settings."""
        path = self.result_file(job)
        result = load_result(path)
        if result is not None and result.fingerprint != job.fingerprint:
            raise AfterplayError(
                f"{path} was measured with other settings than these: give another --directory, or remove that file"
            )
        return result

    def measure(self, job: Job) -> Result:
        """The result of an earlier time, or of a new run. Raises :class:`AfterplayError`."""
        found = self.kept(job)
        if found is not None:
            _say(job, f"kept from before: {found.tokens:,} tokens, {found.updates} updates")
            return found
        if self.stop.is_set():
            raise Stopped("stopped")
        runs = self.directory / "runs"
        shutil.rmtree(runs / job.name, ignore_errors=True)
        file = self.directory / "run_files" / f"{job.name}.yaml"
        write_bytes_atomically(file, job.run_file.encode())
        with start_run(file, runs, job.name, server=self.server) as run:
            result = _watch(self, job, run)
        save(result, self.result_file(job))
        shutil.rmtree(runs / job.name / "weights", ignore_errors=True)
        word = "reached" if result.hit else f"NOT reached within {result.updates} updates"
        _say(job, f"{job.protocol.goal:g} {word}: {result.tokens:,} tokens, {result.seconds:.0f} s")
        return result


def _watch(bench: Bench, job: Job, run: RunHandle) -> Result:
    """Measure versions as they come, end the run, sum it up."""
    protocol, deadline = job.protocol, time.monotonic() + bench.seconds_max

    def wait(what: str, look: Callable[[], Value | None]) -> Value:
        def looked() -> Value | None:
            if bench.stop.is_set():
                raise Stopped("stopped")
            return look()

        return run.until(what, looked, max(0.0, deadline - time.monotonic()))

    examinations: list[Examination] = []
    points: list[Point] = []
    hit: int | None = None
    for version in range(0, protocol.steps + 1, protocol.every):
        if protocol.evaluated:
            found = wait(f"evaluation of version {version}", partial(_evaluated, run, version))
        else:
            # the first weights are the model itself
            folder = run.directory.weights(version) if version else run.directory.model
            wait(f"version {version}", folder.is_dir)
            if not examinations:
                config, model = load(run.directory.config_file), run.directory.model
                sets = (0, protocol.held_out) if protocol.held_out else (0,)
                examinations = [load_examination(config, model, protocol.plays, number) for number in sets]
            score = load_score(folder)
            found = [float(examination.success(score, version).mean()) for examination in examinations]
        moment = wait(f"update {version}", partial(_moment, run, version))
        point = _point(run, version, moment, *found)
        points.append(point)
        shown = "  held out ".join(f"{value:.3f}" for value in found)
        _say(job, f"update {version:3}  success {shown}  {point.tokens:,} tokens  {point.seconds:.0f} s")
        hit = hit_version(points, protocol.goal)
        done = hit is not None and (
            not protocol.held_out or hit_version(on_held_out(points), protocol.goal) is not None
        )
        if done:
            break
    _end(run, interrupt=done or points[-1].version < protocol.steps)
    return _result(job, run, points, hit)


def _moment(run: RunHandle, version: int) -> float | None:
    """Time at which ``version`` was made; of the first one, the time of the first order."""
    if version == 0:
        store = run.directory.store_file
        try:
            return first_order_at(store) if store.exists() else None
        except AfterplayError:
            return None
    return finished_at(read_lines(run.directory.metrics_file), version)


def _evaluated(run: RunHandle, version: int) -> list[float]:
    """Score of the run's own evaluation of ``version``; nothing before it ends. Raises :class:`AfterplayError` where it
    was given up."""
    for found in read_results(run.directory.evaluations_file):
        if found["updates"] == version:
            if found["status"] != "complete":
                raise AfterplayError(f"expected a complete evaluation of version {version}, got {found['status']}")
            return [float(found["score"])]
    return []


def _point(run: RunHandle, version: int, moment: float, success: float, held_out: float | None = None) -> Point:
    store = run.directory.store_file
    tokens = tokens_until(store, moment) if version else 0
    return Point(version, success, tokens, max(0.0, moment - first_order_at(store)), held_out)


def _end(run: RunHandle, *, interrupt: bool) -> None:
    if interrupt and run.process.poll() is None:
        try:
            run.interrupt()
            return
        except subprocess.TimeoutExpired:
            pass
    run.finish(END_SECONDS_MAX)


def _result(job: Job, run: RunHandle, points: list[Point], hit: int | None) -> Result:
    """Tokens are counted again now that everything is in the store."""
    lines = read_lines(run.directory.metrics_file)
    final = []
    for point in points:
        moment = _moment(run, point.version)
        if moment is None:
            raise AfterplayError(f"expected a line of update {point.version} in {run.directory.metrics_file}, got none")
        final.append(_point(run, point.version, moment, point.success, point.held_out))
    until = next(p for p in final if p.version == hit) if hit is not None else final[-1]
    return Result(
        arm=job.arm,
        seed=job.seed,
        fingerprint=job.fingerprint,
        overrides=job.overrides,
        updates=until.version,
        tokens=until.tokens,
        seconds=until.seconds,
        hit=hit is not None,
        training=training_of([line for line in lines if line["step"] <= until.version]),
        points=tuple(final),
    )


def _say(job: Job, text: str) -> None:
    print(f"{time.strftime('%H:%M:%S')}  {job.arm:10} seed {job.seed}  {text}", flush=True)
