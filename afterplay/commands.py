"""``train``, ``evaluate``, ``retrain`` and ``load``: commands of ``afterplay`` as functions. Each run is processes of
its own; an update is made again in this one."""

from __future__ import annotations

import inspect
import os
import re
import sys
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from afterplay.run import Run, Supervised, reason_in, whole
from afterplay.run_file import Config, EnvironmentName, assignments, read_run_file
from pipeline.errors import ConfigurationError, RunFailed
from pipeline.runtime.children import ChildGroup, OrphanReaper, module_command, wait_passively
from pipeline.runtime.plugins import load_main, resolve
from pipeline.runtime.run_directory import RunDirectory, read_json
from pipeline.store.evaluation_results import read_results
from pipeline.supervisor.run import RunIsAlive, empty_directory, require_fresh_start, run_lock

OUTPUT_BYTES_MAX = 1 << 16
_RESULTS = re.compile(r"^written to (.+)$", re.MULTILINE)
_DIRECTORY = re.compile(r"^run directory (.+?)(?:  \(logs in .*)?$", re.MULTILINE)

Reward = Callable[..., Any] | str
_started: dict[Path, Run] = {}
"""The newest run of this process in each directory."""
_used: dict[Path, threading.Lock] = {}
"""Held while a thread of this process starts a run, or evaluates a configuration, in a directory."""


def train(
    config: Config,
    environment: EnvironmentName | None = None,
    *,
    reward: Reward | None = None,
    fresh: bool = False,
    **overrides: Any,
) -> Run:
    """Start ``afterplay run`` and return its handle at once.

    ``config`` is a run file, ``"@tiny"``, or a mapping of sections. ``environment`` is a class, an instance that is a
    dataclass, or a name; it replaces the environments of the configuration by one section, named like the class.
    ``reward`` is a function of a trajectory, which replaces the environment's score unless
    ``scorer.environment_weight`` is set. ``overrides`` are ``learner={"learning_rate": 1e-5}`` or
    ``learner__learning_rate=1e-5``. A run directory that exists is resumed; ``fresh`` empties it first, unless
    something refuses the run. The run ends when this Python process does; train it again to resume.

    Raises :class:`ConfigurationError`, and :class:`pipeline.supervisor.run.RunIsAlive`. A fault that
    shows only in the run, such as an environment that raises, is :class:`RunFailed` of the handle.
    """
    run_file = read_run_file(config, environment, reward, overrides)
    directory, run = run_file.directory, run_file.config.run
    with _alone(directory):
        with _locked(directory):
            if fresh:
                with ThreadPoolExecutor(1) as thread:  # a notebook has an event loop in this one
                    thread.submit(require_fresh_start, run_file.config, directory).result()
                empty_directory(directory)
            if (finished := read_json(directory.finished_file)) and finished["steps"] >= run.total_steps:
                warnings.warn(
                    f"{directory.path} is finished: {finished['steps']} steps. Continue it with a larger "
                    "run.total_steps, or start over with fresh=True",
                    stacklevel=2,
                )
            directory.outcome_file.unlink(missing_ok=True)
            file = run_file.write()
        grace = run_file.config.checkpoint.drain_seconds_max
        _started[directory.path] = Run(directory, Supervised(directory, file, grace, run_file.variables))
        return _started[directory.path]


@contextmanager
def _alone(directory: RunDirectory) -> Iterator[None]:
    """Keep other threads of this process away from the run file that it writes. Raises :class:`RunIsAlive`."""
    if not (lock := _used.setdefault(directory.path, threading.Lock())).acquire(blocking=False):
        raise RunIsAlive(
            f"{directory.path} is in use by another thread of this process, which starts a run or an evaluation there: "
            "wait until that one has returned, or give this one another name (run__name='NAME')"
        )
    try:
        yield
    finally:
        lock.release()


@contextmanager
def _locked(directory: RunDirectory) -> Iterator[None]:
    """Hold the directory's lock. A run that this process has just started takes it later, when it has read its run
    file, and must find that file as it was. Raises :class:`RunIsAlive`."""
    if (started := _started.get(directory.path)) and started.alive:
        raise RunIsAlive(
            f"{directory.path} is in use by a run that this process has started: stop that one (run.stop()), or give "
            "this one another name (run__name='NAME')"
        )
    with run_lock(directory, mark=False):
        yield


def load(directory: str | Path) -> Run:
    """The handle of a run that is finished, was stopped, or is alive in other processes. Raises
    :class:`ConfigurationError` where there is none."""
    found = RunDirectory(Path(directory).expanduser().absolute())
    if not found.config_file.exists():
        raise ConfigurationError(f"expected a run directory, got {found.path}, which has no config.yaml")
    return Run(found)


