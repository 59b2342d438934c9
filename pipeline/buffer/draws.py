"""Which units come next: the whole random state is three numbers."""

from __future__ import annotations

import numpy as np

from pipeline.buffer.index import Index, Ints
from pipeline.errors import NotEnough


class UnitDraws:
    """Draw ``i`` depends on nothing but seed, stream and ``i``, so it fits into every record."""

    def __init__(self, seed: int, stream: int, count: int = 0) -> None:
        self.seed, self.stream, self.count = seed, stream, count

    @property
    def state(self) -> tuple[int, int, int]:
        """Seed, stream and number of draws made: what :meth:`__init__` takes."""
        return self.seed, self.stream, self.count

    def next(self, index: Index, window: int, n: int) -> tuple[Ints, Ints]:
        """``n`` units of the window, uniformly with replacement: positions in ``index``, and units there, int64 ``[n]``
        each. Raises :class:`NotEnough` when the window has fewer."""
        total = index.units_of_latest(window)
        if not 0 < n <= total:
            raise NotEnough(
                f"expected to draw 1 to {total} units (of the latest {min(window or len(index), len(index))} "
                f"trajectories), got {n}: wait until there are more, or ask for fewer"
            )
        bits = np.random.Philox(key=(self.stream << 64) | self.seed, counter=self.count << 64)
        self.count += 1
        return index.locate(np.random.Generator(bits).integers(0, total, n), window)
