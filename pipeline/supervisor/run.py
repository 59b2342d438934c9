"""``afterplay run``: lock the run directory, prepare it, supervise the processes, report the result."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import socket
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import orjson
from rich.console import Console

from pipeline.config import RunConfig
from pipeline.config.explain import resolve
from pipeline.errors import AfterplayError, ConfigurationError, StoreError
from pipeline.runtime.children import OrphanReaper
from pipeline.runtime.disk import left_out, wait_for_room
from pipeline.runtime.engine_keys import LEARNER_DIGEST_FILE
from pipeline.runtime.plugins import load_main
from pipeline.runtime.process import ExitCode
from pipeline.runtime.run_directory import FileLock, RunDirectory, read_json, write_json_atomically
from pipeline.store.evaluation_results import read_results
from pipeline.store.ledger import read_ledger
from pipeline.store.store import store_path
from pipeline.supervisor.cluster import Cluster
from pipeline.supervisor.display import Display, clock
from pipeline.supervisor.history import (
    compare,
    describe_disk,
    is_foreign,
    newest_checkpoint,
    remove_published,
    write_start,
)
from pipeline.supervisor.inventory import Inventory, local_inventory
from pipeline.supervisor.plan import Place, Plan, plan, preflight_place
from pipeline.supervisor.preflight import check_before_run, check_directory
from pipeline.supervisor.processes import ProcessHost, ProcessSpec, specs_of
from pipeline.supervisor.restarts import RestartLimits
from pipeline.supervisor.shell import Supervisor
from pipeline.trackers.reporter import describe_delivery
from pipeline.trackers.tracker import require_package
from pipeline.transport.curve import make_keys
from pipeline.transport.socket_folder import remove_socket_folder
from pipeline.views.plots import draw
from pipeline.views.step_lines import (
    MetricsTail,
    describe_evaluation,
    last_step,
    print_phase_times,
    read_lines,
    step_of,
)
from pipeline.views.tables import plain_console

BEFORE_A_RUN = re.compile(r"source|logs|evaluations|model|\.model\..*|outcome\.json|slurm\..*|run\.lock")
"""Names of what other commands, and runs that were refused, leave in a directory without a run."""


class RunIsAlive(AfterplayError):
    """The run directory is in use by a run that is alive."""


@contextmanager
def run_lock(directory: RunDirectory, mark: bool = True) -> Iterator[int]:
    """Hold the directory's lock; yields its file descriptor. The kernel frees it when the last holder is gone.
    ``mark`` writes our process id and machine into it, for others.

    Raises :class:`RunIsAlive`, which names the process.
    """
    try:
        directory.path.mkdir(parents=True, exist_ok=True)
        lock = FileLock(directory.lock_file, f"{directory.path} is locked")
    except OSError as error:
        raise ConfigurationError(
            f"run.directory: expected a folder that can be written at {directory.path}, got: {error.strerror}. Give "
            "another one with --set run.directory=DIR"
        ) from error
    except StoreError as error:
        known = read_json(directory.lock_file) or {}
        holder = f"supervisor pid {known.get('pid', 'unknown')} on {known.get('machine', 'an unknown machine')}"
        raise RunIsAlive(
            f"{directory.path} is in use by a run that is alive ({holder}). "
            "Stop that run (Ctrl-C), or give this one another name: --set run.name=NAME"
        ) from error
    try:
        if mark:
            os.ftruncate(lock.descriptor, 0)
            mine = {"pid": os.getpid(), "machine": socket.gethostname(), "started_at": time.time()}
            left_out(partial(os.write, lock.descriptor, orjson.dumps(mine)), directory.path)
        yield lock.descriptor
    finally:
        lock.release()


def empty_directory(directory: RunDirectory) -> None:
    """Remove everything in it, for ``--fresh``. Raises :class:`ConfigurationError` for a folder that is no run's."""
    require_run_directory(directory)
    for path in directory.path.iterdir():
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        elif path != directory.lock_file:
            path.unlink()


def require_run_directory(directory: RunDirectory) -> None:
    """Raise :class:`ConfigurationError` for a folder with other files, which ``--fresh`` must not remove. A start that
    was ended early leaves empty folders."""
    if not is_foreign(directory) and any(
        p.exists() for p in (directory.config_file, directory.history_file, directory.store_file)
    ):
        return
    others = [path for path in directory.path.iterdir() if not BEFORE_A_RUN.fullmatch(path.name)]
    foreign = [path.name for path in others if not path.is_dir() or any(path.iterdir())]
    if foreign:
        raise ConfigurationError(
            f"--fresh: expected a run directory of Afterplay at {directory.path}, got a folder with "
            f"{foreign[0]} and no config.yaml of a run. Nothing was removed; give the run another name or directory"
        )


