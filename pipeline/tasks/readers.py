"""Interface of a reader of data: all rows once in order, any row at random, in bounded memory; files of a path.

JSONL files: random access by an index of line offsets (8 bytes per row); the files are not kept in memory.

Parquet files: reads only the columns in use, and keeps only some row groups in memory.

Hugging Face data sets by ``datasets``: a folder or a hub id; rows lie in Arrow files that are mapped into memory.
"""

from __future__ import annotations

import bisect
import glob
import json
from abc import ABC, abstractmethod
from array import array
from collections import OrderedDict
from collections.abc import Collection, Iterator, Mapping, Sequence
from io import BufferedReader
from pathlib import Path
from typing import Any

import orjson

from pipeline.config.tasks import TasksFromConfig
from pipeline.errors import AfterplayError, ConfigurationError

Row = Mapping[str, Any]


class BadRow(AfterplayError):
    """One row cannot be used; the message says what is wrong with it, the reader adds its position."""


class Rows(ABC):
    """Rows numbered from 0. Not safe for several threads at once."""

    @abstractmethod
    def scan(self) -> Iterator[Row | BadRow]:
        """Every row in order; one that cannot be read at all comes as :class:`BadRow`, in its place. Called once,
        before :meth:`read`."""

    @abstractmethod
    def read(self, number: int) -> Row:
        """The row with this number. Raises :class:`BadRow`, and ``OSError`` where the data cannot be read any more."""

    @abstractmethod
    def where(self, number: int) -> str:
        """Location of the row for people: file and line."""

    def close(self) -> None:  # noqa: B027 - most kinds hold nothing open
        """Free what is held open."""


def find_files(path: Path, suffix: str, key: str) -> list[Path]:
    """The file, the ``*suffix`` files of the folder, or what the pattern matches, by name.

    Raises :class:`ConfigurationError` when that is none."""
    path = path.expanduser()
    if path.is_file():
        return [path]
    if path.is_dir():
        found = sorted(p for p in path.glob(f"*{suffix}") if p.is_file())
        if not found:
            there = ", ".join(sorted(p.name for p in path.iterdir())[:5]) or "nothing"
            raise ConfigurationError(f"{key}: expected *{suffix} files in the folder {path}, got {there}")
        return found
    found = sorted(Path(p) for p in glob.glob(str(path)) if Path(p).is_file())
    if not found:
        raise ConfigurationError(
            f"{key}: expected a file, a folder or a pattern that matches, got {path}, which does not exist "
            f"(looked in {Path.cwd()})"
        )
    return found


LINE_BYTES_MAX = 64 * 1024 * 1024
"""A longer line is taken for something that is not JSONL."""

_REMEDY = (
    "Make other forms JSONL with pandas: read_json(FILE) for an array or read_csv(FILE), then "
    "to_json('data.jsonl', orient='records', lines=True)"
)

_BOM = b"\xef\xbb\xbf"


class JsonlRows(Rows):
    """The non-empty lines of ``files``, one after another. Raises :class:`ConfigurationError` for files that cannot be
    opened."""

    def __init__(self, files: Sequence[Path]) -> None:
        self._paths = list(files)
        self._files: list[BufferedReader] = []
        try:
            for path in files:
                self._files.append(path.open("rb"))
                if self._files[-1].peek(2)[:2] == b"\x1f\x8b":
                    raise ConfigurationError(
                        f"expected JSONL in {path}, got a gzip file: decompress it (gunzip -k {path})"
                    )
        except OSError as error:
            self.close()
            raise ConfigurationError(f"expected to read {path}, got: {error.strerror or error}") from error
        except ConfigurationError:
            self.close()
            raise
        self._starts: list[int] = []
        self._offsets = array("q")
        self._lines = array("q")

    def scan(self) -> Iterator[Row | BadRow]:
        for file in self._files:
            self._starts.append(len(self._offsets))
            offset, line_number = 0, 0
            while line := file.readline(LINE_BYTES_MAX + 1):
                line_number += 1
                if line.strip().removeprefix(_BOM):
                    self._offsets.append(offset)
                    self._lines.append(line_number)
                    try:
                        yield _parsed(line)
                    except BadRow as error:
                        yield error
                offset += len(line)
                while len(line) > LINE_BYTES_MAX and not line.endswith(b"\n"):  # the rest of the same line
                    line = file.readline(LINE_BYTES_MAX + 1)
                    offset += len(line)

    def read(self, number: int) -> Row:
        file = self._files[bisect.bisect_right(self._starts, number) - 1]
        file.seek(self._offsets[number])
        return _parsed(file.readline(LINE_BYTES_MAX + 1))

    def where(self, number: int) -> str:
        path = self._paths[bisect.bisect_right(self._starts, number) - 1]
        return f"{path}, line {self._lines[number]}"

    def close(self) -> None:
        for file in self._files:
            file.close()


def _parsed(line: bytes) -> Row:
    if len(line) > LINE_BYTES_MAX:
        raise BadRow(f"expected lines of at most {LINE_BYTES_MAX} bytes, got a longer one")
    try:
        value = orjson.loads(line.removeprefix(_BOM))
    except orjson.JSONDecodeError as error:
        came = "the start of a JSON array" if line.lstrip(_BOM + b" \t").startswith(b"[") else repr(line.strip()[:60])
        raise BadRow(f"expected a JSON object on each line, got {came} ({error}). {_REMEDY}") from error
    if not isinstance(value, dict):
        raise BadRow(f"expected a JSON object on each line, got a {type(value).__name__}. {_REMEDY}")
    for name, column in value.items():
        if _may_be_rounded(column):
            _require_exact(name, json.loads(line.removeprefix(_BOM))[name])
    return value


