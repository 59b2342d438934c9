"""Whether an environment has to run in threads, found by trying it once."""

from __future__ import annotations

import time
from collections.abc import Callable

BLOCKING_SECONDS = 0.005
"""A start that takes longer would hold up the other episodes of the actor."""


def takes_long(start: Callable[[], object]) -> bool:
    """Whether ``start``, called once, takes longer than :data:`BLOCKING_SECONDS`."""
    started = time.perf_counter()
    start()
    return time.perf_counter() - started > BLOCKING_SECONDS
