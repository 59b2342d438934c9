"""Work of the renderer off the event loop, where it would hold the loop for long.

The tokenizers library lets other threads run while it encodes, so the loop continues. A chat template is Python: it
takes turns with the loop.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TypeVar

import anyio
import anyio.to_thread

T = TypeVar("T")
CHARACTERS_MIN = 16_384
"""Shorter texts are rendered on the loop: that takes about 4 ms, and a change of threads 0.1 ms."""
_threads: anyio.CapacityLimiter | None = None


async def rendered(n_characters: int, work: Callable[[], T]) -> T:
    """The result of ``work``, which renders and encodes a text of so many characters."""
    if n_characters < CHARACTERS_MIN:
        return work()
    return await anyio.to_thread.run_sync(work, limiter=_limiter())


def _limiter() -> anyio.CapacityLimiter:
    """One core is left to the loop."""
    global _threads
    if _threads is None:
        _threads = anyio.CapacityLimiter(max(1, (os.cpu_count() or 2) - 1))
    return _threads
