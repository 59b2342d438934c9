"""``afterplay eval``: evaluate a checkpoint in a small run with a directory of its own, whose weights never change."""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from rich.console import Console

from pipeline.config import RunConfig
from pipeline.config.explain import resolve
from pipeline.config.load import dump, load, reasons
from pipeline.errors import ConfigurationError
from pipeline.runtime.children import OrphanReaper
from pipeline.runtime.folders import find_damage
from pipeline.runtime.plugins import load_main
from pipeline.runtime.process import ExitCode
from pipeline.runtime.run_directory import RunDirectory, read_json, write_bytes_atomically, write_json_atomically
from pipeline.store.evaluation_results import read_results
from pipeline.supervisor.history import complete_checkpoints
from pipeline.supervisor.inventory import local_inventory
from pipeline.supervisor.plan import plan, preflight_place
from pipeline.supervisor.preflight import check_before_run
from pipeline.supervisor.processes import specs_of
from pipeline.supervisor.run import run_lock, supervise
from pipeline.views.tables import plain_console, table

_NUMBER = re.compile(r"u?0*(\d+)")
EVALUATOR = "evaluator"


@dataclass(frozen=True, slots=True)
class EvaluationRequest:
    """Options of the command; None: the value of the run file."""

    checkpoint: str | None = None
    split: str | None = None
    tasks: int | None = None
    samples: int | None = None
    greedy: bool | None = None
    pass_at: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Weights:
    """Weights to evaluate."""

    name: str
    """``initial``, ``u000020`` or ``best-u000020``."""
    model: Path | None
    """Model folder; None: that of the run file."""
    updates: int = 0
    policy_version: int = 0


def evaluate_checkpoint(
    target: Path, request: EvaluationRequest, overrides: Sequence[str] = (), console: Console | None = None
) -> ExitCode:
    """Evaluate and print. Raises :class:`ConfigurationError`; FAILED where an environment has no score."""
    console = console or plain_console()
    file = target / "config.yaml" if target.is_dir() else target
    if target.is_dir() and not file.exists():
        raise ConfigurationError(f"expected a run directory or a run file, got {target}, which has no config.yaml")
    config = load(file, overrides, environment={} if target.is_dir() else None)
    run = RunDirectory(target.absolute() if target.is_dir() else config.run.path.absolute())
    weights = find_weights(run, request.checkpoint)
    if weights.model is None:
        if load_main("learner.models.prepare:holds_model")(config, run.model):
            weights = replace(weights, model=run.model)  # model.source may be relative to another folder
    elif problem := find_damage(weights.model.parent):
        raise ConfigurationError(
            f"--checkpoint: {weights.name} in {run.checkpoints} is damaged ({problem}): name another one of "
            f"{_there(run)}"
        )
    there = next(folder for folder in run.evaluations.parents if folder.exists())
    directory, inventory = _folder(run, weights), local_inventory()
    try:
        config = evaluation_config(config, weights, request, directory)
        config = resolve(plan(config, inventory, EVALUATOR).fitting().config)
        for note in check_before_run(config):
            console.print(note)
    except BaseException:
        with suppress(OSError):  # there is something else in one of them
            for folder in itertools.takewhile(lambda f: f != there, (directory.path, *directory.path.parents)):
                folder.rmdir()
        raise
    directory.create()
    with run_lock(directory) as lock, OrphanReaper(keep_open=(lock,)) as reaper:
        write_bytes_atomically(directory.config_file, dump(config).encode())
        about = {"updates": weights.updates, "policy_version": weights.policy_version, "checkpoint": weights.name}
        write_json_atomically(directory.evaluated_file, about)
        places = (preflight_place(inventory), *plan(config, inventory, EVALUATOR).places)
        specs = specs_of(places, config, directory)
        results = partial(read_results, directory.evaluations_file)
        code = supervise(config, specs, directory, reaper, console, lambda: bool(results()))
    for file in directory.model.rglob("*.safetensors"):  # the tokenizer stays for afterplay show
        file.unlink(missing_ok=True)
    if code or not (found := results()):
        return code or ExitCode.FAILED
    return print_result(found[-1], weights.name, directory, console)


def find_weights(run: RunDirectory, checkpoint: str | None) -> Weights:
    """``None``, ``latest``, ``best``, or a number of updates. Raises :class:`ConfigurationError`."""
    found = complete_checkpoints(run)
    if checkpoint in (None, "latest") and found:
        return _weights(found[max(found)])
    if checkpoint in (None, "initial"):
        return Weights("initial", None)
    if checkpoint == "latest":
        raise ConfigurationError(f"--checkpoint latest: expected checkpoints in {run.checkpoints}, found none yet")
    if checkpoint == "best":
        best = run.checkpoints / "best"
        if not (best / "state.json").exists():
            raise ConfigurationError(
                f"--checkpoint best: expected {best}, found none: it is kept with evaluation.keep_best, once an "
                "evaluation is complete"
            )
        return _weights(best.resolve())
    match = _NUMBER.fullmatch(checkpoint)
    if match and int(match[1]) in found:
        return _weights(found[int(match[1])])
    raise ConfigurationError(
        f"--checkpoint: expected best, latest, initial or one of the checkpoints that are kept ({_there(run)}), "
        f"got {checkpoint!r}"
    )


