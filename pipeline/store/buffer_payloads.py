"""Where the bytes of a trajectory are: in the cache, on their way to the disk, or in a segment; and what they mean.

Decoded payloads in memory: first in, first out, bounded in bytes.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable

import numpy as np

from pipeline.errors import SchemaError
from pipeline.store.buffer_index import NOT_WRITTEN, Block, Entry, Ints, Layout
from pipeline.store.segments import SegmentReader


class BlockCache:
    """Blocks by trajectory id. ``bytes_max`` None: everything stays until it is removed."""

    def __init__(self, bytes_max: int | None) -> None:
        self.bytes_max = bytes_max
        self.n_bytes = 0
        self._blocks: OrderedDict[int, tuple[Block, memoryview]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._blocks)

    def add(self, trajectory: int, block: Block) -> None:
        """Keep a block, in place of the oldest ones where there is no room."""
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
        """Live or not, accepted and not yet durable."""
        self.reader: SegmentReader | None = None
        self.layouts: list[Layout] = []
        self._layout_numbers: dict[Layout, int] = {}

    def layout_number(self, layout: Layout) -> int:
        """By which the index names a layout; the same for equal ones."""
        number = self._layout_numbers.get(layout)
        if number is None:
            number = self._layout_numbers[layout] = len(self.layouts)
            self.layouts.append(layout)
        return number

    def common_layout(self, rows: Ints) -> Layout:
        """Of these rows of the index. Raises :class:`SchemaError` when they have several."""
        numbers = rows[:, 3]
        if (numbers != numbers[0]).any():
            a, b = (self.layouts[int(i)].fields for i in np.unique(numbers)[:2])
            raise SchemaError(
                f"expected drawn trajectories of one layout to make a batch, got {a} and {b}: use draw and get"
            )
        return self.layouts[int(numbers[0])]

    def gather(self, rows: Ints, units: Ints, layout: Layout) -> bytearray:
        """The bytes of one unit of each row, one after the other."""
        size = layout.unit_bytes
        parts: list[bytes | memoryview] = []
        offsets = rows[:, 5] + units * size
        for trajectory, unit, segment, offset in zip(
            rows[:, 0].tolist(), (units * size).tolist(), rows[:, 4].tolist(), offsets.tolist(), strict=True
        ):
            data = self.cache.bytes_of(trajectory)
            if data is None and segment == NOT_WRITTEN:
                data = raw(self.pending[trajectory])
            if data is not None:
                parts.append(data[unit : unit + size])
            else:
                assert self.reader is not None
                parts.append(self.reader.read(segment, offset, size))
        return bytearray().join(parts)

    def block(self, entry: Entry) -> Block:
        """All units of a live trajectory."""
        block = self.cache.block(entry.id)
        if block is None:
            block = self.pending.get(entry.id)
        if block is None:
            data = self.stored(entry.segment, entry.offset, entry.n_bytes, entry.crc)
            block = np.frombuffer(data, self.layouts[entry.layout].dtype)
        return block

    def load(self, entry: Entry) -> None:
        """Bring a live trajectory into the cache, as far as that holds it."""
        if self.cache.block(entry.id) is None:
            self.cache.add(entry.id, self.block(entry))

    def stored(self, segment: int, offset: int, n_bytes: int, crc: int) -> bytes:
        """A whole payload from its segment, checked."""
        assert self.reader is not None
        return self.reader.read(segment, offset, n_bytes, crc)

    def close(self) -> None:
        """Let go of the segments."""
        if self.reader is not None:
            self.reader.close()

    def in_memory(self, ids: Iterable[int]) -> dict[int, bytes | memoryview]:
        """The cached ones of these."""
        return {i: raw(block) for i in ids if (block := self.cache.block(i)) is not None}
