"""Hangs and slows threads of a process from outside, while its other threads go on.

A process that was started with :data:`FOLDER` in its environment looks for a file with its number there. The file names
a function, ``module:Class.method``, and seconds: every call of it takes so much longer, or as long as the file exists.
"""

from __future__ import annotations

import functools
import importlib
import json
import math
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

FOLDER = "AFTERPLAY_TEST_HANGS"
LOOK_SECONDS = 0.1


@contextmanager
def hang(folder: Path, pid: int, function: str, seconds: float = math.inf) -> Iterator[None]:
    """Inside, calls of ``function`` in process ``pid`` take ``seconds`` longer, or do not return before the end."""
    file = folder / str(pid)
    temporary = file.with_suffix(".tmp")
    temporary.write_text(json.dumps({"function": function, "seconds": None if math.isinf(seconds) else seconds}))
    temporary.replace(file)
    try:
        yield
    finally:
        file.unlink(missing_ok=True)


def install() -> None:
    """Make this process obey, if its environment says so."""
    if FOLDER in os.environ:
        file = Path(os.environ[FOLDER]) / str(os.getpid())
        threading.Thread(target=_obey, args=(file,), name="hang", daemon=True).start()


def _obey(file: Path) -> None:
    while True:
        order = _read(file)
        if order is None:
            time.sleep(LOOK_SECONDS)
            continue
        module, _, path = order["function"].partition(":")
        owner_path, _, name = path.rpartition(".")
        owner = functools.reduce(getattr, owner_path.split("."), importlib.import_module(module))
        original = getattr(owner, name)
        setattr(owner, name, _slow(original, file))
        while (now := _read(file)) is not None and now["function"] == order["function"]:
            time.sleep(LOOK_SECONDS)
        setattr(owner, name, original)


def _slow(original: Callable[..., Any], file: Path) -> Callable[..., Any]:
    @functools.wraps(original)
    def slow(*values: Any, **named: Any) -> Any:
        begun = time.monotonic()
        while (order := _read(file)) is not None and time.monotonic() < begun + (order["seconds"] or math.inf):
            time.sleep(LOOK_SECONDS / 2)
        return original(*values, **named)

    return slow


def _read(file: Path) -> dict[str, Any] | None:
    try:
        found: dict[str, Any] = json.loads(file.read_text())
    except FileNotFoundError:
        return None
    return found
