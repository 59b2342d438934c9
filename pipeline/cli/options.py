"""Arguments and options that several commands have."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from pipeline.config import RunConfig


def _check_sets(sets: list[str] | None) -> list[str] | None:
    """Refuse ``--set a= 1``, of which a shell makes two arguments, before the second one is taken for another thing."""
    from pipeline.config.load import read_override

    for text in sets or ():
        read_override(text)
    return sets


NUMBER_MAX = 10**15
"""A bound on numbers that are asked for: SQLite has 64 bits."""


def finite(value: float | None) -> float | None:
    """Callback of options with a number: an infinite one ends no loop, and none compares with NaN."""
    if value is not None and not abs(value) <= NUMBER_MAX:
        raise typer.BadParameter(f"expected a number up to {NUMBER_MAX:,}, got {value}")
    return value


File = Annotated[
    Path, typer.Argument(metavar="FILE", help="The run file, or an example that ships with Afterplay, such as @tiny.")
]
Run = Annotated[Path, typer.Argument(metavar="RUN", help="A run directory, for example runs/tiny.")]
Sets = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        "-s",
        metavar="KEY=VALUE",
        help="Change one value, for example run.seed=3. May be repeated.",
        callback=_check_sets,
    ),
]
Checkpoint = Annotated[
    str | None,
    typer.Option(
        "--checkpoint",
        "-c",
        metavar="N|best|latest",
        help="The checkpoint after N updates, or by name. Default: the newest.",
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON instead.")]


def load(file: Path, sets: list[str] | None = None) -> RunConfig:
    """The run file with the values of ``--set``."""
    from pipeline.config.load import load

    return load(file, sets or [])
