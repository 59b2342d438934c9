"""Index of a trajectory buffer: live trajectories, their units and offsets as columns of numbers; and draws from it.

Entries come and go in order, so the cumulative ends of their units never change: a window is a slice of them, and
mapping a global unit to (trajectory, unit) is one ``searchsorted``. Adding, evicting and drawing cost the same at any
size.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from pipeline.errors import NotEnough

Ints = npt.NDArray[np.int64]
NOT_WRITTEN = -1
_ID, _UNITS, _BYTES, _SEGMENT, _OFFSET, _CRC, _END = range(7)
COLUMNS = 6
"""Columns of :meth:`BufferIndex.rows`: id, units, bytes, segment, offset, checksum."""


class Entry(NamedTuple):
    """One live trajectory."""

    id: int
    units: int
    n_bytes: int
    segment: int
    """:data:`NOT_WRITTEN` until its payload is durable."""
    offset: int
    crc: int


class BufferIndex:
    """The live trajectories, oldest first. Ids rise."""

    def __init__(self) -> None:
        self._table = np.zeros((1024, COLUMNS + 1), np.int64)
        self._first = self._stop = 0
        self._bytes = 0

    def __len__(self) -> int:
        return self._stop - self._first

    @property
    def n_units(self) -> int:
        return self.units_of_latest(0)

    @property
    def n_bytes(self) -> int:
        return self._bytes

    def add(self, entry: Entry) -> None:
        if len(self) and entry.id <= self._table[self._stop - 1, _ID]:
            raise ValueError(f"expected an id above {self._table[self._stop - 1, _ID]}, got {entry.id}")
        if self._stop == len(self._table):
            self._make_room()
        end = self._before(self._stop) + entry.units
        self._table[self._stop] = (*entry, end)
        self._stop += 1
        self._bytes += entry.n_bytes

    def evict(self) -> Entry:
        """Remove and return the oldest."""
        entry = self.at(0)
        self._first += 1
        self._bytes -= entry.n_bytes
        return entry

    def at(self, position: int) -> Entry:
        """The entry at a position, 0 the oldest."""
        return Entry(*self._table[self._first + position, :COLUMNS].tolist())

    def find(self, trajectory: int) -> int | None:
        """Position of an id; None when it is not live."""
        ids = self.ids()
        position = int(np.searchsorted(ids, trajectory))
        return position if position < len(ids) and ids[position] == trajectory else None

    def place(self, trajectory: int, segment: int, offset: int, crc: int) -> bool:
        """Say where a payload was written; False when it has been evicted meanwhile."""
        position = self.find(trajectory)
        if position is None:
            return False
        self._table[self._first + position, _SEGMENT : _CRC + 1] = segment, offset, crc
        return True

    def ids(self) -> Ints:
        return self._table[self._first : self._stop, _ID]

    def rows(self) -> Ints:
        """A copy, int64 ``[n, 6]``."""
        return self._table[self._first : self._stop, :COLUMNS].copy()

    def rows_at(self, positions: Ints) -> Ints:
        """Rows as :meth:`rows` gives them, of some positions."""
        return self._table[self._first + positions, :COLUMNS]

    def units_of_latest(self, window: int) -> int:
        """Units of the latest ``window`` trajectories; 0 means of all."""
        start = self._window_start(window)
        return self._before(self._stop) - self._before(start)

    def locate(self, units: Ints, window: int) -> tuple[Ints, Ints]:
        """Positions and units within, both int64 ``[n]``, of global units counted from the start of the window."""
        start = self._window_start(window)
        base = self._before(start)
        ends = self._table[start : self._stop, _END]
        rows = np.searchsorted(ends, units + base, side="right")
        return rows + (start - self._first), units + base - (ends[rows] - self._table[start + rows, _UNITS])

    def _window_start(self, window: int) -> int:
        return max(self._first, self._stop - window) if window else self._first

    def _before(self, row: int) -> int:
        """Cumulative units before a row of the table."""
        return int(self._table[row, _END] - self._table[row, _UNITS]) if row < self._stop else self._last_end()

    def _last_end(self) -> int:
        return int(self._table[self._stop - 1, _END]) if self._stop else 0

    def _make_room(self) -> None:
        live = self._table[self._first : self._stop]
        size = max(1024, 2 * len(live))
        table = np.zeros((size, COLUMNS + 1), np.int64)
        table[: len(live)] = live
        self._table, self._first, self._stop = table, 0, len(live)


class UnitDraws:
    """Random draws. Draw ``i`` depends only on seed, stream and ``i``, so the state is one number."""

    def __init__(self, seed: int, stream: int, count: int = 0) -> None:
        self.seed, self.stream, self.count = seed, stream, count

    @property
    def state(self) -> tuple[int, int, int]:
        """Seed, stream and number of draws made: what :meth:`__init__` takes."""
        return self.seed, self.stream, self.count

    def next(self, index: BufferIndex, window: int, n: int) -> tuple[Ints, Ints]:
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
