"""One of several replay stages: which tasks, which groups and which share of every update are its own.

Stage ``i`` of ``S`` owns the tasks with ``crc32(task_id) mod S = i``, gives ``groups_per_step / S`` groups to every
update and numbers its groups ``i, i + S, i + 2S, …``. So stages need not know of each other, ids never collide, and a
group's number tells its stage.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipeline.config import RunConfig
from pipeline.errors import ConfigurationError
from pipeline.rundir import RunDirectory


@dataclass(frozen=True, slots=True)
class Shard:
    """Stage ``index`` of ``count``.

    >>> [Shard(i, 2).owns("arithmetic/7") for i in (0, 1)].count(True)
    1
    """

    index: int = 0
    count: int = 1

    def __post_init__(self) -> None:
        if not 0 <= self.index < self.count:
            raise ConfigurationError(
                f"expected the index of a replay stage in 0..{self.count - 1} (replay.shards is {self.count}), "
                f"got {self.index}"
            )

    @classmethod
    def of(cls, config: RunConfig, index: int) -> Shard:
        """Raises :class:`ConfigurationError` for an index beyond ``replay.shards``."""
        return cls(index, config.replay.shards)

    def owns(self, task_id: str) -> bool:
        """Whether groups of this task are played here. The same in every process and for ever."""
        return self.count == 1 or zlib.crc32(task_id.encode()) % self.count == self.index

    def record(self) -> list[int]:
        """How the store remembers whose it is."""
        return [self.index, self.count]

    def check_store(self, meta: Mapping[str, Any]) -> None:
        """Raises :class:`ConfigurationError` when the store with this ``meta`` was written by another stage: its tasks
        and group numbers are not ours."""
        index, count = meta.get("shard", (0, 1)) if meta else self.record()
        if [index, count] != self.record():
            raise ConfigurationError(
                f"expected the store of stage {self.index} of replay.shards={self.count}, got that of stage {index} of "
                f"{count}: the number of shards is fixed when a run begins. Set replay.shards={count}, or start anew "
                "under another run.name (or with --fresh)"
            )

    def groups_per_step(self, config: RunConfig) -> int:
        """Groups of every update that come from here (the configuration has checked that it is a whole number)."""
        return config.groups.groups_per_step // self.count


WHOLE = Shard()
"""The only stage of a run that has one."""


def store_path(config: RunConfig, directory: RunDirectory, index: int) -> Path:
    """The SQLite file of stage ``index``: ``replay.sqlite``, ``replay-1.sqlite`` …, or the same beside
    ``replay.store``."""
    path = Path(config.replay.store) if config.replay.store else directory.store_file
    return path.with_name(f"{path.stem}-{index}{path.suffix}") if index else path


def store_paths(config: RunConfig, directory: RunDirectory) -> list[Path]:
    """Of all stages of the run, by index."""
    return [store_path(config, directory, index) for index in range(config.replay.shards)]