def require_unused_store(config: RunConfig, directory: RunDirectory, fresh: bool) -> None:
    """Raise :class:`ConfigurationError` where a run that begins would take over what another one left in
    ``stage.store``, outside of the run directory."""
    path = store_path(config, directory)
    resumes = not fresh and (directory.metrics_file.exists() or newest_checkpoint(directory) > 0)
    if resumes or path.is_relative_to(directory.path) or not path.exists():
        return
    found = read_ledger(path)
    if found.updates or (fresh and found.orders.get("issued")):
        raise ConfigurationError(
            f"stage.store: expected an unused file for a run that begins, got {path} of a run with {found.updates} "
            f"updates: remove it with {path.name}-wal and {path.name}.ids, or set stage.store to another file"
        )


def with_keys(config: RunConfig, directory: RunDirectory) -> RunConfig:
    """A copy whose roles have a key each, if the stage listens on TCP and the run file names no keys."""
    if not config.stage.address.startswith("tcp://") or config.stage.curve is not None:
        return config
    make_keys(directory.keys, config.actor.replicas)
    return config.updated(stage={"curve": directory.keys})


def require_fresh_start(config: RunConfig, directory: RunDirectory) -> None:
    """Raise :class:`ConfigurationError` for all that lets ``afterplay run --fresh`` on this machine refuse to begin.
    Changes nothing."""
    require_run_directory(directory)
    config = load_main("learner.process.preflight:with_options")(config)
    config = resolve(_fitting(config, directory, local_inventory()).config)
    require_unused_store(config, directory, fresh=True)
    check_before_run(config, fresh=True)


def _fitting(config: RunConfig, directory: RunDirectory, inventory: Inventory) -> Plan:
    for tracker in config.report_to:
        require_package(tracker)
    chosen = plan(config, inventory).fitting()
    check_directory(directory)
    return chosen


def run(
    config: RunConfig,
    fresh: bool = False,
    console: Console | None = None,
    cluster: Cluster | None = None,
    host_of: Callable[[Sequence[Place], RunConfig], ProcessHost] | None = None,
) -> ExitCode:
    """Run to the end, on this machine or on ``cluster``. ``host_of``: where the places of the plan are started; None:
    by their commands on this machine. Raises :class:`ConfigurationError`; other failures are printed and give the exit
    code."""
    console = console or plain_console()
    directory = RunDirectory(config.run.path.absolute())
    inventory = local_inventory() if cluster is None else cluster.inventory
    chosen = _fitting(config, directory, inventory)
    for sentence in chosen.reasons:
        console.print(sentence)
    try:
        with run_lock(directory) as lock:
            remove_socket_folder(directory.path)
            if fresh:
                require_run_directory(directory)
            finished = read_json(directory.finished_file)
            if not fresh and finished and finished["steps"] >= config.run.total_steps:
                resolved = None
                with suppress(ConfigurationError):  # a port is taken, perhaps by another run
                    resolved = resolve(chosen.config) if cluster is None else None
                changes = {} if resolved is None else compare(directory, resolved).changes
                console.print(
                    f"{_short(directory)} is finished: {finished['steps']} steps. Continue it with "
                    f"--set run.total_steps={2 * finished['steps']}, or start over with --fresh"
                )
                if changes:
                    console.print(f"Changed since, without effect on a run that is finished: {', '.join(changes)}")
                return ExitCode(finished["exit_code"])
            if cluster is None:
                config = resolve(chosen.config)
            else:
                config = resolve(cluster.addressed(chosen.config), cluster.taken_ports(chosen.places))
                config = cluster.located(config, chosen.places)
            resumed = None if fresh else compare(directory, config)
            asks = partial(require_unused_store, config, directory, fresh)
            asks() if cluster is None else cluster.at_store(asks)
            # else other machines prepare the model and reach the engines
            notes = check_before_run(config, fresh) if cluster is None else []
            if fresh:
                empty_directory(directory)  # after all that may refuse the run
            resumed = resumed or compare(directory, config)
            for line in (*resumed.lines(), *notes):
                console.print(line)
            directory.finished_file.unlink(missing_ok=True)
            wait_for_room(directory.create, directory.path, "the run directory")
            config = with_keys(config, directory)
            shutil.rmtree(directory.engines, ignore_errors=True)
            write_start(directory, config, resumed)
            with OrphanReaper(keep_open=(lock,)) as reaper:
                places = (preflight_place(inventory), *plan(config, inventory).places)
                specs = specs_of(places, config, directory, cluster)
                host = None if host_of is None else host_of(places, config)
                code = supervise(config, specs, directory, reaper, console, host=host)
            with suppress(OSError):
                (directory.path / LEARNER_DIGEST_FILE).unlink()
            remove_socket_folder(directory.path)
            return code
    except RunIsAlive as error:
        plain_console(stderr=True).print(f"afterplay: {error}", style="red")
        return ExitCode.BUSY


