"""Cases of a walk over a GPU that need no PyTorch and end in each possible way."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from typing import Any


def working(machine: Any, value: int = 1) -> Iterator[tuple[str, dict[str, Any]]]:
    yield "first", {"value": value, "seconds": machine.seconds}
    yield "second", {}


def raising(machine: Any) -> Iterator[tuple[str, dict[str, Any]]]:
    yield "predicted", {"gib": 1.0}
    raise MemoryError("no room")


def crashing(machine: Any) -> Iterator[tuple[str, dict[str, Any]]]:
    yield "predicted", {"gib": 1.0}
    os.abort()


def endless(machine: Any) -> Iterator[tuple[str, dict[str, Any]]]:
    yield "predicted", {"gib": 1.0}
    threading.Event().wait()
