"""Rollouts of a real run as sizes: tokens of each turn, and what the rows of an update share.

::

    afterplay run configs/quickstart.yaml
    python -m benchmarks.recorded runs/quickstart benchmarks/recorded/quickstart-2026-11-23.jsonl

    afterplay run configs/tiny.yaml --set run.name=number_guess --set run.total_steps=2 --set model.max_length=2048 \\
        --set sampling.max_tokens=48 --set environments.guess.options.turns=48 --set environments.guess.max_turns=48 \\
        --set groups.groups_per_step=40 --set staleness.max=0 --set actor.concurrency=64
    python -m benchmarks.recorded runs/number_guess benchmarks/recorded/number-guess-2026-11-25.jsonl --groups 40

The second command of each reads the store of a run before its first checkpoint, which so has every trajectory; that of
``number_guess`` while the run plays its second step.
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
NUMBER_GUESS = Path(__file__).parent / "number-guess-2026-11-25.jsonl"
"""A random decoder guesses a number from 0 to 7 in at most 48 turns."""


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
