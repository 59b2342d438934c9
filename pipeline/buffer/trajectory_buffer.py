"""A buffer of trajectories for off-policy training, with the semantics of RLinf's published trajectory buffer.

The index (ids, units, offsets) is in memory, payloads are on disk, and a bounded first-in-first-out cache holds the
newest. Units (steps, turns) are drawn uniformly with replacement from the latest ``window`` trajectories. Adding
returns before anything is written; the handle says when it is durable.

>>> import numpy as np
>>> buffer = TrajectoryBuffer(seed=7)
>>> handle = buffer.add({"observation": np.zeros((64, 3), np.float32), "reward": np.ones(64, np.float32)})
>>> buffer.sample(16).arrays["observation"].shape
(16, 3)
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np

from pipeline.buffer.checkpoint import (
    Checkpoint,
    lock_directory,
    open_checkpoint,
    recover,
    write_checkpoint,
    write_copy,
)
from pipeline.buffer.payloads import (
    Array,
    Block,
    BufferIndex,
    Ints,
    Layout,
    Payloads,
    UnitDraws,
    layout_of,
    raw,
    views,
)
from pipeline.buffer.segments import NOT_WRITTEN, BackgroundWriter, Entry, HeldSegments, Record, SegmentReader
from pipeline.errors import NotEnough, SchemaError, StoreError
from pipeline.runtime.run_directory import FileLock


@dataclass(frozen=True, slots=True)
class Batch:
    """``n`` drawn units."""

    arrays: dict[str, Array]
    """``[n, ...]`` by name; the caller's own."""
    ids: Ints
    """int64 ``[n]``: the trajectory of each unit."""
    units: Ints
    """int64 ``[n]``: its position in that trajectory."""


