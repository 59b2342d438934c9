"""``afterplay run``: from a configuration to an exit code."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable

import anyio
from rich.console import Console

from pipeline.config import RunConfig
from pipeline.config.load import dump
from pipeline.config.resolve import resolve
from pipeline.plots import draw
from pipeline.replay.evaluation.log import read_results
from pipeline.role import ExitCode
from pipeline.rundir import RunDirectory, write_bytes_atomically
from pipeline.supervisor.claim import RunIsAlive, claim, make_room
from pipeline.supervisor.display import Display, clock
from pipeline.supervisor.machine import Limits
from pipeline.supervisor.progress import MetricsTail, describe_evaluation, reached, step_of
from pipeline.supervisor.shell import Supervisor
from pipeline.supervisor.specs import ProcessSpec, specs_of
from pipeline.supervisor.time_table import show_time
from pipeline.supervisor.undertaker import Undertaker


def run(config: RunConfig, fresh: bool = False, console: Console | None = None) -> ExitCode:
    """Run to the end. Raises :class:`ConfigurationError`; everything else is told and ends in the exit code."""
    console = console or Console(highlight=False)
    directory = RunDirectory(config.run.path.absolute())
    try:
        with claim(directory) as lock:
            make_room(directory, config.run.resume, fresh)
            config = resolve(config)
            directory.create()
            write_bytes_atomically(directory.config_file, dump(config).encode())
            with Undertaker(keep_open=(lock,)) as undertaker:
                return supervise(config, specs_of(config, directory), directory, undertaker, console)
    except RunIsAlive as error:
        Console(stderr=True, highlight=False).print(f"afterplay: {error}", style="red", soft_wrap=True)
        return ExitCode.BUSY


def supervise(
    config: RunConfig,
    specs: Iterable[ProcessSpec],
    directory: RunDirectory,
    undertaker: Undertaker,
    console: Console,
    is_done: Callable[[], bool] | None = None,
) -> ExitCode:
    """Start ``specs``, watch them to the end, tell how it went. ``is_done``: whether the process that ends the run has
    finished its work; None: the learner has made its last step."""
    tail = MetricsTail(directory.metrics_file)
    tail.skip()
    section = config.supervisor
    limits = Limits(
        section.restarts_max, section.backoff_seconds, section.backoff_seconds_max, section.drain_seconds_max
    )

    def work_done() -> bool:
        tail_now = MetricsTail(directory.metrics_file)
        tail_now.read()
        return reached(tail_now.last, config.run.total_steps)

    supervisor = Supervisor(specs, limits, directory, undertaker, is_done or work_done)
    begun = time.monotonic()
    console.print(f"run directory {directory.path}  (logs in {directory.logs})", soft_wrap=True)
    if tail.last is not None:
        console.print(f"going on after step {step_of(tail.last)} (--fresh starts anew)", soft_wrap=True)
    with Display(
        config.run.name, config.run.total_steps, supervisor.machine.processes, supervisor.answers, console
    ) as display:
        code = anyio.run(supervisor.run, display, tail)
    _conclude(supervisor, directory, code, time.monotonic() - begun, console)
    return code


def _conclude(
    supervisor: Supervisor, directory: RunDirectory, code: ExitCode, seconds: float, console: Console
) -> None:
    machine = supervisor.machine
    finished = machine.reason == "finished"
    style = "green" if finished else "red" if code else "yellow"
    console.print(f"{machine.reason} after {clock(seconds)}", style=style, soft_wrap=True)
    trouble = supervisor.log_tail()
    if trouble:
        console.print(trouble, markup=False, soft_wrap=True)
    show_time(directory.metrics_file, console)
    if finished and (results := read_results(directory.evaluations_file)):
        console.print(describe_evaluation(results[-1]), soft_wrap=True)
    if finished and directory.metrics_file.exists():
        problem = draw(directory.metrics_file, directory.curves_file)
        console.print(f"curves {problem or directory.curves_file}", soft_wrap=True)
    elif directory.metrics_file.exists():
        console.print(f"draw the curves with: afterplay plot {_short(directory)}", soft_wrap=True)
    console.print(f"run directory {directory.path}", soft_wrap=True)


def _short(directory: RunDirectory) -> str:
    return min((os.path.relpath(directory.path), str(directory.path)), key=len)
