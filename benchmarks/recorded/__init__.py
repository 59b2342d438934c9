"""Rollouts of a real run as sizes: tokens of each turn, and what the rows of an update share.

::

    afterplay run configs/quickstart.yaml
    python -m benchmarks.recorded runs/quickstart benchmarks/recorded/quickstart-2026-11-23.jsonl

The second command reads the store of a run that was stopped before its first checkpoint, and so has every trajectory.
It makes updates of the complete groups, eight at a time, in the order in which they became complete. The first line of
a file says which run it was (:class:`Origin`), each of the others is a training row (:class:`RecordedRow`): the rows of
an update beside each other, in lexicographic order of their tokens. Then what a row shares with any row before it, it
shares with the one just before, so ``shared`` holds the whole structure of prefixes. Token ids and texts are left out.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

QUICKSTART = Path(__file__).parent / "quickstart-2026-11-23.jsonl"


@dataclass(frozen=True, slots=True)
class Origin:
    """The run of a file."""

    run: str
    model: str
    engine: str
    updates: int


@dataclass(frozen=True, slots=True)
class RecordedRow:
    """One rollout, or one branch of it."""

    update: int
    group: int
    rollout: int
    """Number of the trajectory among all of the file."""
    environment: str
    turns: tuple[tuple[int, int], ...]
    """Tokens of the context that is new in each turn, and of the reply."""
    shared: int
    """Tokens in common with the row before, of the same update; 0 for the first one."""
    environment_seconds: float
    """Of the whole rollout; a trajectory does not record them by turn."""

    @property
    def tokens(self) -> int:
        return sum(map(sum, self.turns))


def write(file: Path, origin: Origin, rows: Iterable[RecordedRow]) -> int:
    """Number of rows written."""
    lines = [json.dumps(asdict(each), separators=(",", ":")) + "\n" for each in (origin, *rows)]
    file.write_text("".join(lines))
    return len(lines) - 1


def read(file: Path) -> Iterator[RecordedRow]:
    """The rows of a file."""
    with file.open() as lines:
        next(lines)
        for line in lines:
            row = json.loads(line)
            yield RecordedRow(**row | {"turns": tuple((context, reply) for context, reply in row["turns"])})
