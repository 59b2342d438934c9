"""Python's cyclic garbage collector in a process that plays thousands of episodes.

A full collection visits every object that could be in a cycle, and nothing else happens meanwhile: no episode goes on
and no request is sent. What set-up leaves behind (modules, the tokenizer, the configuration: 105,000 objects, 229,000
where something imports torch) is visited each time and never freed. On a busy machine that took 60 to 90 and 125 ms of
CPU, and 190 ms with 800 episodes in progress: the longest delay that they knew. Set aside, it takes nothing, and a turn
costs a tenth less CPU.

So after set-up they are set aside (``gc.freeze``), and the collector comes round seven times more rarely. It stays on:
an episode of Afterplay's own parts leaves nothing for it, which a test holds, but a plug-in may leave cycles.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

YOUNG_OBJECTS_MAX = 5_000
"""New objects between two collections of the young; Python's own is 700. Also bounds how long one of the middle
generation takes: it has at most ten times as many."""


@contextmanager
def collecting_rarely() -> Iterator[None]:
    """Inside the block what exists now is never visited, and what is new is visited more rarely. Enter it after
    set-up; it undoes itself, for a process that goes on."""
    before = gc.get_threshold()
    gc.collect()
    gc.freeze()
    gc.set_threshold(YOUNG_OBJECTS_MAX, *before[1:])
    try:
        yield
    finally:
        gc.set_threshold(*before)
        gc.unfreeze()
