"""Whole copies of a buffer: writing one, and loading one or a shard of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np

from pipeline.buffer.buffer import TrajectoryBuffer
from pipeline.buffer.checkpoint import Checkpoint, read_checkpoint, write_checkpoint
from pipeline.buffer.index import Ints
from pipeline.buffer.recovery import check_places, lock_directory, new_generation
from pipeline.buffer.segments import Record, SegmentReader, SegmentWriter, segment_file, segment_numbers
from pipeline.errors import SchemaError, StoreError

_GROUP = 64
_ATTEMPTS = 5


def write_copy(directory: Path, state: Checkpoint, payload: Callable[[Ints], bytes | memoryview]) -> None:
    """Write ``state`` and its payloads beside what the directory holds, then let the checkpoint name the new ones and
    remove the others. Killed at any moment, one of the two is whole."""
    directory.mkdir(parents=True, exist_ok=True)
    lock = lock_directory(directory)
    try:
        old = segment_numbers(directory)
        state = replace(state, generation=new_generation())
        writer = SegmentWriter(directory, max(old, default=-1) + 1, state.generation)
        try:
            rows = state.rows.copy()
            evicted = state.added - len(rows)
            for at in range(0, len(rows), _GROUP):
                records = [
                    Record(
                        int(row[0]),
                        evicted + at + i + 1,
                        evicted,
                        state.draws,
                        int(row[1]),
                        state.layouts[int(row[3])].encode(),
                        memoryview(payload(row)),
                    )
                    for i, row in enumerate(rows[at : at + _GROUP])
                ]
                placed = writer.append(records)
                rows[at : at + _GROUP, 4:7] = [(r.segment, r.offset, r.crc) for r in placed]
            writer.sync()
            write_checkpoint(directory, replace(state, rows=rows, end=(writer.number, writer.size)))
        except BaseException:
            segment_file(directory, writer.number).unlink(missing_ok=True)
            raise
        finally:
            writer.close()
        for number in old:
            segment_file(directory, number).unlink(missing_ok=True)
    finally:
        lock.release()


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
    state, reader = _opened(source)
    try:
        rows = state.rows[rank::world_size]
        buffer = TrajectoryBuffer(directory, capacity=capacity, window=window, cache_bytes=cache_bytes)
        try:
            if len(buffer):
                raise StoreError(f"expected {directory} to be empty, got a buffer of {len(buffer)} trajectories")
            for identity, _, n_bytes, layout, segment, offset, crc in rows.tolist():
                data = reader.read(segment, offset, n_bytes, crc)
                shape = state.layouts[layout]
                buffer.add_block(shape, np.frombuffer(data, shape.dtype), identity)
            buffer.restore(replace(state, stream=rank if world_size > 1 else state.stream))
            if directory is not None:
                buffer.save()
        except BaseException:
            buffer.close()
            raise
        return buffer
    finally:
        reader.close()


def _opened(source: Path) -> tuple[Checkpoint, SegmentReader]:
    """The checkpoint with all its segments open: a writer may remove their names from here on."""
    seen = None
    for _ in range(_ATTEMPTS):
        state = read_checkpoint(source)
        if state is None:
            raise StoreError(f"expected a saved trajectory buffer in {source}, got no checkpoint")
        reader = SegmentReader(source)
        try:
            check_places(reader, state)
            return state, reader
        except StoreError:
            reader.close()
            if seen is not None and (seen.end, seen.draws, seen.added) == (state.end, state.draws, state.added):
                raise
            seen = state
    raise StoreError(f"{source} is saved faster than it can be read: try again")
