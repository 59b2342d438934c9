"""What a kind of data must be able to do: be read once in order, and at any row, in bounded memory."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from typing import Any

from pipeline.errors import AfterplayError

Row = Mapping[str, Any]


class BadRow(AfterplayError):
    """One row cannot be used; the message says what is wrong with it, its place is said by whoever reads it."""


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
        """Where a person finds the row: file and line."""

    def close(self) -> None:  # noqa: B027 - most kinds hold nothing open
        """Free what is held open."""
