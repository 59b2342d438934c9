"""JSONL files: random access by an index of line offsets (8 bytes per row); the files are not kept in memory."""

from __future__ import annotations

import bisect
import json
from array import array
from collections.abc import Iterator, Sequence
from io import BufferedReader
from pathlib import Path
from typing import Any

import orjson

from pipeline.errors import ConfigurationError
from pipeline.tasks.reader import BadRow, Row, Rows

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
