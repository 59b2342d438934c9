"""What plug-ins print goes to the role's log, up to a bound: a plug-in that prints megabytes a step fills no disk.

Only what passes ``sys.stdout`` and ``sys.stderr`` is counted; the role's own log lines are not, and neither is what a
library in C writes to the file descriptors."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TextIO

CHARACTERS_MAX = 1_000_000
WINDOW_SECONDS = 60.0
"""So many characters pass in so much time."""


class _Bounded:
    """A text stream that lets through ``characters_max`` in each ``window_seconds``, and says how much it left out."""

    def __init__(
        self, stream: TextIO, characters_max: int, window_seconds: float, now: Callable[[], float] = time.monotonic
    ) -> None:
        self._stream = stream
        self._characters_max = characters_max
        self._window_seconds = window_seconds
        self._now = now
        self._since = now()
        self._room = characters_max
        self._left_out = 0

    def write(self, text: str) -> int:
        if self._now() - self._since > self._window_seconds:
            self.tell()
            self._since, self._room = self._now(), self._characters_max
        shown = text[: self._room]
        self._room -= len(shown)
        if shown:
            self._stream.write(shown)
        if len(shown) < len(text) and not self._left_out:
            self._stream.write(f"\n... more than {self._characters_max} characters were printed: more is left out\n")
            self._stream.flush()
        self._left_out += len(text) - len(shown)
        return len(text)

    def tell(self) -> None:
        """How much was left out since the last time."""
        if self._left_out:
            self._stream.write(f"... {self._left_out} characters of prints were left out\n")
            self._left_out = 0

    def writelines(self, lines: Iterator[str]) -> None:
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


@contextmanager
def bounded_prints(characters_max: int = CHARACTERS_MAX, window_seconds: float = WINDOW_SECONDS) -> Iterator[None]:
    """Bound what is printed inside, on stdout and stderr each."""
    before = sys.stdout, sys.stderr
    bounded = [_Bounded(stream, characters_max, window_seconds) for stream in before]
    sys.stdout, sys.stderr = bounded
    try:
        yield
    finally:
        sys.stdout, sys.stderr = before
        for stream in bounded:
            stream.tell()
