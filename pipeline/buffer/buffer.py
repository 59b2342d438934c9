"""A buffer of trajectories for off-policy training, with the semantics of RLinf's published trajectory buffer.

Index and payloads are apart: the index (ids, units, places) is in memory, payloads are on disk, and a bounded
first-in-first-out cache holds the newest. Units (steps, turns) are drawn uniformly with replacement from the latest
``window`` trajectories. Adding returns before anything is written; the handle says when it is durable.

>>> buffer = TrajectoryBuffer(seed=7)
>>> handle = buffer.add({"observation": np.zeros((64, 3), np.float32), "reward": np.ones(64, np.float32)})
>>> buffer.sample(16).arrays["observation"].shape
(16, 3)
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np

from pipeline.buffer.cache import BlockCache, raw
from pipeline.buffer.checkpoint import Checkpoint, write_checkpoint
from pipeline.buffer.index import NOT_WRITTEN, Entry, Index, Ints
from pipeline.buffer.layout import Array, Block, Layout, layout_of, views
from pipeline.buffer.recovery import DirectoryLock, recover
from pipeline.buffer.segments import Record, SegmentReader, segment_file
from pipeline.buffer.writer import BackgroundWriter
from pipeline.errors import NotEnough, SchemaError, StoreError

SEED_MAX = 2**64 - 1


@dataclass(frozen=True, slots=True)
class Batch:
    """``n`` drawn units."""

    arrays: dict[str, Array]
    """``[n, ...]`` by name; the caller's own."""
    ids: Ints
    """int64 ``[n]``: the trajectory of each unit."""
    units: Ints
    """int64 ``[n]``: its place in that trajectory."""


@dataclass(frozen=True, slots=True)
class Statistics:
    """Counts of a buffer. Evicted trajectories are in none but ``added`` and ``evicted``."""

    trajectories: int
    units: int
    n_bytes: int
    """Of live payloads."""
    added: int
    evicted: int
    draws: int
    pending: int
    """Live or not, accepted and not yet durable."""
    cached: int
    cached_bytes: int


