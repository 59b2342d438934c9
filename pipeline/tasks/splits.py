"""Splits of environments whose tasks are seeds: those that an environment has itself, and those of ``held_out``."""

from __future__ import annotations

import zlib
from bisect import bisect_right
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import accumulate
from numbers import Integral
from typing import TYPE_CHECKING, Any

from pipeline.config.rollouts import HELD_OUT_MAX, HELD_OUT_SEED, EnvironmentConfig
from pipeline.config.tasks import TRAIN
from pipeline.errors import ConfigurationError
from pipeline.schema import Task
from pipeline.schema.trajectory import SEED_MAX

if TYPE_CHECKING:
    from pipeline.config import RunConfig

RUNS_MAX = 50_000
"""Arithmetic runs of one split on the wire: some 30 bytes each."""


class Seeds:
    """A sequence of different seeds, kept as arithmetic runs: ``range(900)`` is one, whatever its length.

    >>> list(Seeds.of((0, 5, 10, 11, 12)))
    [0, 5, 10, 11, 12]
    """

    def __init__(self, runs: Iterable[range]) -> None:
        self._runs = tuple(run for run in runs if len(run))
        self._ends = list(accumulate(len(run) for run in self._runs))

    @classmethod
    def of(cls, seeds: Sequence[int]) -> Seeds:
        """Raises :class:`ValueError` for what are no seeds, or where they take more than ``RUNS_MAX`` runs."""
        made = cls([seeds] if isinstance(seeds, range) else _runs(seeds))
        if len(made._runs) > RUNS_MAX:
            raise ValueError(f"expected seeds in at most {RUNS_MAX} ranges, got {len(made._runs)}")
        for run in made._runs:
            if not 0 <= min(run[0], run[-1]) <= max(run[0], run[-1]) <= SEED_MAX:
                raise ValueError(f"expected seeds from 0 to {SEED_MAX}, got {run}")
        return made

    @classmethod
    def decode(cls, runs: Sequence[Sequence[int]]) -> Seeds:
        """The inverse of :meth:`encode`. Raises :class:`ValueError` or :class:`TypeError`."""
        try:
            return cls([range(int(a), int(b), int(step)) for a, b, step in runs])
        except OverflowError as error:
            raise ValueError(f"expected seeds from 0 to {SEED_MAX}, got {runs!r:.200}") from error

    def encode(self) -> list[list[int]]:
        """``[start, stop, step]`` of each run."""
        return [[run.start, run.stop, run.step] for run in self._runs]

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def __getitem__(self, index: int) -> int:
        if not 0 <= index < len(self):
            raise IndexError(index)
        run = bisect_right(self._ends, index)
        return self._runs[run][index - (self._ends[run - 1] if run else 0)]

    def __contains__(self, seed: object) -> bool:
        return any(seed in run for run in self._runs)

    def __iter__(self) -> Iterator[int]:
        return (seed for run in self._runs for seed in run)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Seeds) and self._runs == other._runs

    __hash__ = None  # type: ignore[assignment]


Splits = Mapping[str, Seeds]
"""Splits of one environment, by name."""


def encode_splits(splits: Mapping[str, Sequence[int]]) -> dict[str, list[list[int]]]:
    """For HELLO. Raises :class:`ValueError` or :class:`TypeError` for what are no seeds."""
    return {str(name): Seeds.of(seeds).encode() for name, seeds in splits.items()}


def decode_splits(header: Mapping[str, Any]) -> dict[str, dict[str, Seeds]]:
    """Splits in a HELLO, by environment. Raises :class:`ValueError` or :class:`TypeError`."""
    if not isinstance(header, dict) or not all(isinstance(splits, dict) for splits in header.values()):
        raise TypeError(f"expected splits by environment and name, got {header!r:.200}")
    return {
        environment: {name: Seeds.decode(runs) for name, runs in splits.items()}
        for environment, splits in header.items()
    }


def is_held_out(splits: Splits, seed: int) -> bool:
    """True if ``seed`` is in a split other than train."""
    return any(seed in seeds for name, seeds in splits.items() if name != TRAIN)


