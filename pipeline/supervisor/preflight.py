"""Preflight: what a run file names is there, fits and works, with one sentence for each thing that does not.

``afterplay config check`` makes all checks. ``afterplay run`` makes those of the run directory, of the model and of
external engines before it starts anything, and those of plug-ins in a process beside the preparation of the model,
which ends the run if something is wrong.
"""

from __future__ import annotations

import itertools
import logging
import os
import time
from collections.abc import Mapping, Sequence

from pipeline.config import RunConfig
from pipeline.config.explain import resolve
from pipeline.config.tasks import TRAIN
from pipeline.errors import ConfigurationError, Findings, SchemaError
from pipeline.runtime.disk import free_bytes, size
from pipeline.runtime.engine_keys import find_key
from pipeline.runtime.plugins import load_main
from pipeline.runtime.run_directory import PREPARE_SECONDS_MAX, RunDirectory, await_model
from pipeline.schema import Task
from pipeline.scorer.graders import BUILT_IN, check_answer
from pipeline.supervisor.inventory import local_inventory
from pipeline.supervisor.plan import plan
from pipeline.tasks.open import open_source
from pipeline.tasks.source import TaskSource
from pipeline.trackers.tracker import require_package
from pipeline.transport.curve import server_keys

log = logging.getLogger(__name__)

NEW_RUN_BYTES_MIN = 16 * 10**6
"""Room for a tiny model, its checkpoints and a small store; every other run needs more."""
ROWS_MAX = 3
"""Rows of data that are played."""
ANSWERS_SECONDS_MAX = 10.0
"""For reading the answers of one data set: some 200,000 rows."""
LOW_PRIORITY = 19
"""Niceness of a check that may take its time: the processes of the run start meanwhile."""


def check_all(config: RunConfig) -> Findings:
    """All checks of ``afterplay config check``. Plug-ins are imported, and run in this process."""
    found = Findings()
    try:
        config = load_main("learner.process.preflight:with_options")(config)
    except ConfigurationError as error:
        found.problems += str(error).splitlines()
    with found.collecting():
        fitting = plan(config, local_inventory()).fitting()
        found.notes += fitting.reasons
        resolve(fitting.config)
    for tracker in config.report_to:
        with found.collecting():
            require_package(tracker)
    with found.collecting():
        check_directory(RunDirectory(config.run.path.absolute()))
    for name in ("actor_key", "learner_key"):
        with found.collecting():
            find_key(config.engine, name)
    if config.stage.curve is not None:
        with found.collecting():
            server_keys(config.stage.curve)
    _check_engines(config, found)
    before = len(found.problems)
    load_main("learner.models.prepare:check_model")(config, found)
    has_model = len(found.problems) == before
    if has_model:
        load_main("learner.process.preflight:check_routers")(config, found)
    _check_functions(config, found)
    tasks = _tasks(config, found, whole=True)
    _call_functions(config, tasks, found)
    openings = load_main("actors.process.preflight:check_environments")(config, tasks, found)
    reference = config.learner.reference.folder
    if has_model and (openings or reference):
        with load_main("learner.models.prepare:tokenizer_folder")(config) as folder:
            if folder is None:
                found.notes.append("prompts are not measured: the tokenizer of model.source is not on this machine")
            else:
                load_main("actors.process.preflight:check_prompts")(config, openings, folder, found)
            if folder is not None and reference is not None:
                with found.collecting():
                    same = load_main("learner.models.info:require_same_tokenizer")
                    same(reference, folder, trust_remote_code=config.model.trust_remote_code)
    return found


def check_beside_run(config: RunConfig) -> None:
    """Checks of plug-ins in a process of a run that starts; then, when the model is there, the length of prompts.

    Raises :class:`ConfigurationError`. Where a run resumes, what user code raises is logged and not raised. An error of
    a check itself is logged too: it is no reason to end a run."""
    directory = RunDirectory(config.run.path)
    found = Findings(forgiving=directory.metrics_file.exists())
    try:
        load_main("learner.models.prepare:check_model")(config, found)
        _check_functions(config, found)
        tasks = _tasks(config, found, whole=False)
        _call_functions(config, tasks, found)
        openings = load_main("actors.process.preflight:check_environments")(config, tasks, found, at_once=True)
        load_main("learner.process.preflight:check_routers")(config, found)
        found.require_none()
        os.nice(LOW_PRIORITY)
        await_model(directory.model, PREPARE_SECONDS_MAX)
        load_main("actors.process.preflight:check_prompts")(config, openings, directory.model, found)
        found.require_none()
    except ConfigurationError:
        raise
    except Exception:
        log.exception("the checks are given up, and the run continues")
    for note in found.notes:
        log.info("%s", note)