def evaluate(
    target: Run | Config,
    environment: EnvironmentName | None = None,
    *,
    reward: Reward | None = None,
    checkpoint: str | int | None = None,
    split: str | None = None,
    tasks: int | None = None,
    samples: int | None = None,
    greedy: bool | None = None,
    pass_at: int | Sequence[int] = (),
    **overrides: Any,
) -> dict[str, Any]:
    """Run ``afterplay eval`` on a checkpoint of a run (a handle or its directory; the newest unless ``checkpoint``
    names one), or on the initial model of a configuration, and return its result: ``score``, ``se``, ``pass_at`` and
    ``environments``.

    Blocks until it is done. Raises :class:`RunFailed` with the reason when it fails, and :class:`ConfigurationError`.
    """
    if isinstance(target, Run):
        target = target.directory
    elif isinstance(target, str | os.PathLike):
        target = Path(target).expanduser()
    command, variables = module_command("pipeline.cli.app", "eval"), None
    with ExitStack() as until_its_end:
        if isinstance(target, Path) and target.is_dir():
            if environment is not None or reward is not None:
                raise ConfigurationError(f"{target} is a run, which has its own environments and rewards: omit them")
            command += [str(target), *(f"--set={assignment}" for assignment in assignments(overrides))]
        else:
            run_file = read_run_file(target, environment, reward, overrides)
            until_its_end.enter_context(_alone(run_file.directory))
            with _locked(run_file.directory):
                command.append(str(run_file.write()))
            variables = run_file.variables
            checkpoint = "initial" if checkpoint is None else checkpoint  # the run may have checkpoints
        options = {"--checkpoint": checkpoint, "--split": split, "--tasks": tasks, "--samples": samples}
        command += [f"{option}={value}" for option, value in options.items() if value is not None]
        command += [] if greedy is None else ["--greedy" if greedy else "--sampled"]
        command += [f"--pass-at={k}" for k in ([pass_at] if isinstance(pass_at, int) else pass_at)]
        reaper = until_its_end.enter_context(OrphanReaper())
        child = ChildGroup(command, reaper, environment=variables, output_bytes_max=OUTPUT_BYTES_MAX)
        code = child.end.result()
    written = _RESULTS.findall(child.stdout)
    results = read_results(Path(written[-1])) if written else []
    if not results:
        made = _DIRECTORY.findall(child.stdout)
        outcome = read_json(RunDirectory(Path(made[-1])).outcome_file) if made else None
        raise RunFailed((outcome or {}).get("reason") or reason_in(child.stdout + child.stderr, code))
    return results[-1]


def retrain(
    run: Run | str | Path, *, step: int | None = None, updates: int | None = None, **overrides: Any
) -> list[Any]:
    """Make steps of a run, or of a bundle, again in this process, as ``afterplay retrain`` does: the learner as a
    library.

    ``overrides`` are as of :func:`train`; where the run file names a function, a function may stand:
    ``loss={"policy": my_loss}``. Each element has ``step``, its ``line`` of ``metrics.jsonl`` beside the ``recorded``
    one, ``batch`` (rows and trajectories), ``report`` (``report.statistics.values`` are arrays by token), and
    ``differences`` from what the run computed, None with ``overrides``. Steps between the checkpoint and ``step`` come
    first.

    Blocks. Raises :class:`ConfigurationError` for a step that cannot be made again, and for keys that an update does
    not read.
    """
    resolve.cache_clear()  # a notebook may have defined a function again
    wait_passively()
    step, updates = (None if n is None else whole(name, n) for name, n in (("step", step), ("updates", updates)))
    sets = assignments(_named(overrides))
    target = run.directory if isinstance(run, Run) else Path(run).expanduser()
    with load_main("learner.process.bundle:open_source")(target) as source:
        return list(load_main("learner.process.retrain:retrain")(source, step, updates, sets))


def _named(value: Any, key: str = "") -> Any:
    """Functions by the name that this process finds them under. ``key`` names the place in the
    :class:`ConfigurationError` for one that has none."""
    if isinstance(value, Mapping):
        return {name: _named(inner, f"{key}.{name}".lstrip(".")) for name, inner in value.items()}
    if inspect.isfunction(value):
        module, name = value.__module__, value.__qualname__
        if getattr(sys.modules.get(module), name, None) is not value:
            raise ConfigurationError(
                f"{key.replace('__', '.')}: expected a function that its module has under its own name, got "
                f"{name}: write it with def at the top level of a module, script or notebook"
            )
        return f"{module}:{name}"
    return value
