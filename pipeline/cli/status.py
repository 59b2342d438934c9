"""``afterplay status RUN``: processes, newest step, phase times, forecast, evaluations and ledger of a run."""

from __future__ import annotations

from contextlib import suppress

from rich.console import Console
from rich.table import Table

from pipeline.config import RunConfig
from pipeline.config.load import load
from pipeline.errors import ConfigurationError, StoreError
from pipeline.runtime.disk import FREE_BYTES_MIN, free_bytes, size
from pipeline.runtime.engine_addresses import LEASE_SECONDS, EngineRegistry
from pipeline.runtime.folders import damaged_folders
from pipeline.runtime.process import ExitCode
from pipeline.runtime.run_directory import RunDirectory, is_locked, read_json
from pipeline.store.evaluation_results import read_results
from pipeline.store.ledger import ACCOUNTS, Ledger, read_ledger
from pipeline.store.store import store_path
from pipeline.supervisor.forecast import forecast, measure
from pipeline.views.step_lines import MetricsTail, describe, describe_evaluation, print_phase_times
from pipeline.views.tables import counts_table, describe_version, plain_console, table


def show_status(directory: RunDirectory) -> ExitCode:
    """Print the status. Returns FAILED if the ledger does not balance.

    Raises :class:`ConfigurationError` when there is no run directory.
    """
    console = plain_console()
    if not directory.config_file.exists():
        raise ConfigurationError(f"expected a run directory, got {directory.path}, which has no config.yaml")
    alone = sorted(path.stem for path in directory.processes.glob("*.json"))
    try:
        life = "alive" if is_alive(directory) else "not running"
    except OSError as error:
        life = f"whether it is alive cannot be seen: {error.strerror}"
    if life != "alive" and alone and not directory.processes_file.exists():
        life = f"roles that were started one by one: {', '.join(alone)}"
    console.print(f"{directory.path}: {life}", style="bold")
    if (free := free_bytes(directory.path)) < FREE_BYTES_MIN:
        console.print(f"waiting for disk: {directory.path} has {size(free)} free, states are older", style="red")
    _processes(directory, console)
    for name, (url, age) in EngineRegistry(directory.engines).ages().items():
        gone = age > LEASE_SECONDS
        told = f"not heard from for {age:.0f} s, counts as gone" if gone else f"announced {age:.0f} s ago"
        console.print(f"{name} at {url}: {told}", style="yellow" if gone else "")
    tail = MetricsTail(directory.metrics_file)
    tail.read()
    config = load(directory.config_file, environment={})
    if tail.last is not None:
        console.print(describe(tail.last, config.run.total_steps))
        print_phase_times(directory.metrics_file, console)
        with suppress(ConfigurationError, StoreError):  # too few updates
            console.print(_forecast(config, directory))
    _evaluations(directory, console)
    for name, facts in damaged_folders(directory.checkpoints).items():
        console.print(facts.get("sentence") or f"checkpoints/{name} is damaged", style="red")
    try:
        ledger = read_ledger(store_path(config, directory))
    except StoreError as error:
        console.print(f"no ledger: {error}", style="yellow")
        return ExitCode.FINISHED
    return _accounts(ledger, console)


def _forecast(config: RunConfig, directory: RunDirectory) -> Table:
    """Course of the newest updates, beside what their speeds forecast."""
    speeds, measured = measure(config, directory)
    outlook, bounds = forecast(config, speeds, measured.updates_left)
    rows = zip(measured.rows().items(), outlook.rows().values(), strict=True)
    return table(("newest updates", ">measured", ">forecast"), ((*row, other) for row, other in rows), bounds)


def _evaluations(directory: RunDirectory, console: Console) -> None:
    """Print the first, the best kept and the newest evaluation."""
    results = {int(result["evaluation"]): result for result in read_results(directory.evaluations_file)}
    if not results:
        return
    best = (read_json(directory.checkpoints / "best" / "evaluation.json") or {}).get("evaluation")
    for number in sorted(n for n in results if n in (min(results), best, max(results))):
        kept = "  kept as checkpoints/best" if number == best else ""
        console.print(describe_evaluation(results[number]) + kept)


def is_alive(directory: RunDirectory) -> bool:
    """True while a supervisor holds the lock of the directory."""
    return is_locked(directory.lock_file)


def _processes(directory: RunDirectory, console: Console) -> None:
    rows = []
    for name, state in (read_json(directory.processes_file) or {}).items():
        age = state.get("progress_age_seconds")
        progress = None if age is None else f"{age:.0f} s ago"
        restarts, exit_code = state.get("restarts") or None, state.get("exit_code")
        rows.append(
            [name, *map(state.get, ("phase", "pid", "state")), progress, state.get("reason"), restarts, exit_code]
        )
    if rows:
        headings = ("process", "phase", "pid", "state", "progress", "waits for", "restarts", "exit")
        console.print(table(headings, rows))


def _accounts(ledger: Ledger, console: Console) -> ExitCode:
    counts, always = {name: getattr(ledger, name) for name in ACCOUNTS}, ("orders", "trajectories", "groups")
    shown = {name: found for name, found in counts.items() if name in always or any(found.values())}
    console.print(counts_table({name.replace("_", " "): found for name, found in shown.items()}))
    for name, outcomes in ledger.outcomes.items():
        if outcomes.failed:
            console.print(outcomes.describe(name), style="yellow" if outcomes.succeeded else "red")
    console.print(f"updates {ledger.updates}, {describe_version(ledger.policy_version)}")
    problems = ledger.audit()
    for problem in problems:
        console.print(f"the ledger does not balance: {problem}", style="red")
    if not problems:
        console.print("every order, trajectory and group is accounted for", style="green")
    return ExitCode.FAILED if problems else ExitCode.FINISHED
