"""Hugging Face data sets by ``datasets``: a folder or a hub id; rows lie in Arrow files that are mapped into memory."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

from pipeline.config.tasks import TasksFromConfig
from pipeline.errors import ConfigurationError
from pipeline.tasks.reader import BadRow, Row, Rows

BATCH_ROWS = 1024


class HuggingFaceRows(Rows):
    """One split. ``columns``: top-level ones to read, empty for all. Code of a data set is never run.

    Raises :class:`ConfigurationError` for a data set, configuration, split or column that is not there.
    """

    def __init__(self, section: TasksFromConfig, split: str, columns: Collection[str]) -> None:
        try:
            import datasets
        except ImportError as error:
            raise ConfigurationError(
                f"tasks_from.kind huggingface needs datasets ({error}): pip install 'afterplay[data]'"
            ) from error
        self._name = f"{section.where}, split {split}"
        try:
            data = _load(datasets, section, split)
        except ConfigurationError:
            raise
        except Exception as error:
            offline = ". Without a network: save_to_disk(folder) where there is one, and give path in place of name"
            hint = "" if section.name is None else offline
            raise ConfigurationError(
                f"expected to load the data set {self._name}, got {type(error).__name__}: {str(error)[:500]}{hint}"
            ) from error
        missing = sorted(set(columns) - set(data.column_names))
        if missing:
            has = ", ".join(data.column_names)
            raise ConfigurationError(f"expected the columns {', '.join(missing)} in {self._name}, which has {has}")
        self._data = data.select_columns(sorted(columns)) if columns else data

    def scan(self) -> Iterator[Row | BadRow]:
        for start in range(0, len(self._data), BATCH_ROWS):
            batch = self._data[start : start + BATCH_ROWS]
            names = list(batch)
            for values in zip(*batch.values(), strict=True):
                yield dict(zip(names, values, strict=True))

    def read(self, number: int) -> Row:
        row: Row = self._data[number]
        return row

    def where(self, number: int) -> str:
        return f"{self._name}, row {number} (from 0)"


def _load(datasets: Any, section: TasksFromConfig, split: str) -> Any:
    if section.path is not None and _saved(section.path):
        data = datasets.load_from_disk(str(section.path))
        if not isinstance(data, datasets.DatasetDict):
            if section.divides:
                return data
            raise ConfigurationError(
                f"{section.path} holds one data set without splits, but tasks_from.splits names splits of it: give "
                "shares ({train: 0.9, eval: 0.1})"
            )
        if split not in data:
            raise ConfigurationError(f"expected the split {split} in {section.path}, which has {', '.join(data)}")
        return data[split]
    return datasets.load_dataset(
        str(section.path) if section.path is not None else section.name,
        section.subset,
        split=split,
        revision=section.revision if section.name is not None else None,
    )


def _saved(folder: Path) -> bool:
    """True if ``save_to_disk`` wrote it."""
    return (folder / "state.json").is_file() or (folder / "dataset_dict.json").is_file()