def split_names(config: RunConfig, own: Mapping[str, Collection[str]]) -> dict[str, list[str]]:
    """Every split of each environment, from wherever: of its data, of its own (``own``), or held out."""
    return {
        name: [*own.get(name, ()), *section.held_out] if section.tasks_from is None else [*section.tasks_from.splits]
        for name, section in config.environments.items()
    }


def evaluated_environments(
    config: RunConfig, having: Collection[str], own: Mapping[str, Collection[str]]
) -> tuple[str, ...]:
    """Environments that are evaluated. ``having``: those with the split ``evaluation.split``; ``own``: splits that
    environments have themselves. Raises :class:`ConfigurationError` where a split is missing, and where seeds that are
    held out may be tasks of ``train``."""
    evaluation, split = config.evaluation, config.evaluation.split
    for name, section in config.environments.items():
        there = own.get(name, ()) if section.tasks_from is None else ()
        if there and split in section.held_out and split not in there:
            raise ConfigurationError(
                f"environments.{name} has splits of its own ({', '.join(there)}), and held_out.{split} would add "
                "seeds that it may map to tasks of train: set evaluation.split to one of its own"
            )
    trained = config.trained_environments
    wanted = evaluation.environments or tuple(
        name for name in config.environments if name in having or (trained and name not in trained)
    )
    if missing := [name for name in wanted or config.environments if name not in having]:
        names = split_names(config, own)
        has = "; ".join(f"{name} has {', '.join(names[name]) or 'none'}" for name in missing)
        example = "eval" if split == TRAIN else split
        remedy = f"held_out: {{{example}: 64}}"
        if config.environments[missing[0]].tasks_from is not None:
            remedy = f"tasks_from: {{splits: {{train: 0.9, {example}: 0.1}}}}"
        raise ConfigurationError(
            f"evaluation.split is {split}, which is not there ({has}): set evaluation.split to another, or hold tasks "
            f"out, for example environments: {{{missing[0]}: {{{remedy}}}}}"
        )
    return wanted


def _runs(seeds: Sequence[int]) -> Iterator[range]:
    """The seeds in their order, in as few runs as a greedy walk finds."""
    found: list[int] = []
    for seed in seeds:
        if isinstance(seed, bool) or not isinstance(seed, Integral):  # those of NumPy are
            raise TypeError(f"expected whole numbers as seeds, got {seed!r}")
        seed = int(seed)
        step = found[1] - found[0] if len(found) > 1 else seed - found[0] if found else 1
        if found and (step == 0 or seed - found[-1] != step):
            yield _run(found)
            found = []
        found.append(seed)
    if found:
        yield _run(found)


def _run(found: list[int]) -> range:
    step = found[1] - found[0] if len(found) > 1 else 1
    return range(found[0], found[-1] + (1 if step > 0 else -1), step)


class SeedSplit:
    """The tasks of one split whose tasks are seeds; like :class:`~pipeline.tasks.source.TaskSplit`, without data.

    ``first``: the seed of the task with number 0.
    """

    def __init__(self, environment: str, split: str, seeds: Seeds | range, first: int = 0) -> None:
        self._environment, self._split, self._seeds, self._first = environment, split, seeds, first

    @classmethod
    def held_out(cls, environment: str, section: EnvironmentConfig, split: str) -> SeedSplit:
        """A split of ``held_out``. Seeds of training end below ``HELD_OUT_SEED``; those of a split begin above it at a
        place that its name alone decides, so no task is in two splits, and another split more changes none."""
        first = HELD_OUT_SEED + zlib.crc32(split.encode()) * HELD_OUT_MAX
        return cls(environment, split, range(first, first + section.held_out[split]), first)

    def __len__(self) -> int:
        return len(self._seeds)

    def task_id(self, index: int) -> str:
        """``guess/eval/3`` is the fourth task that is held out, ``bfcl/eval/35`` the one with seed 35."""
        return f"{self._environment}/{self._split}/{self._seeds[index] - self._first}"

    def __getitem__(self, index: int) -> Task:
        return Task(self.task_id(index), self._environment, self._seeds[index])
