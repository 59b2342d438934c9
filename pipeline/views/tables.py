"""Text and tables on the console, in one style, and in one piece where no terminal sets the width."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

PIPE_COLUMNS = 240
"""A pipe or file has no width: so wide that nothing is cut."""


class LastingConsole(Console):
    """Console that says no more once nobody reads it, such as ``tee`` after Ctrl-C, or its terminal is gone. rich would
    end the process there, and a run without its drain."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._had_terminal = self.file.isatty()

    def print(self, *objects: Any, **options: Any) -> None:
        try:
            super().print(*objects, **options)
        except OSError as error:
            if error.errno != errno.EIO or not self._had_terminal:  # the disk of a file may come back
                raise
            self.on_broken_pipe()

    def on_broken_pipe(self) -> None:
        self.quiet = True
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, self.file.fileno())  # what is left in the buffer is written at the end of the process
        os.close(nowhere)


def plain_console(*, stderr: bool = False) -> Console:
    """Console that takes nothing for markup and leaves the breaking of long lines to the terminal."""
    console = LastingConsole(stderr=stderr, highlight=False, markup=False, soft_wrap=True)
    if not (console.file.isatty() or "COLUMNS" in os.environ):
        console.width = PIPE_COLUMNS
    return console


def table(headings: Sequence[str], rows: Iterable[Iterable[object]], title: str | None = None) -> Table:
    """Table without a frame. A column whose heading begins with ``>`` is aligned right; a cell that is None stays
    empty."""
    found = Table(
        title=title, title_justify="left", title_style="bold", header_style="dim",
        box=None, padding=(0, 2, 0, 0), pad_edge=False,
    )  # fmt: skip
    for heading in headings:
        right = heading.startswith(">")
        found.add_column(heading.removeprefix(">"), justify="right" if right else "left", overflow="fold")
    for row in rows:
        found.add_row(*(cell if isinstance(cell, Text) else "" if cell is None else str(cell) for cell in row))
    return found


def describe_version(version: int) -> str:
    """The newest policy version of a run; below 0 there is none.

    >>> describe_version(3), describe_version(-1)
    ('policy version 3', 'no policy version yet')
    """
    return f"policy version {version}" if version >= 0 else "no policy version yet"


def counts_table(counts: Mapping[str, Mapping[str, int]]) -> Table:
    """Table of counts by state, for each account."""
    rows = [
        (account if position == 0 else None, state, n)
        for account, states in counts.items()
        for position, (state, n) in enumerate(states.items())
    ]
    return table(("account", "state", ">count"), rows)
