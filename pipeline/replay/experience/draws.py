"""Random numbers whose whole state is a few counters, so that a resumed stage draws what would have come."""

from __future__ import annotations

import random
from collections.abc import Mapping


class Draws:
    """Draw ``i`` for a purpose depends on nothing but (seed, purpose, i).

    >>> Draws(7).next("task").random() == Draws(7).next("task").random()
    True
    """

    def __init__(self, seed: int, counters: Mapping[str, int] | None = None) -> None:
        self._seed = seed
        self._counters = {str(purpose): int(count) for purpose, count in (counters or {}).items()}

    def next(self, purpose: str) -> random.Random:
        """The generator of this purpose's next draw. It may be asked for any number of values."""
        counter = self._counters.get(purpose, 0)
        self._counters[purpose] = counter + 1
        return random.Random(f"{self._seed}/{purpose}/{counter}")

    def state(self) -> dict[str, int]:
        """JSON that :meth:`__init__` takes back."""
        return dict(self._counters)
