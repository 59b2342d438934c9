"""Findings of a preflight: problems, which forbid a start, and notes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from pipeline.errors import AfterplayError, ConfigurationError, PlugInError


@dataclass(slots=True)
class Findings:
    """Sentences; each is one line."""

    problems: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    forgiving: bool = False
    """True if what user code raises is a note: a run that resumes repeats rollouts that fail."""

    @property
    def told(self) -> list[str]:
        """The list that what user code raises belongs to."""
        return self.notes if self.forgiving else self.problems

    @contextmanager
    def collecting(self, where: str = "") -> Iterator[None]:
        """An error of Afterplay inside becomes a problem, with ``where`` before it."""
        try:
            yield
        except PlugInError as error:
            self.told.append(where + _one_line(str(error)))
        except AfterplayError as error:
            self.problems.append(where + _one_line(str(error)))

    def require_none(self) -> None:
        """Raises :class:`ConfigurationError` with all problems, if there are any."""
        if self.problems:
            raise ConfigurationError("\n".join(dict.fromkeys(self.problems)))


def _one_line(text: str) -> str:
    return " ".join(text.split())