def check_before_run(config: RunConfig, fresh: bool = False) -> list[str]:
    """Notes on external engines. Raises :class:`ConfigurationError` where ``model.source`` leads nowhere or does not
    fit the run file, and where an external engine does not answer. Nothing is downloaded, and no heavy library
    imported."""
    model, engines = Findings(), Findings()
    load_main("learner.models.prepare:check_model")(config, model, fresh)
    _check_engines(config, engines)
    Findings(model.problems + engines.problems).require_none()
    return engines.notes


def check_directory(directory: RunDirectory) -> None:
    """Raises :class:`ConfigurationError` where the run directory cannot be made or written, or has no room for a new
    run. Creates nothing."""
    path = directory.path
    there = next(folder for folder in (path, *path.parents) if os.path.lexists(folder))
    if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
        reason = "which may not be written" if there.is_dir() else "which is no folder"
        raise ConfigurationError(
            f"run.directory: expected a folder for the run at {path}, got {there}, {reason}: give another one with "
            "--set run.directory=DIR"
        )
    free = free_bytes(path)
    if free < NEW_RUN_BYTES_MIN and not directory.metrics_file.exists():
        raise ConfigurationError(
            f"run.directory: expected at least {size(NEW_RUN_BYTES_MIN)} free for a new run in {path}, got "
            f"{size(free)}: remove something there, or give another one with --set run.directory=DIR"
        )


def _check_engines(config: RunConfig, found: Findings) -> None:
    if config.engine.kind == "external" and config.engine.urls:
        load_main("actors.process.preflight:check_engines")(config, found)
    if config.learner.routing_replay:
        with found.collecting():
            load_main("actors.servers.launch:check_routing_replay")(config)


def _check_functions(config: RunConfig, found: Findings) -> None:
    """The user's own functions of rewards, advantages, losses and lessons lead somewhere."""
    from pipeline.lessons.writer import LessonWriter
    from pipeline.runtime.plugins import resolve as find_function
    from pipeline.scorer.scorer import Scorer

    with found.collecting():
        Scorer(config.scorer)
    for key, path in _own_functions(config).items():
        with found.collecting(f"{key}: "):
            find_function(path, "function")
    if config.lessons.enabled:
        with found.collecting("lessons.writer: "):
            LessonWriter(config.lessons, config.replay.success_threshold)


def _own_functions(config: RunConfig) -> dict[str, str]:
    shaping = config.advantage.shaping
    named = {"advantage.estimator": config.advantage.estimator.name, "loss.policy": config.loss.policy.name}
    own = {key: name for key, name in named.items() if ":" in name}
    return own if shaping is None else {**own, "advantage.shaping": shaping}


def _call_functions(config: RunConfig, tasks: Mapping[str, Sequence[Task]], found: Findings) -> None:
    """The user's own functions of advantages and losses take and give what the learner does. Unless one of them was not
    found."""
    if _own_functions(config) and not found.problems:
        load_main("learner.process.preflight:check_own_functions")(config, tasks, found)


def _check_answers(config: RunConfig, name: str, source: TaskSource, found: Findings) -> None:
    """Look for rows whose answer a built-in grader cannot grade with: no rollout of them would have a reward."""
    functions = [f for f in config.scorer.functions if f.path in BUILT_IN and f.applies_to(name)]
    ends = time.monotonic() + ANSWERS_SECONDS_MAX
    for function in functions:
        wrong: list[str] = []
        for task in itertools.takewhile(lambda _: time.monotonic() < ends, itertools.chain(*source.splits.values())):
            try:
                check_answer(function.path, task, function.options)
            except SchemaError as error:
                wrong.append(str(error))
        if wrong:
            more = f" (and {len(wrong) - 1} more)" if len(wrong) > 1 else ""
            found.problems.append(
                f"environments.{name}.tasks_from: {function.known_as} cannot grade every row: {wrong[0]}{more}. Mend "
                "the data, or leave such rows out with tasks_from.filter"
            )


def _tasks(config: RunConfig, found: Findings, *, whole: bool) -> Mapping[str, Sequence[Task]]:
    """The first rows of the data of each environment that has some. ``whole``: all of it is read, as the replay stage
    does when a run starts."""
    tasks: dict[str, Sequence[Task]] = {}
    for name, section in config.environments.items():
        data = section.tasks_from
        if data is None:
            continue
        tasks[name] = ()
        if data.name is not None:
            found.notes.append(f"environments.{name}: its data {data.name} on the hub is not read")
            continue
        if not whole:
            data = data.model_copy(update={"limit": min(ROWS_MAX, data.limit or ROWS_MAX)})
        with found.collecting():
            source = open_source(name, section.model_copy(update={"tasks_from": data}), config.run.seed)
            try:
                split = source.splits.get(TRAIN) or next(iter(source.splits.values()))
                tasks[name] = [split[i] for i in range(min(ROWS_MAX, len(split)))]
                _check_answers(config, name, source, found)
            finally:
                source.close()
    return tasks