SEED_MAX = 2**64 - 1


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
        self._draws = UnitDraws(seed, stream)
        self._next_id = self._added = 0
        self._index = BufferIndex()
        self._payloads = Payloads(cache_bytes if directory is not None else None)
        self._segments = HeldSegments()
        self._state = threading.RLock()
        """Guards everything above; held for moments."""
        self._adding = threading.Lock()
        """Held by whoever adds, and by a save until it has its copy of the index."""
        self._saving = threading.Lock()
        """Held by whoever saves: no checkpoint replaces a newer one, or lacks segments that it needs."""
        self._lock: FileLock | None = None
        self._writer: BackgroundWriter | None = None
        if directory is not None:
            self._open(directory, segment_bytes, pending_bytes_max, newest=resume == "newest")

    def __enter__(self) -> TrajectoryBuffer:
        return self

    def __exit__(self, *args: object) -> None:
        self.close()

    def __len__(self) -> int:
        return len(self._index)

    def ids(self) -> list[int]:
        """Live trajectories, oldest first."""
        with self._state:
            return [int(i) for i in self._index.ids()]

    def add(self, arrays: Mapping[str, Array]) -> Future[int]:
        """Add one trajectory: named arrays with one leading unit dimension, copied. It can be drawn at once.

        The handle's result is the trajectory's id, there once it is durable (without a directory: at once); a write
        that fails is its exception. Waits while ``pending_bytes_max`` are not written. Raises :class:`SchemaError`
        for arrays that are no trajectory or not like those before, :class:`StoreError` after a failed write or
        :meth:`close`.
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
                self._payloads.check_layout(layout)
                record = self._insert(layout, block, identity)
            if self._writer is None:
                handle: Future[int] = Future()
                handle.set_result(record.id)
                return handle
            return self._writer.put(record)

    def sample(self, n: int) -> Batch:
        """Draw ``n`` units, uniformly with replacement over the units of the window.

        Raises :class:`NotEnough` when the window has fewer, :class:`StoreError` for a unit that is damaged on disk.
        """
        with self._state:
            positions, units = self._draws.next(self._index, self.window, n)
            rows = self._index.rows_at(positions)
            arrays = self._payloads.gather(rows, units)
        return Batch(arrays, rows[:, 0], units)

    def draw(self, n: int) -> tuple[Ints, Ints]:
        """Ids and units that :meth:`sample` would have drawn, int64 ``[n]`` each, without their payloads."""
        with self._state:
            positions, units = self._draws.next(self._index, self.window, n)
            return self._index.ids()[positions], units

    def get(self, trajectory: int) -> dict[str, Array]:
        """All arrays of a live trajectory, read-only. Raises :class:`NotEnough` when it is not live."""
        with self._state:
            position = self._index.find(trajectory)
            if position is None:
                raise NotEnough(f"expected a live trajectory, got {trajectory}, which was evicted or never added")
            return views(self._payloads.block(self._index.at(position)))

    def flush(self) -> None:
        """Return when everything added so far is durable. Raises :class:`StoreError` when it cannot become so."""
        if self._writer is not None:
            self._writer.flush()

    def save(self, directory: Path | None = None) -> None:
        """Write a checkpoint of index, counters and random state: in place, or as a whole copy in another directory
        (the only way without a directory of its own). Killed at any moment, the checkpoint before is still readable.
        """
        with self._saving:
            if directory is not None and directory != self.directory:
                state, blocks = self.snapshot()
                try:
                    write_copy(directory, state, lambda row: blocks.get(int(row[0])) or self._stored(row))
                finally:
                    self._segments.saving = frozenset()
                return
            if self.directory is None:
                raise StoreError("expected a directory to save a buffer that is in memory, got none")
            state, _ = self.snapshot()
            write_checkpoint(self.directory, state)
            with self._state:
                self._segments.checkpointed, self._segments.saving = state.segments, frozenset()
                self._segments.evict(state.added - len(state.rows))
                self._remove_empty_segments()

    def snapshot(self) -> tuple[Checkpoint, dict[int, bytes | memoryview]]:
        """The state now, everything in it durable, and the payloads where they are in memory only."""
        with self._adding:
            self.flush()
            with self._state:
                end = self._writer.end if self._writer is not None else (0, 0)
                layout, rows, draws = self._payloads.layout, self._index.rows(), self._draws
                drawn = draws.seed, draws.stream, draws.count
                state = Checkpoint(self._generation, *drawn, self._next_id, self._added, end, layout, rows)
                if self.directory is None:
                    return state, self._payloads.in_memory(self.ids())
                self._segments.saving = state.segments
                return state, {}

    def close(self) -> None:
        """Write what is pending and let go of the directory. No checkpoint is made: see :meth:`save`."""
        if self._writer is not None:
            self._writer.close()
        with self._state:
            if self._payloads.reader is not None:
                self._payloads.reader.close()
            if self._lock is not None:
                self._lock.release()
                self._lock = None

    def _open(self, directory: Path, segment_bytes: int, pending_bytes_max: int, *, newest: bool) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self._lock = lock_directory(directory)
        reader = self._payloads.reader = SegmentReader(directory)
        try:
            found = recover(directory, reader, self._draws.seed, newest=newest)
            state = found.state
            self._generation = state.generation
            self._draws = UnitDraws(state.seed, state.stream, state.draws)
            self._next_id, self._added = state.next_id, state.added
            self._segments.checkpointed = found.checkpointed
            self._segments.found(found.segments, state.rows[:, 3].tolist(), state.added - len(state.rows))
            self._payloads.layout = state.layout
            for row in state.rows.tolist():
                self._index.add(Entry(*row))
            self._evict()
        except BaseException:
            reader.close()
            self._lock.release()
            raise
        self._writer = BackgroundWriter(
            directory, found.next_segment, state.generation, segment_bytes, pending_bytes_max, self._durable
        )
        with self._state:
            self._remove_empty_segments()

    def _insert(self, layout: Layout, block: Block, identity: int | None) -> Record:
        trajectory = self._next_id if identity is None else identity
        self._payloads.layout = layout
        self._index.add(Entry(trajectory, len(block), block.nbytes, NOT_WRITTEN, NOT_WRITTEN, 0))
        self._next_id = trajectory + 1
        self._added += 1
        self._payloads.cache.add(trajectory, block)
        self._evict()
        if self._writer is not None:
            self._payloads.pending[trajectory] = block
        evicted = self._added - len(self._index)
        return Record(trajectory, self._added, evicted, self._draws.count, len(block), layout.encode(), raw(block))

    def _evict(self) -> None:
        while self.capacity is not None and len(self._index) > self.capacity:
            self._payloads.cache.remove(self._index.evict().id)

    def _durable(self, records: list[Record]) -> None:
        with self._state:
            for record in records:
                self._payloads.pending.pop(record.id, None)
                self._index.place(record.id, record.segment, record.offset, record.crc)
                self._segments.add(record.segment)
            self._segments.evict(records[-1].evicted)
            self._remove_empty_segments()

    def _remove_empty_segments(self) -> None:
        reader = self._payloads.reader
        assert self.directory is not None and reader is not None and self._writer is not None
        self._segments.remove_empty(self.directory, reader, self._writer.end[0])

    def _stored(self, row: Ints) -> bytes:
        with self._state:
            assert self._payloads.reader is not None
            return self._payloads.reader.read(Entry(*row.tolist()))


def load(
    source: Path,
    *,
    rank: int = 0,
    world_size: int = 1,
    directory: Path | None = None,
    capacity: int | None = None,
    window: int = 0,
    cache_bytes: int = 256 * 2**20,
) -> TrajectoryBuffer:
    """A buffer of its own with shard ``rank`` of ``world_size`` of the checkpoint in ``source``: every
    ``world_size``-th trajectory, so shards are disjoint and cover it. In memory, or copied into ``directory``, which
    must be empty. The source is only read and may be in use meanwhile.

    Raises :class:`SchemaError` for an impossible shard, :class:`StoreError` where there is no whole checkpoint.
    """
    if not 0 <= rank < world_size:
        raise SchemaError(f"expected 0 <= rank < world_size, got rank {rank} of {world_size}")
    state, reader = open_checkpoint(source)
    try:
        rows = state.rows[rank::world_size]
        buffer = TrajectoryBuffer(directory, capacity=capacity, window=window, cache_bytes=cache_bytes)
        try:
            if len(buffer):
                raise StoreError(f"expected {directory} to be empty, got a buffer of {len(buffer)} trajectories")
            for row in rows.tolist():
                assert state.layout is not None
                data = reader.read(Entry(*row))
                buffer.add_block(state.layout, np.frombuffer(data, state.layout.dtype), row[0])
            buffer._draws = UnitDraws(state.seed, rank if world_size > 1 else state.stream, state.draws)
            buffer._next_id = max(buffer._next_id, state.next_id)
            if directory is not None:
                buffer.save()
        except BaseException:
            buffer.close()
            raise
        return buffer
    finally:
        reader.close()
