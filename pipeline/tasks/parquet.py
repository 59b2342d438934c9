"""Parquet files: reads only the columns in use, and keeps only some row groups in memory."""

from __future__ import annotations

import bisect
from collections import OrderedDict
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

from pipeline.errors import ConfigurationError
from pipeline.tasks.reader import BadRow, Row, Rows

BATCH_ROWS = 1024
CACHE_BYTES = 256 * 1024 * 1024
"""Memory for decoded row groups. At least one is kept."""


class ParquetRows(Rows):
    """The rows of ``files``, one after another. ``columns``: top-level ones to read, empty for all.

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
                f"tasks_from.kind parquet needs pyarrow ({error}): pip install 'afterplay[data]'"
            ) from error
        self._errors: tuple[type[Exception], ...] = (pyarrow.ArrowException, OSError)
        self._paths = list(files)
        self._columns = sorted(columns) or None
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
            missing = sorted(set(columns) - set(file.schema_arrow.names))
            if missing:
                has = ", ".join(file.schema_arrow.names)
                self.close()
                raise ConfigurationError(f"expected the columns {', '.join(missing)} in {path}, which has {has}")
            for group in range(file.metadata.num_row_groups):
                self._groups.append((index, group))
                self._starts.append(n)
                n += file.metadata.row_group(group).num_rows

    def scan(self) -> Iterator[Row | BadRow]:
        for path, file in zip(self._paths, self._files, strict=True):
            try:
                for batch in file.iter_batches(batch_size=BATCH_ROWS, columns=self._columns):
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
            table = self._files[key[0]].read_row_group(key[1], columns=self._columns)
        except self._errors as error:
            raise BadRow(f"its row group cannot be read any more: {error}") from error
        self._cache[key] = table
        self._held += table.nbytes
        while self._held > CACHE_BYTES and len(self._cache) > 1:
            self._held -= self._cache.popitem(last=False)[1].nbytes
        return table
