"""Interface of a reader of data: all rows once in order, any row at random, in bounded memory; files of a path."""

from __future__ import annotations

import glob
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

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
