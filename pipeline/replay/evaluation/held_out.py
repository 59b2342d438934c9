"""The tasks of an evaluation: always the same ones, read when they are ordered."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Protocol

from pipeline.config import RunConfig
from pipeline.errors import ConfigurationError
from pipeline.schema import Task
from pipeline.tasks.seeds import SeedSplit
from pipeline.tasks.source import TaskSplit
from pipeline.tasks.splits import Seeds, Splits


class Split(Protocol):
    def __len__(self) -> int: ...
    def __getitem__(self, index: int) -> Task: ...
    def task_id(self, index: int) -> str: ...


class OwnSplit:
    """A split that the environment has of its own."""

    def __init__(self, environment: str, split: str, seeds: Seeds) -> None:
        self._environment, self._split, self._seeds = environment, split, seeds

    def __len__(self) -> int:
        return len(self._seeds)

    def task_id(self, index: int) -> str:
        """``bfcl/eval/35``: its seed is 35."""
        return f"{self._environment}/{self._split}/{self._seeds[index]}"

    def __getitem__(self, index: int) -> Task:
        return Task(self.task_id(index), self._environment, self._seeds[index])


class HeldOut:
    """``sources``: the evaluated split of environments with ``tasks_from`` that have it. ``own``: splits that the
    environments have themselves. Raises :class:`ConfigurationError` where a split is missing."""

    def __init__(self, config: RunConfig, sources: Mapping[str, TaskSplit], own: Mapping[str, Splits]) -> None:
        section = config.evaluation
        found = {name: self._split(config, name, sources, own.get(name, {})) for name in config.environments}
        wanted = section.environments or tuple(
            name
            for name, split in found.items()
            if split is not None or not (section.only or name in config.trained_environments)
        )
        if missing := [name for name in wanted if found[name] is None]:
            raise _missing(config, missing, own)
        if not wanted:
            raise _missing(config, list(config.environments), own)
        self.splits: dict[str, Split] = {name: split for name in wanted if (split := found[name]) is not None}
        self._places = [
            (name, index * len(split) // n)
            for name, split in self.splits.items()
            for n in (min(section.tasks, len(split)),)
            for index in range(n)
        ]

    def __len__(self) -> int:
        return len(self._places)

    def __getitem__(self, place: int) -> Task:
        name, index = self._places[place]
        return self.splits[name][index]

    def environment(self, place: int) -> str:
        return self._places[place][0]

    @property
    def tasks(self) -> dict[str, int]:
        """How many of each environment."""
        return {name: sum(env == name for env, _ in self._places) for name in self.splits}

    @property
    def fingerprint(self) -> str:
        """Changes with anything that changes which tasks these are."""
        digest = hashlib.blake2b(digest_size=16)
        for name, index in self._places:
            digest.update(f"{self.splits[name].task_id(index)}\n".encode())
        return digest.hexdigest()

    @staticmethod
    def _split(config: RunConfig, name: str, sources: Mapping[str, TaskSplit], own: Splits) -> Split | None:
        section, split = config.environments[name], config.evaluation.split
        if section.tasks_from is not None:
            return sources.get(name)
        if split in own:
            return OwnSplit(name, split, own[split]) if len(own[split]) else None
        if split in section.held_out:
            if own:
                raise ConfigurationError(
                    f"environments.{name} has splits of its own ({', '.join(own)}), and held_out.{split} would add "
                    "seeds that it may map to tasks of train: set evaluation.split to one of its own"
                )
            return SeedSplit(name, section, split)
        return None


def _missing(config: RunConfig, names: list[str], own: Mapping[str, Splits]) -> ConfigurationError:
    split = config.evaluation.split
    has = "; ".join(f"{name} has {', '.join(_names(config, name, own)) or 'none'}" for name in names)
    return ConfigurationError(
        f"evaluation.split is {split}, which is not there ({has}): set evaluation.split to another, or hold tasks out, "
        f"for example environments: {{{names[0]}: {{held_out: {{{split}: 64}}}}}}, with tasks_from: "
        f"{{splits: {{train: 0.9, {split}: 0.1}}}}"
    )


def _names(config: RunConfig, name: str, own: Mapping[str, Splits]) -> list[str]:
    """Every split that the environment has, from wherever."""
    section = config.environments[name]
    if section.tasks_from is not None:
        return list(section.tasks_from.splits)
    return [*own.get(name, ()), *section.held_out]
