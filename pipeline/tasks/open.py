"""Opens the data of a run file, and makes the checks that need the data."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path

from pipeline.config import RunConfig
from pipeline.config.rollouts import EnvironmentConfig
from pipeline.config.tasks import TRAIN, TasksFromConfig
from pipeline.errors import ConfigurationError
from pipeline.tasks.readers import HuggingFaceRows, JsonlRows, ParquetRows, Rows, find_files
from pipeline.tasks.rows import Reading
from pipeline.tasks.source import Indexing, TaskSource, TaskSplit

log = logging.getLogger(__name__)

QUESTION_ENVIRONMENT = "question"
"""The built-in environment whose rows must ask something."""


def open_sources(config: RunConfig) -> dict[str, TaskSource]:
    """The data of every environment that has some. Reads all of it once.

    Raises :class:`ConfigurationError` for data that cannot be read or used, or that is too little for the run."""
    sources: dict[str, TaskSource] = {}
    try:
        for name, section in config.environments.items():
            if section.tasks_from is not None:
                sources[name] = open_source(name, section, config.run.seed)
        _check_epochs(
            config,
            {name: source.splits[TRAIN] for name, source in sources.items() if name in config.trained_environments},
        )
    except BaseException:
        for source in sources.values():
            source.close()
        raise
    return sources


def open_source(name: str, section: EnvironmentConfig, run_seed: int = 0) -> TaskSource:
    """The data of the environment ``name``, read once. Raises :class:`ConfigurationError`."""
    data = section.tasks_from
    assert data is not None
    reading = Reading(data, question=section.name == QUESTION_ENVIRONMENT)
    indexing = Indexing(name, data, reading)
    opened: dict[str, Rows] = {}
    try:
        if data.divides:
            everything = _rows(name, data, data.path, data.split, reading)
            opened = dict.fromkeys(data.splits, everything)
            indexes = indexing.divided(everything)
            opened = dict.fromkeys(indexes, everything)
        else:
            for split, place in data.splits.items():
                opened[split] = _rows(name, data, data.path or Path(str(place)), str(place), reading)
            indexes = indexing.named(opened)
        for split, index in indexes.items():
            if not index.numbers:
                raise _empty(name, data, split, indexing)
    except BaseException:
        for rows in opened.values():
            rows.close()
        raise
    seeds = section.seed, run_seed
    source = TaskSource(
        {s: TaskSplit(name, s, data, seeds, opened[s], index, reading) for s, index in indexes.items()},
        dict(indexing.counts),
        tuple(indexing.bad),
        tuple({id(rows): rows for rows in opened.values()}.values()),
    )
    sizes = ", ".join(f"{len(split)} of {split.split}" for split in source.splits.values())
    counts = ", ".join(f"{n} {kind}" for kind, n in source.counts.items() if n)
    log.info("environments.%s: %s: %s tasks (rows: %s)", name, data.where, sizes, counts)
    for reason in source.bad:
        log.warning("environments.%s: skipped %s", name, reason)
    return source


def describe_tasks(config: RunConfig) -> list[str]:
    """Summary of :func:`open_sources` for people, in lines. Raises :class:`ConfigurationError`."""
    lines = []
    for name, source in open_sources(config).items():
        lines.append(f"environments.{name}: {', '.join(f'{n} {kind}' for kind, n in source.counts.items() if n)}")
        lines += [f"  skipped {reason}" for reason in source.bad]
        for split in source.splits.values():
            first = split[split.order(0)]
            lines.append(f"  {split.split}: {len(split)} tasks, first {first.task_id} {str(dict(first.payload))[:200]}")
        source.close()
    return lines


def _rows(name: str, data: TasksFromConfig, path: Path | None, split: str, reading: Reading) -> Rows:
    where = f"environments.{name}.tasks_from"
    try:
        if data.kind == "huggingface":
            return HuggingFaceRows(data, split, reading.columns)
        assert path is not None
        files = find_files(path, f".{data.kind}", "path")
        return ParquetRows(files, reading.columns) if data.kind == "parquet" else JsonlRows(files)
    except ConfigurationError as error:
        raise ConfigurationError(f"{where}: {error}") from error


def _empty(name: str, data: TasksFromConfig, split: str, indexing: Indexing) -> ConfigurationError:
    counts = ", ".join(f"{n} {kind}" for kind, n in indexing.counts.items() if n) or "an empty file"
    first = f" (the first bad one: {indexing.bad[0]})" if indexing.bad else ""
    return ConfigurationError(
        f"environments.{name}.tasks_from: expected at least one row for split {split} of {data.where}, got {counts}"
        f"{first}: see filter, splits and columns"
    )


def _check_epochs(config: RunConfig, splits: Mapping[str, TaskSplit]) -> None:
    """``epochs`` are a promise about how often a row is trained; replay groups need no new tasks, so then it is not
    known beforehand."""
    limits = [splits[name].tasks_max if name in splits else None for name in config.trained_environments]
    known = [limit for limit in limits if limit is not None]
    needed = config.run.total_steps * config.groups.groups_per_step
    if not known or config.replay.enabled or len(known) < len(limits) or sum(known) >= needed:
        return
    steps = sum(known) // config.groups.groups_per_step
    remedy = f"run.total_steps: {steps}" if steps else f"groups.groups_per_step to at most {sum(known)}"
    raise ConfigurationError(
        f"run.total_steps={config.run.total_steps} needs {needed} tasks (groups.groups_per_step="
        f"{config.groups.groups_per_step}), but tasks_from.epochs allows {sum(known)}: set {remedy}, "
        "or more epochs, or none"
    )
