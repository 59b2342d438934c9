"""One case of the walk, in a process of its own: prints each part that it finds as a line of JSON, as soon as it has
it."""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

Facts = dict[str, Any]
"""Results of one part by name; names end in their unit."""
MARK = "FOUND "
"""Begins a line with a part; other lines of the output are not read."""


@dataclass(frozen=True, slots=True)
class Machine:
    device: str
    small: bool
    """Shapes that a CPU computes in seconds."""
    seconds: float = 600.0
    """Share of the time that the case has."""

    @property
    def cuda(self) -> bool:
        return self.device == "cuda"


@dataclass(frozen=True, slots=True)
class Case:
    name: str
    function: str
    """``module:name`` of a generator that takes a :class:`Machine` and ``options``, and yields parts and facts."""
    weight: float
    """Share of the time: seconds of 25 minutes."""
    options: dict[str, Any] = field(default_factory=dict)


def attempt(part: str, work: Callable[[], Facts]) -> tuple[str, Facts]:
    """Facts of ``work``, or why there are none: the parts that follow are still worth their time."""
    try:
        return part, work()
    except Exception as error:  # out of memory, a missing kernel or package
        return part, {"failed": f"{type(error).__name__}: {error}"[:500]}


def main() -> None:
    function, options, machine = json.loads(sys.argv[1])
    module, _, name = function.partition(":")
    parts: Callable[..., Iterator[tuple[str, Facts]]] = getattr(importlib.import_module(module), name)
    for part in parts(Machine(**machine), **options):
        print(f"\n{MARK}{json.dumps(part)}", flush=True)


if __name__ == "__main__":
    main()
