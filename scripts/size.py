#!/usr/bin/env python3
"""Prints how large the house is: keys of the run file, files that a trajectory passes, and lines of each room.

.venv/bin/python scripts/size.py          prints the table, with the numbers of tests/size.txt where they differ
.venv/bin/python scripts/size.py --write  writes tests/size.txt

Growth is a decision: tests/unit/scripts/test_size.py fails when a number is above its line in tests/size.txt, so a
change that raises one changes that line in the same commit. The files of a trajectory are counted by
tests/integration/test_trajectory_path.py; this script keeps the number that is written.
"""

import sys
import typing
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from pydantic import BaseModel  # noqa: E402

from pipeline.config import RunConfig  # noqa: E402

TABLE = ROOT / "tests" / "size.txt"
PACKAGES = ("afterplay", "pipeline", "actors", "learner")
TRAJECTORY = "files of a trajectory"


def written() -> dict[str, int]:
    """The table in the repository: name -> number."""
    rows = (line.rsplit(maxsplit=1) for line in TABLE.read_text().splitlines() if line and not line.startswith("#"))
    return {name: int(number) for name, number in rows}


def measured() -> dict[str, int]:
    """The same, counted now; without the files of a trajectory, which only a run can count."""
    rooms: Counter[str] = Counter()
    for package in PACKAGES:
        for file in (ROOT / package).rglob("*.py"):
            rooms[f"lines of {file.parent.relative_to(ROOT)}/"] += file.read_bytes().count(b"\n")
    return {
        "keys of the run file": len(list(keys(RunConfig))),
        "lines": sum(rooms.values()),
        **dict(sorted(rooms.items())),
    }


def keys(section: type[BaseModel], prefix: str = "") -> typing.Iterator[str]:
    """The leaf keys under a section, those of each variant of a union included."""
    for name, field in section.model_fields.items():
        inner = list(_sections(field.annotation))
        if not inner:
            yield prefix + name
        for variant in inner:
            yield from keys(variant, f"{prefix}{name}.")


def _sections(annotation: object) -> typing.Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for argument in typing.get_args(annotation):
        yield from _sections(argument)


def grown(before: dict[str, int], now: dict[str, int]) -> list[str]:
    """A sentence for each number that is above its line in the table, or has none."""
    return [
        f"{name}: at most {before[name]} by tests/size.txt, {number} now"
        if name in before
        else f"{name}: {number}, new"
        for name, number in now.items()
        if number > before.get(name, -1)
    ]


def main(arguments: list[str]) -> int:
    before, now = written() if TABLE.exists() else {}, measured()
    if "--write" in arguments:
        now = {TRAJECTORY: before.get(TRAJECTORY, 0), **now}
        width = max(map(len, now))
        lines = [f"{name:{width}} {number:6d}" for name, number in now.items()]
        TABLE.write_text("# Most that each may be; scripts/size.py --write\n" + "\n".join(lines) + "\n")
    for name, number in now.items():
        known = before.get(name)
        print(f"{number:7,}  {name}" + ("" if known in (None, number) else f"  ({known:,} before)"))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
