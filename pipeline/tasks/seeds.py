"""Held-out tasks of environments whose tasks are seeds."""

from __future__ import annotations

import zlib
from collections.abc import Iterator

from pipeline.config.play import HELD_OUT_MAX, HELD_OUT_SEED, EnvironmentConfig
from pipeline.errors import ConfigurationError
from pipeline.schema import Task


class SeedSplit:
    """The tasks of one split of ``held_out``; like :class:`~pipeline.tasks.source.TaskSplit`, without data.

    Seeds of training end below ``HELD_OUT_SEED``; those of a split begin above it at a place that its name alone
    decides, so no task is in two splits, and another split more changes none.
    Raises :class:`ConfigurationError` for a split that the section does not name.
    """

    def __init__(self, environment: str, section: EnvironmentConfig, split: str) -> None:
        if split not in section.held_out:
            raise ConfigurationError(
                f"expected a split of environments.{environment}.held_out ({', '.join(section.held_out) or 'none'}), "
                f"got {split!r}"
            )
        self.environment, self.split = environment, split
        self._n = section.held_out[split]
        self._first = HELD_OUT_SEED + zlib.crc32(split.encode()) * HELD_OUT_MAX

    def __len__(self) -> int:
        return self._n

    def task_id(self, index: int) -> str:
        """``guess/eval/3`` is the fourth task."""
        return f"{self.environment}/{self.split}/{index}"

    def __getitem__(self, index: int) -> Task:
        if not 0 <= index < self._n:
            raise IndexError(index)
        return Task(self.task_id(index), self.environment, self._first + index)

    def __iter__(self) -> Iterator[Task]:
        return (self[index] for index in range(self._n))
