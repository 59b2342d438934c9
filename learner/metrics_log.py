"""``metrics.jsonl``: one JSON object a line for each update, in order, also after a resume."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO

import orjson

from pipeline.rundir import write_bytes_atomically


class MetricsLog:
    """Appends lines; each is flushed to the operating system before ``write`` returns.

    Opening it drops the lines of steps after ``updates`` (they will be made again) and whatever is no whole line.
    """

    def __init__(self, path: Path, updates: int) -> None:
        self._path = path
        _rewind(path, updates)
        self._file: BinaryIO = path.open("ab")

    def write(self, line: Mapping[str, Any]) -> None:
        self._file.write(orjson.dumps(line, option=orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_APPEND_NEWLINE))
        self._file.flush()

    def __enter__(self) -> MetricsLog:
        return self

    def __exit__(self, *args: object) -> None:
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()


def _rewind(path: Path, updates: int) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    if not path.exists():
        return
    lines = path.read_bytes().splitlines(keepends=True)
    kept = [line for line in lines if _stays(line, updates)]
    if len(kept) != len(lines):
        write_bytes_atomically(path, b"".join(kept))


def _stays(line: bytes, updates: int) -> bool:
    if not line.endswith(b"\n"):
        return False
    try:
        value = orjson.loads(line)
    except orjson.JSONDecodeError:
        return False
    step = value.get("step") if isinstance(value, dict) else None
    return isinstance(step, int) and step <= updates