def _may_be_rounded(value: Any) -> bool:
    """True if ``value`` holds a number that may have been written as a whole number of more than 64 bits: orjson reads
    those as the nearest float."""
    if isinstance(value, dict):
        return any(map(_may_be_rounded, value.values()))
    if isinstance(value, list):
        return any(map(_may_be_rounded, value))
    return isinstance(value, float) and abs(value) >= 2**63


def _require_exact(name: str, value: Any) -> None:
    """Raises :class:`BadRow` for a whole number of more than 64 bits: no reply would equal its nearest float."""
    if isinstance(value, dict | list):
        for inner in value.values() if isinstance(value, dict) else value:
            _require_exact(name, inner)
    elif isinstance(value, int) and not -(2**63) <= value < 2**64:
        raise BadRow(f"expected whole numbers of at most 64 bits, got {value} in {name!r}: write it as text, in quotes")


def top_level(columns: Collection[str], names: Collection[str], where: object) -> list[str]:
    """Sorted ``names`` that hold ``columns``: one of the whole name, else the one before the first dot. Raises
    :class:`ConfigurationError` for columns that ``where`` does not have."""
    needed = sorted({path if path in names else path.split(".")[0] for path in columns})
    if missing := [name for name in needed if name not in names]:
        raise ConfigurationError(f"expected the columns {', '.join(missing)} in {where}, which has {', '.join(names)}")
    return needed


BATCH_ROWS = 1024

CACHE_BYTES = 256 * 1024 * 1024
"""Memory for decoded row groups. At least one is kept."""


class ParquetRows(Rows):
    """The rows of ``files``, one after another. ``columns``: those to read, empty for all.

    A row group is decoded whole and kept while ``CACHE_BYTES`` allows, so a shuffled file whose groups do not fit is
    decoded again and again: write it with smaller row groups, or read it as ``kind: huggingface``, which is mapped
    into memory. Raises :class:`ConfigurationError` for what is no Parquet or lacks a column.
    """

    def __init__(self, files: Sequence[Path], columns: Collection[str]) -> None:
        try:
            import pyarrow
            import pyarrow.parquet as parquet
        except ImportError as error:
            raise ConfigurationError(
                f"tasks_from.kind parquet needs pyarrow ({error}): pip install '.[data]'"
            ) from error
        self._errors: tuple[type[Exception], ...] = (pyarrow.ArrowException, OSError)
        self._paths = list(files)
        self._columns: list[list[str] | None] = []
        """A list for every file, None for all columns."""
        self._files: list[Any] = []
        self._cache: OrderedDict[tuple[int, int], Any] = OrderedDict()
        self._held = 0
        self._groups: list[tuple[int, int]] = []
        """File and row group, of every row group."""
        self._starts: list[int] = []
        """First row of each."""
        n = 0
        for index, path in enumerate(files):
            try:
                self._files.append(file := parquet.ParquetFile(path, memory_map=True))
            except self._errors as error:
                self.close()
                raise ConfigurationError(f"expected a Parquet file at {path}, got: {error}") from error
            try:
                self._columns.append(top_level(columns, file.schema_arrow.names, path) or None)
            except ConfigurationError:
                self.close()
                raise
            for group in range(file.metadata.num_row_groups):
                self._groups.append((index, group))
                self._starts.append(n)
                n += file.metadata.row_group(group).num_rows

    def scan(self) -> Iterator[Row | BadRow]:
        for path, file, columns in zip(self._paths, self._files, self._columns, strict=True):
            try:
                for batch in file.iter_batches(batch_size=BATCH_ROWS, columns=columns):
                    yield from batch.to_pylist()
            except self._errors as error:
                raise ConfigurationError(f"expected a whole Parquet file at {path}, got: {error}") from error

    def read(self, number: int) -> Row:
        position = bisect.bisect_right(self._starts, number) - 1
        table = self._group(self._groups[position])
        offset = number - self._starts[position]
        if not 0 <= offset < table.num_rows:
            raise BadRow(f"expected a row group with row {offset}, got {table.num_rows} rows")
        row: Row = table.slice(offset, 1).to_pylist()[0]
        return row

    def where(self, number: int) -> str:
        index, _ = self._groups[bisect.bisect_right(self._starts, number) - 1]
        first = self._starts[next(i for i, (file, _) in enumerate(self._groups) if file == index)]
        return f"{self._paths[index]}, row {number - first} (from 0)"

    def close(self) -> None:
        for file in self._files:
            file.close()
        self._cache.clear()

    def _group(self, key: tuple[int, int]) -> Any:
        table = self._cache.get(key)
        if table is not None:
            self._cache.move_to_end(key)
            return table
        try:
            table = self._files[key[0]].read_row_group(key[1], columns=self._columns[key[0]])
        except self._errors as error:
            raise BadRow(f"its row group cannot be read any more: {error}") from error
        self._cache[key] = table
        self._held += table.nbytes
        while self._held > CACHE_BYTES and len(self._cache) > 1:
            self._held -= self._cache.popitem(last=False)[1].nbytes
        return table


class HuggingFaceRows(Rows):
    """One split. ``columns``: those to read, empty for all. Code of a data set is never run.

    Raises :class:`ConfigurationError` for a data set, configuration, split or column that is not there.
    """

    def __init__(self, section: TasksFromConfig, split: str, columns: Collection[str]) -> None:
        try:
            import datasets
        except ImportError as error:
            raise ConfigurationError(
                f"tasks_from.kind huggingface needs datasets ({error}): pip install '.[data]'"
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
        self._data = data.select_columns(top_level(columns, data.column_names, self._name)) if columns else data

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