def _there(run: RunDirectory) -> str:
    return ", ".join(str(n) for n in sorted(complete_checkpoints(run))) or "none"


def evaluation_config(
    config: RunConfig, weights: Weights, request: EvaluationRequest, directory: RunDirectory
) -> RunConfig:
    """The run file of the evaluation. Raises :class:`ConfigurationError` where the options do not fit."""
    raw = config.model_dump()
    if request.greedy and request.samples is None:
        request = replace(request, samples=1)  # all greedy rollouts of a task are the same
    given = {key: getattr(request, key) for key in ("split", "tasks", "samples") if getattr(request, key) is not None}
    section = raw["evaluation"] | given
    if request.greedy:
        section["temperature"] = 0.0
    elif section["temperature"] == 0 and (request.greedy is False or section["samples"] > 1):
        section["temperature"] = None
    if request.pass_at:
        section["pass_at"] = request.pass_at
    elif request.samples is not None:
        kept = {k for k in section["pass_at"] if k <= request.samples}
        section["pass_at"] = tuple(sorted({1, *kept, request.samples}))
    section |= {"every": 1, "start": True, "end": False, "strict": False, "keep_best": None}
    raw["evaluation"] = section
    folder, name = directory.path.parent, directory.path.name
    raw["run"] |= {"directory": folder, "name": name, "total_steps": weights.updates + 1, "id": None}
    raw["stage"] |= {"address": "ipc://", "store": None}
    raw["replay"]["enabled"] = False
    raw["loss"]["supervised"]["weight"] = 0.0
    raw["metrics"]["port"] = 0
    raw["lessons"]["enabled"] = False
    raw["report_to"] = ()
    raw["publish"]["lora"] = "merged"
    if config.engine.kind != "external":  # they start on this machine, wherever those of the run are
        own = {"host": "127.0.0.1", "port": 0, "urls": (), "discovery": None, "actor_key": None, "learner_key": None}
        raw["engine"] |= own
    for environment in raw["environments"].values():
        environment["weight"] = 0.0
    if weights.model is not None:
        raw["model"] |= {"source": str(weights.model), "tiny": {}}
    try:
        return RunConfig.model_validate(raw)
    except ValidationError as error:
        raise ConfigurationError(f"eval: {reasons(error)}") from error


def print_result(result: Mapping[str, Any], name: str, directory: RunDirectory, console: Console) -> ExitCode:
    """Print the table. FAILED unless the evaluation is complete and every environment has a score."""
    ks, counted = sorted(map(int, result["pass_at"])), ("truncated", "failed", "missing")
    rows = [
        (
            environment, scores["tasks"], _number(scores["score"], scores["se"]),
            *(_number(scores["pass_at"][str(k)]) for k in ks), *(scores[what] for what in counted),
        )
        for environment, scores in result["environments"].items()
    ]  # fmt: skip
    how = "greedy"
    if not result["greedy"]:
        how = f"{result['samples']} rollouts a task at temperature {result['temperature']:g}"
    console.print(f"{name}: {result['updates']} updates, split {result['split']}, {how}", style="bold")
    console.print(
        table(("environment", ">tasks", ">score", *(f">pass@{k}" for k in ks), *(f">{what}" for what in counted)), rows)
    )
    console.print(f"score {_number(result['score'], result['se'])} over all environments")
    console.print(f"written to {directory.evaluations_file}")
    if result["status"] != "complete":
        console.print(f"not complete: {result['status']}", style="red")
    unscored = [environment for environment, scores in result["environments"].items() if scores["score"] is None]
    if unscored:
        console.print(f"without a scored rollout: {', '.join(unscored)} (logs in {directory.logs})", style="red")
    return ExitCode.FAILED if unscored or result["status"] != "complete" else ExitCode.FINISHED


def _weights(folder: Path) -> Weights:
    state = read_json(folder / "state.json") or {}
    version = max(0, int(state.get("policy_version", 0)))
    return Weights(folder.name, (folder / "model").absolute(), int(state.get("updates", 0)), version)


def _folder(run: RunDirectory, weights: Weights) -> RunDirectory:
    """A new directory each time: results are never overwritten."""
    for number in itertools.count(1):
        path = run.evaluations / f"{weights.name}-{number}"
        with suppress(FileExistsError):
            path.mkdir(parents=True)
            return RunDirectory(path)
    raise AssertionError


def _number(value: float | None, error: float | None = None) -> str:
    return ("none" if value is None else f"{value:.3f}") + ("" if error is None else f" ± {error:.3f}")