def supervise(
    config: RunConfig,
    specs: Iterable[ProcessSpec],
    directory: RunDirectory,
    reaper: OrphanReaper,
    console: Console,
    is_done: Callable[[], bool] | None = None,
    host: ProcessHost | None = None,
) -> ExitCode:
    """Start ``specs``, supervise them to the end, and print the result. ``is_done`` is true when the process that
    ends the run has finished its work; None: when the learner has made its last step. ``host``: where the processes
    live; None: on this machine."""
    tail = MetricsTail(directory.metrics_file)
    tail.read()
    limits = RestartLimits(config.supervisor.restarts_max, drain_seconds_max=config.checkpoint.drain_seconds_max)
    work_done = is_done or (lambda: last_step(directory.metrics_file) >= config.run.total_steps)
    supervisor = Supervisor(specs, limits, directory, reaper, work_done, host)
    directory.outcome_file.unlink(missing_ok=True)
    started_at = time.monotonic()
    console.print(f"run directory {directory.path}  (logs in {directory.logs})")
    # without vLLM a CPU run uses the embedded engine
    is_vllm = config.engine.kind == "vllm" and importlib.util.find_spec("vllm") is not None
    if tail.last is not None:
        step, saved = step_of(tail.last), newest_checkpoint(directory)
        again = f"; steps to make again: {step - saved}" if step > saved else ""
        console.print(f"resuming after step {min(step, saved)} (--fresh starts over{again})")
    machine, answers = supervisor.machine, supervisor.answers
    name, engine = config.run.name, "vLLM" if is_vllm else "the embedded engine"
    with Display(name, config.run.total_steps, machine.processes, answers, console, engine, tail.last) as display:
        code = anyio.run(supervisor.run, display, tail)
    failures = _failures(config, directory)
    if code is ExitCode.FINISHED and machine.reason == "finished" and not all(failures.values()):
        code = ExitCode.ENVIRONMENT
    reason = "\n".join(filter(None, [machine.reason, *failures, supervisor.log_tail()]))
    _write(directory.outcome_file, {"exit_code": code, "reason": reason})  # before the console, which may be gone
    removed: list[str] = []
    if machine.reason == "finished":
        left_out(lambda: removed.extend(remove_published(config, directory)), directory.path)
        if is_done is None:
            _write(directory.finished_file, {"steps": config.run.total_steps, "exit_code": code})
    _print_result(supervisor, directory, code, time.monotonic() - started_at, console, trains=is_done is None)
    for tracker in config.report_to:
        console.print(describe_delivery(directory, tracker))
    for sentence, succeeded in failures.items():
        console.print(sentence, style="yellow" if succeeded else "red")
    if lines := read_lines(directory.metrics_file):
        with suppress(OSError):
            console.print("\n".join(describe_disk(directory, lines, removed)))
    console.print(f"run directory {directory.path}")
    return code


def _write(file: Path, value: dict[str, Any]) -> None:
    left_out(partial(write_json_atomically, file, value, make_folder=False), file)


def _failures(config: RunConfig, directory: RunDirectory) -> dict[str, bool]:
    """Sentences about the trained environments that had failed rollouts, and whether any of their rollouts succeeded.
    None where nothing is known."""
    try:
        outcomes = read_ledger(store_path(config, directory)).outcomes
    except (StoreError, OSError):
        return {}
    failing = {n: found for n, found in outcomes.items() if found.failed and n in config.trained_environments}
    return {found.describe(name): found.succeeded > 0 for name, found in failing.items()}


def _print_result(
    supervisor: Supervisor, directory: RunDirectory, code: ExitCode, seconds: float, console: Console, *, trains: bool
) -> None:
    reason = supervisor.machine.reason
    finished = reason == "finished"
    console.print(f"{reason} after {clock(seconds)}", style="green" if finished else "red" if code else "yellow")
    if log_tail := supervisor.log_tail():
        console.print(log_tail)
    print_phase_times(directory.metrics_file, console)
    if not finished and trains and (sentence := _where_it_goes_on(directory)):
        console.print(sentence)
    with suppress(OSError):
        if finished and (results := read_results(directory.evaluations_file)):
            console.print(describe_evaluation(results[-1]))
    if finished and directory.metrics_file.exists():
        problem = _draw(directory)
        console.print(f"curves {problem or directory.curves_file}")
    elif directory.metrics_file.exists():
        console.print(f"draw the curves with: afterplay plot {_short(directory)}")


def _where_it_goes_on(directory: RunDirectory) -> str:
    """A sentence about the newest checkpoint of a run that has not finished; empty before the first step."""
    step, saved = last_step(directory.metrics_file), newest_checkpoint(directory)
    if step <= saved:
        return f"the checkpoint has step {saved}: the run continues with step {saved + 1}" if saved else ""
    log = directory.log_file("learner")
    return (
        f"the newest checkpoint has step {saved} of {step}: the run continues from there, steps to make again: "
        f"{step - saved} ({log} says why there is no newer one)"
    )


def _draw(directory: RunDirectory) -> str | None:
    """Draw the curves; the reason if that was not possible."""
    curves = directory.curves_file
    try:
        return draw(directory.metrics_file, curves)
    except OSError as error:
        with suppress(OSError):
            curves.unlink()
        return f"not drawn: {error}. Draw them with: afterplay plot {_short(directory)}"


def _short(directory: RunDirectory) -> str:
    return min((os.path.relpath(directory.path), str(directory.path)), key=len)
