"""Payloads of a trajectory buffer: their layout in bytes, a bounded cache, and reads from cache or segment.

A payload is named arrays with one leading dimension, the *units* (steps, turns, tokens), stored as one C struct per
unit. ``{"observation": [512, 72], "reward": [512]}`` becomes 512 records of 73 numbers and a checksum each. A unit of a
trajectory on disk is then one ``pread``, and a batch is a join of such reads. Views of the arrays come from the block
without a copy. All trajectories of a buffer have one layout.

The index has the live trajectories, their units and offsets as columns of numbers. Entries come and go in order, so the
cumulative ends of their units never change: a window is a slice of them, and mapping a global unit to (trajectory,
unit) is one ``searchsorted``. Adding, evicting and drawing cost the same at any size.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import orjson

from pipeline.buffer.segments import NOT_WRITTEN, UNIT_CHECKSUM_BYTES, Entry, SegmentReader
from pipeline.errors import NotEnough, SchemaError

Ints = npt.NDArray[np.int64]

_ID, _UNITS, _BYTES, _SEGMENT, _OFFSET, _CRC, _END = range(7)

COLUMNS = 6
"""Columns of :meth:`BufferIndex.rows`: id, units, bytes, segment, offset, checksum."""


class BufferIndex:
    """The live trajectories, oldest first. Ids rise."""

    def __init__(self) -> None:
        self._table = np.zeros((1024, COLUMNS + 1), np.int64)
        self._first = self._stop = 0

    def __len__(self) -> int:
        return self._stop - self._first

    def add(self, entry: Entry) -> None:
        if len(self) and entry.id <= self._table[self._stop - 1, _ID]:
            raise ValueError(f"expected an id above {self._table[self._stop - 1, _ID]}, got {entry.id}")
        if self._stop == len(self._table):
            self._make_room()
        end = self._before(self._stop) + entry.units
        self._table[self._stop] = (*entry, end)
        self._stop += 1

    def evict(self) -> Entry:
        """Remove and return the oldest."""
        entry = self.at(0)
        self._first += 1
        return entry

    def at(self, position: int) -> Entry:
        """The entry at a position, 0 the oldest."""
        return Entry(*self._table[self._first + position, :COLUMNS].tolist())

    def find(self, trajectory: int) -> int | None:
        """Position of an id; None when it is not live."""
        ids = self.ids()
        position = int(np.searchsorted(ids, trajectory))
        return position if position < len(ids) and ids[position] == trajectory else None

    def place(self, trajectory: int, segment: int, offset: int, crc: int) -> None:
        """Say where a payload was written; nothing when it has been evicted meanwhile."""
        position = self.find(trajectory)
        if position is not None:
            self._table[self._first + position, _SEGMENT : _CRC + 1] = segment, offset, crc

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
        if row < self._stop:
            return int(self._table[row, _END] - self._table[row, _UNITS])
        return int(self._table[row - 1, _END]) if row else 0

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


Array = npt.NDArray[Any]

Block = npt.NDArray[np.void]
"""``[units]`` records."""

_KINDS = "biufc"

_FIELDS_MAX = 256


@dataclass(frozen=True)
class Layout:
    """Names, dtypes and shapes of one unit's arrays. Equal layouts are interchangeable."""

    fields: tuple[tuple[str, str, tuple[int, ...]], ...]
    """(name, little-endian numpy dtype such as ``<f4``, shape of one unit), by name."""
    dtype: np.dtype[np.void] = field(init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        widest_first = sorted(self.fields, key=lambda f: -np.dtype(f[1]).itemsize)
        packed = np.dtype(widest_first, align=True)
        names = [name for name, _, _ in widest_first]
        formats = [packed[name] for name in names]
        offsets = [packed.fields[name][1] for name in names] if packed.fields else []
        end = offsets[-1] + formats[-1].itemsize + UNIT_CHECKSUM_BYTES
        size = -(-end // packed.alignment) * packed.alignment
        dtype = np.dtype({"names": names, "formats": formats, "offsets": offsets, "itemsize": size})
        object.__setattr__(self, "dtype", dtype)

    def __str__(self) -> str:
        """
        >>> print(Layout((("done", "|b1", ()), ("x", "<f4", (5,)))))
        'done': bool [], 'x': float32 [5]
        """
        return ", ".join(f"{name!r}: {np.dtype(dtype)} {list(shape)}" for name, dtype, shape in self.fields)

    def pack(self, arrays: Mapping[str, Array], units: int) -> Block:
        """A copy of ``arrays`` as one block. The checksums at the end of its units are written with it to disk."""
        # Holes between fields reach the disk: they must not show what the memory held before.
        filled = sum(self.dtype[name].itemsize for name, _, _ in self.fields) + UNIT_CHECKSUM_BYTES
        holes = self.dtype.itemsize != filled
        block = (np.zeros if holes else np.empty)(units, self.dtype)
        for name, _, _ in self.fields:
            block[name] = arrays[name]
        return block

    def unpack(self, data: bytearray) -> dict[str, Array]:
        """Named arrays ``[units, ...]`` from the bytes of whole units, each contiguous and writable."""
        block: Block = np.frombuffer(data, self.dtype)
        return {name: np.ascontiguousarray(view) for name, view in views(block).items()}

    def encode(self) -> bytes:
        return orjson.dumps(self.fields)

    @classmethod
    def decode(cls, data: bytes) -> Layout:
        """Raises :class:`SchemaError` for anything that :meth:`encode` did not write."""
        try:
            fields = tuple((str(name), str(dtype), tuple(map(int, shape))) for name, dtype, shape in orjson.loads(data))
            if not 0 < len(fields) <= _FIELDS_MAX or any(np.dtype(dtype).kind not in _KINDS for _, dtype, _ in fields):
                raise ValueError("fields")
            return cls(fields)
        except (ValueError, TypeError) as error:
            raise SchemaError(f"expected the layout of a trajectory, got {data!r:.200}") from error


def layout_of(arrays: Mapping[str, Array]) -> tuple[Layout, int]:
    """The layout of ``arrays`` and how many units they have.

    Raises :class:`SchemaError` unless they are at least one numeric array, all with the same leading dimension >= 1.
    """
    fields, units = [], -1
    if not 0 < len(arrays) <= _FIELDS_MAX:
        raise SchemaError(f"expected 1 to {_FIELDS_MAX} named arrays in a trajectory, got {len(arrays)}")
    for name in sorted(arrays):
        array = arrays[name]
        if not isinstance(name, str) or not name:
            raise SchemaError(f"expected names of arrays as non-empty strings, got {name!r}")
        if not isinstance(array, np.ndarray) or array.dtype.kind not in _KINDS:
            came = f"dtype {array.dtype}" if isinstance(array, np.ndarray) else type(array).__name__
            raise SchemaError(f"expected {name!r} to be a numeric numpy array, got {came}")
        if array.ndim == 0 or len(array) == 0:
            raise SchemaError(f"expected {name!r} with a leading unit dimension of at least 1, got shape {array.shape}")
        if units not in (-1, len(array)):
            raise SchemaError(f"expected {name!r} to have {units} units like the others, got {len(array)}")
        units = len(array)
        fields.append((name, array.dtype.newbyteorder("<").str, array.shape[1:]))
    return Layout(tuple(fields)), units


def views(block: Block) -> dict[str, Array]:
    """The named arrays ``[units, ...]`` of a block, without a copy."""
    assert block.dtype.names is not None
    return {name: block[name] for name in sorted(block.dtype.names)}


def join_steps(array: Array) -> Array:
    """``[T, B, ...]`` as ``[T * B, ...]``: every step of every environment is a unit."""
    if array.ndim < 2:
        raise SchemaError(f"expected an array [T, B, ...], got shape {array.shape}")
    return array.reshape(array.shape[0] * array.shape[1], *array.shape[2:])


class BlockCache:
    """Blocks by trajectory id. ``bytes_max`` None: everything stays until it is removed."""

    def __init__(self, bytes_max: int | None) -> None:
        self.bytes_max = bytes_max
        self.n_bytes = 0
        self._blocks: OrderedDict[int, tuple[Block, memoryview]] = OrderedDict()

    def add(self, trajectory: int, block: Block) -> None:
        """Keep a block; the oldest ones go where there is no room."""
        if self.bytes_max is not None and block.nbytes > self.bytes_max:
            return
        self.remove(trajectory)
        self._blocks[trajectory] = (block, raw(block))
        self.n_bytes += block.nbytes
        while self.bytes_max is not None and self.n_bytes > self.bytes_max:
            _, (oldest, _) = self._blocks.popitem(last=False)
            self.n_bytes -= oldest.nbytes

    def block(self, trajectory: int) -> Block | None:
        found = self._blocks.get(trajectory)
        return found[0] if found else None

    def bytes_of(self, trajectory: int) -> memoryview | None:
        """The block as bytes."""
        found = self._blocks.get(trajectory)
        return found[1] if found else None

    def remove(self, trajectory: int) -> None:
        found = self._blocks.pop(trajectory, None)
        if found:
            self.n_bytes -= found[0].nbytes


def raw(block: Block) -> memoryview:
    """The bytes of a block, without a copy."""
    return block.view("u1").data


class Payloads:
    """Blocks by trajectory id. ``cache_bytes`` None: there is no directory, everything stays in memory. Not safe to use
    from several threads at once; the buffer holds its lock around every call."""

    def __init__(self, cache_bytes: int | None) -> None:
        self.cache = BlockCache(cache_bytes)
        self.pending: dict[int, Block] = {}
        """Accepted and not yet durable, whether live or not."""
        self.reader: SegmentReader | None = None
        self.layout: Layout | None = None
        """None until there is a trajectory."""

    def check_layout(self, layout: Layout) -> None:
        """Raise :class:`SchemaError` unless trajectories of this layout can be in a batch with those of the buffer."""
        if self.layout not in (None, layout):
            raise SchemaError(
                f"expected a trajectory with the arrays of this buffer, {self.layout}, got {layout}: "
                "add it to a buffer of its own"
            )

    def gather(self, rows: Ints, units: Ints) -> dict[str, Array]:
        """Named arrays of one unit of each row."""
        assert self.layout is not None
        size = self.layout.dtype.itemsize
        parts: list[bytes | memoryview] = []
        for trajectory, unit, segment, offset in zip(
            rows[:, 0].tolist(), units.tolist(), rows[:, 3].tolist(), rows[:, 4].tolist(), strict=True
        ):
            data, at = self.cache.bytes_of(trajectory), unit * size
            if data is None and segment == NOT_WRITTEN:
                data = raw(self.pending[trajectory])
            if data is not None:
                parts.append(data[at : at + size])
            else:
                assert self.reader is not None
                parts.append(self.reader.read_unit(segment, offset + at, size, unit))
        return self.layout.unpack(bytearray().join(parts))

    def block(self, entry: Entry) -> Block:
        """All units of a live trajectory."""
        block = self.cache.block(entry.id)
        block = self.pending.get(entry.id) if block is None else block
        if block is None:
            assert self.layout is not None and self.reader is not None
            block = np.frombuffer(self.reader.read(entry), self.layout.dtype)
        return block

    def in_memory(self, ids: Iterable[int]) -> dict[int, bytes | memoryview]:
        """The cached ones of these."""
        return {i: raw(block) for i in ids if (block := self.cache.block(i)) is not None}
