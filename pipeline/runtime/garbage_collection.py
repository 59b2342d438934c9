"""Memory of a role: when Python's garbage collector runs, and when free memory goes back to the system.

A full collection visits every object that could be in a cycle, and nothing else continues meanwhile. The objects of
set-up (modules, the tokenizer, the configuration: 105,000, or 229,000 with torch) would be visited each time and never
freed, for 60 to 190 ms of CPU on a busy machine. So they are frozen after set-up (``gc.freeze``), which saves a tenth
of the CPU of an actor's turn, and the collector runs seven times more rarely. It stays on: a rollout with Afterplay's
own parts leaves no cycles, which a test holds, but a plug-in may.

glibc keeps what is freed in the middle of a heap. A learner on a CPU frees tensors of other sizes in each update, in
several threads, so its heaps would grow with the updates.
"""

from __future__ import annotations

import ctypes
import gc
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

YOUNG_OBJECTS_MAX = 5_000
"""New objects between two collections of the young; Python's own is 700. Also bounds how long one of the middle
generation takes: it has at most ten times as many."""
GROWTH_MAX = 1.25
"""Resident memory, in multiples of that after the last trim, at which heaps are trimmed."""
_malloc_trim = getattr(ctypes.CDLL(None), "malloc_trim", None)


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


def trim_heaps(floor: int) -> int:
    """Give free pages of all heaps back to the system if resident memory has grown by a quarter above ``floor`` bytes,
    its size after the last time (0 at first). Returns that size, for the next call. Does nothing without glibc.

    Pages that are needed again are faulted in: after each update that would cost a tiny model a fifth of its time.
    """
    if _malloc_trim is None or _resident_bytes() <= GROWTH_MAX * floor:
        return floor
    _malloc_trim(0)
    return _resident_bytes()


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
