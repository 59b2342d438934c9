"""Random states of their own for packages that draw from the global one."""

from __future__ import annotations

import random
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

_ONE_AT_A_TIME = threading.Lock()


@contextmanager
def own_random(mine: random.Random) -> Iterator[None]:
    """``random``'s global state is ``mine`` inside, and what it was before after that. One at a time in a process."""
    with _ONE_AT_A_TIME:
        before = random.getstate()
        random.setstate(mine.getstate())
        try:
            yield
        finally:
            mine.setstate(random.getstate())
            random.setstate(before)


@contextmanager
def numpys_kept() -> Iterator[None]:
    """NumPy's global random state is after this what it was before."""
    numpy = sys.modules.get("numpy")
    before = numpy.random.get_state() if numpy is not None else None
    try:
        yield
    finally:
        if numpy is not None:
            numpy.random.set_state(before)