class TrajectoryBuffer:
    """Opens or creates the buffer in ``directory``; without one everything is in memory. Safe to use from threads.

    ``capacity``: trajectories kept, the oldest go first. ``window``: trajectories that are drawn from, 0 for all.
    ``resume``: what an existing directory is opened with: ``newest`` has every trajectory that was acknowledged,
    ``checkpoint`` is exactly the state of the last :meth:`save` (its draws follow as they would have). ``seed``
    matters only to a new one.

    Raises :class:`StoreError` for a directory that is in use, damaged or something else.
    """

    def __init__(
        self,
        directory: Path | None = None,
        *,
        capacity: int | None = None,
        window: int = 0,
        seed: int = 0,
        cache_bytes: int = 256 * 2**20,
        segment_bytes: int = 256 * 2**20,
        pending_bytes_max: int = 64 * 2**20,
        resume: Literal["newest", "checkpoint"] = "newest",
        stream: int = 0,
    ) -> None:
        if (capacity is not None and capacity < 1) or window < 0 or not 0 <= seed <= SEED_MAX:
            raise SchemaError(
                f"expected capacity >= 1, window >= 0 and a seed of 64 bits, got {capacity}, {window} and {seed}"
            )
        self.directory = directory
        self.capacity = capacity
        self.window = window
        self._generation = 0
        self._seed, self._stream, self._draws = seed, stream, 0
        self._next_id = self._added = 0
        self._index = Index()
        self._layouts: list[Layout] = []
        self._layout_numbers: dict[Layout, int] = {}
        self._cache = BlockCache(cache_bytes if directory is not None else None)
        self._pending: dict[int, Block] = {}
        self._in_segment: Counter[int] = Counter()
        """Live trajectories by segment."""
        self._checkpointed: frozenset[int] = frozenset()
        self._saving: frozenset[int] = frozenset()
        self._state = threading.RLock()
        """Guards everything above; held for moments."""
        self._adding = threading.Lock()
        """Held by whoever adds, and by a save until it has its copy of the index."""
        self._lock: DirectoryLock | None = None
        self._writer: BackgroundWriter | None = None
        self._reader: SegmentReader | None = None
        if directory is not None:
            self._open(directory, segment_bytes, pending_bytes_max, newest=resume == "newest")

    def __enter__(self) -> TrajectoryBuffer:
        return self

    def __exit__(self, *args: object) -> None:
        self.close()

    def __len__(self) -> int:
        return len(self._index)

    @property
    def n_units(self) -> int:
        """Units that can be drawn: those of the window."""
        with self._state:
            return self._index.units_of_latest(self.window)

    def ids(self) -> list[int]:
        """Live trajectories, oldest first."""
        with self._state:
            return [int(i) for i in self._index.ids()]

    def statistics(self) -> Statistics:
        with self._state:
            index = self._index
            return Statistics(
                trajectories=len(index),
                units=index.n_units,
                n_bytes=index.n_bytes,
                added=self._added,
                evicted=self._added - len(index),
                draws=self._draws,
                pending=len(self._pending),
                cached=len(self._cache),
                cached_bytes=self._cache.n_bytes,
            )

    def add(self, arrays: Mapping[str, Array]) -> Future[int]:
        """Add one trajectory: named arrays with one leading unit dimension, copied. It can be drawn at once.

        The handle's result is the trajectory's id, there once it is durable (without a directory: at once); a write
        that fails is its exception. Waits while ``pending_bytes_max`` are not written. Raises :class:`SchemaError`
        for arrays that are no trajectory, :class:`StoreError` after a failed write or :meth:`close`.
        """
        layout, units = layout_of(arrays)
        block = layout.pack(arrays, units)
        return self.add_block(layout, block)

    def add_block(self, layout: Layout, block: Block, identity: int | None = None) -> Future[int]:
        """:meth:`add` for what is packed already; the block belongs to the buffer from here on."""
        block.flags.writeable = False
        with self._adding:
            if self._writer is not None:
                self._writer.check()
            with self._state:
                record = self._insert(layout, block, identity)
            if self._writer is None:
                handle: Future[int] = Future()
                handle.set_result(record.id)
                return handle
            return self._writer.put(record)

    def sample(self, n: int) -> Batch:
        """Draw ``n`` units, uniformly with replacement over the units of the window.

        Raises :class:`NotEnough` when the window has fewer, :class:`SchemaError` when the drawn trajectories have
        different layouts (use :meth:`draw` and :meth:`get` for those).
        """
        with self._state:
            positions, units = self._draw(n)
            rows = self._index.rows_at(positions)
            layout = self._common_layout(rows)
            data = self._gather(rows, units, layout)
        block: Block = np.frombuffer(data, layout.dtype)
        arrays = {name: np.ascontiguousarray(view) for name, view in views(block).items()}
        return Batch(arrays, rows[:, 0], units)

    def draw(self, n: int) -> tuple[Ints, Ints]:
        """Ids and units that :meth:`sample` would have drawn, int64 ``[n]`` each, without their payloads."""
        with self._state:
            positions, units = self._draw(n)
            return self._index.ids()[positions], units

    def get(self, trajectory: int) -> dict[str, Array]:
        """All arrays of a live trajectory, read-only. Raises :class:`NotEnough` when it is not live."""
        with self._state:
            position = self._index.find(trajectory)
            if position is None:
                raise NotEnough(f"expected a live trajectory, got {trajectory}, which was evicted or never added")
            return views(self._block(self._index.at(position)))

    def preload(self, n: int) -> int:
        """Read the latest ``n`` trajectories into the cache, as many as it holds; returns how many it has of them."""
        with self._state:
            for position in range(max(0, len(self._index) - n), len(self._index)):
                entry = self._index.at(position)
                if self._cache.block(entry.id) is None:
                    self._cache.add(entry.id, self._block(entry))
            return sum(self._cache.block(i) is not None for i in self.ids()[-n:]) if n else 0

    def flush(self) -> None:
        """Return when everything added so far is durable. Raises :class:`StoreError` when it cannot become so."""
        if self._writer is not None:
            self._writer.flush()

    def save(self, directory: Path | None = None) -> None:
        """Write a checkpoint of index, counters and random state: in place, or as a whole copy in another directory
        (the only way without a directory of its own). Killed at any moment, the checkpoint before is still readable.
        """
        from pipeline.buffer.copies import write_copy

        if directory is not None and directory != self.directory:
            state, blocks = self.snapshot()
            try:
                write_copy(directory, state, lambda row: blocks.get(int(row[0])) or self._stored(row))
            finally:
                self._saving = frozenset()
            return
        if self.directory is None:
            raise StoreError("expected a directory to save a buffer that is in memory, got none")
        state, _ = self.snapshot()
        write_checkpoint(self.directory, state)
        with self._state:
            self._checkpointed, self._saving = state.segments, frozenset()
            self._remove_empty_segments()

    def snapshot(self) -> tuple[Checkpoint, dict[int, bytes | memoryview]]:
        """The state now, everything in it durable, and the payloads where they are in memory only."""
        with self._adding:
            self.flush()
            with self._state:
                rows = self._index.rows()
                end = self._writer.end if self._writer is not None else (0, 0)
                state = Checkpoint(
                    generation=self._generation,
                    seed=self._seed,
                    stream=self._stream,
                    draws=self._draws,
                    next_id=self._next_id,
                    added=self._added,
                    end=end,
                    layouts=tuple(self._layouts),
                    rows=rows,
                )
                blocks: dict[int, bytes | memoryview] = {}
                if self.directory is None:
                    blocks = {e: raw(b) for e in self.ids() if (b := self._cache.block(e)) is not None}
                else:
                    self._saving = state.segments
                return state, blocks

    def restore(self, state: Checkpoint) -> None:
        """Take the counters and the random state of another buffer."""
        with self._state:
            self._seed, self._stream, self._draws, self._next_id = (
                state.seed,
                state.stream,
                state.draws,
                max(self._next_id, state.next_id),
            )

    def close(self) -> None:
        """Write what is pending and let go of the directory. No checkpoint is made: see :meth:`save`."""
        if self._writer is not None:
            self._writer.close()
        with self._state:
            if self._reader is not None:
                self._reader.close()
            if self._lock is not None:
                self._lock.release()
                self._lock = None

    def _open(self, directory: Path, segment_bytes: int, pending_bytes_max: int, *, newest: bool) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self._lock = DirectoryLock(directory)
        self._reader = SegmentReader(directory)
        try:
            found = recover(directory, self._reader, self._seed, newest=newest)
            state = found.state
            self._generation = state.generation
            self._seed, self._stream, self._draws = state.seed, state.stream, state.draws
            self._next_id, self._added = state.next_id, state.added
            self._checkpointed = found.checkpointed
            self._in_segment.update(dict.fromkeys(found.segments, 0))
            for layout in state.layouts:
                self._layout_number(layout)
            for row in state.rows.tolist():
                self._index.add(Entry(*row))
                self._in_segment[row[4]] += 1
            self._evict()
        except BaseException:
            self._reader.close()
            self._lock.release()
            raise
        self._writer = BackgroundWriter(
            directory, found.next_segment, state.generation, segment_bytes, pending_bytes_max, self._durable
        )
        with self._state:
            self._remove_empty_segments()

    def _insert(self, layout: Layout, block: Block, identity: int | None) -> Record:
        trajectory = self._next_id if identity is None else identity
        number = self._layout_number(layout)
        self._index.add(Entry(trajectory, len(block), block.nbytes, number, NOT_WRITTEN, NOT_WRITTEN, 0))
        self._next_id = trajectory + 1
        self._added += 1
        self._cache.add(trajectory, block)
        self._evict()
        if self._writer is not None:
            self._pending[trajectory] = block
        evicted = self._added - len(self._index)
        return Record(trajectory, self._added, evicted, self._draws, len(block), layout.encode(), raw(block))

    def _evict(self) -> None:
        while self.capacity is not None and len(self._index) > self.capacity:
            entry = self._index.evict()
            self._cache.remove(entry.id)
            if entry.segment != NOT_WRITTEN:
                self._in_segment[entry.segment] -= 1

    def _durable(self, records: list[Record]) -> None:
        with self._state:
            for record in records:
                self._pending.pop(record.id, None)
                self._in_segment[record.segment] += self._index.place(
                    record.id, record.segment, record.offset, record.crc
                )
            self._remove_empty_segments()

    def _remove_empty_segments(self) -> None:
        assert self.directory is not None and self._reader is not None and self._writer is not None
        current = self._writer.current
        for segment, live in list(self._in_segment.items()):
            if live == 0 and segment < current and segment not in self._checkpointed | self._saving:
                self._reader.forget(segment)
                segment_file(self.directory, segment).unlink(missing_ok=True)
                del self._in_segment[segment]

    def _draw(self, n: int) -> tuple[Ints, Ints]:
        total = self._index.units_of_latest(self.window)
        if not 0 < n <= total:
            raise NotEnough(
                f"expected to draw 1 to {total} units (of the latest {min(self.window or len(self), len(self))} "
                f"trajectories), got {n}: wait until there are more, or ask for fewer"
            )
        # Draw i is a function of seed and i: the whole random state is a number that fits into every record.
        bits = np.random.Philox(key=(self._stream << 64) | self._seed, counter=self._draws << 64)
        self._draws += 1
        return self._index.locate(np.random.Generator(bits).integers(0, total, n), self.window)

    def _common_layout(self, rows: Ints) -> Layout:
        numbers = rows[:, 3]
        if (numbers != numbers[0]).any():
            a, b = (self._layouts[int(i)].fields for i in np.unique(numbers)[:2])
            raise SchemaError(
                f"expected drawn trajectories of one layout to make a batch, got {a} and {b}: use draw and get"
            )
        return self._layouts[int(numbers[0])]

    def _gather(self, rows: Ints, units: Ints, layout: Layout) -> bytearray:
        size = layout.unit_bytes
        parts: list[bytes | memoryview] = []
        offsets = rows[:, 5] + units * size
        for trajectory, unit, segment, offset in zip(
            rows[:, 0].tolist(), (units * size).tolist(), rows[:, 4].tolist(), offsets.tolist(), strict=True
        ):
            data = self._cache.bytes_of(trajectory)
            if data is None and segment == NOT_WRITTEN:
                data = raw(self._pending[trajectory])
            if data is not None:
                parts.append(data[unit : unit + size])
            else:
                assert self._reader is not None
                parts.append(self._reader.read(segment, offset, size))
        return bytearray().join(parts)

    def _block(self, entry: Entry) -> Block:
        block = self._cache.block(entry.id)
        if block is None:
            block = self._pending.get(entry.id)
        if block is None:
            assert self._reader is not None
            data = self._reader.read(entry.segment, entry.offset, entry.n_bytes, entry.crc)
            block = np.frombuffer(data, self._layouts[entry.layout].dtype)
        return block

    def _stored(self, row: Ints) -> bytes:
        with self._state:
            assert self._reader is not None
            return self._reader.read(int(row[4]), int(row[5]), int(row[2]), int(row[6]))

    def _layout_number(self, layout: Layout) -> int:
        number = self._layout_numbers.get(layout)
        if number is None:
            number = self._layout_numbers[layout] = len(self._layouts)
            self._layouts.append(layout)
        return number
