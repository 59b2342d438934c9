"""Times at which Python's garbage collector runs in a role.

A full collection visits every object that could be in a cycle, and nothing else continues meanwhile. The objects of
set-up (modules, the tokenizer, the configuration: 105,000, or 229,000 with torch) would be visited each time and never
freed, for 60 to 190 ms of CPU on a busy machine. So they are frozen after set-up (``gc.freeze``), which saves a tenth
of the CPU of an actor's turn, and the collector runs seven times more rarely. It stays on: a rollout with Afterplay's
own parts leaves no cycles, which a test holds, but a plug-in may.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

YOUNG_OBJECTS_MAX = 5_000
"""New objects between two collections of the young; Python's own is 700. Also bounds how long one of the middle
generation takes: it has at most ten times as many."""


@contextmanager
def gc_policy() -> Iterator[None]:
    """Inside the block what exists now is never visited, and what is new is visited more rarely. Enter it after
    set-up; it is undone at the end, for a process that continues."""
    before = gc.get_threshold()
    gc.collect()
    gc.freeze()
    gc.set_threshold(YOUNG_OBJECTS_MAX, *before[1:])
    try:
        yield
    finally:
        gc.set_threshold(*before)
        gc.unfreeze()


@contextmanager
def gc_paused() -> Iterator[None]:
    """No collection inside the block, which makes many objects that stay."""
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()
