"""Payloads of a trajectory buffer on disk: append-only segment files, and the thread that writes them.

A segment is a file of records (:mod:`pipeline.schema.record_file`). The first has no body and says which generation of
the buffer the segment belongs to; each of the others is one trajectory, with everything in its header that the index
needs. So trajectories added after the last checkpoint are found by reading the headers after it. A record that a dying
process wrote only in part is dropped; damage anywhere else is an error. A payload has a checksum as a whole, and one in
the last four bytes of each of its units, so that a unit that is read alone is checked too.

:class:`BackgroundWriter` *consumes* records and *produces* handles that are done once a record is durable, with one
``fsync`` for everything that came meanwhile (group commit). *waits for*: the disk. *unblocked by*:
:meth:`BackgroundWriter.put`. Back-pressure: ``put`` waits while more than ``pending_bytes_max`` are not written.
"""

from __future__ import annotations

import os
import re
import threading
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
import orjson

from pipeline.errors import StoreError
from pipeline.runtime.run_directory import sync
from pipeline.schema import record_file as frames
from pipeline.schema.record_file import Buffer

KIND = frames.FileKind(
    "segment",
    3,
    "a segment of a trajectory buffer",
    "open it with the Afterplay that wrote it, or use another directory",
)
UNIT_CHECKSUM_BYTES = 4
_CRC_RESIDUE = 0x2144DF1C
"""CRC-32 of any bytes that end with their own CRC-32."""
_NAME = re.compile(r"segment-(\d{8})\.data")


NOT_WRITTEN = -1


class Entry(NamedTuple):
    """One live trajectory."""

    id: int
    units: int
    n_bytes: int
    segment: int
    """:data:`NOT_WRITTEN` until its payload is durable."""
    offset: int
    crc: int


@dataclass(frozen=True, slots=True)
class Record:
    """One appended trajectory."""

    id: int
    added: int
    evicted: int
    draws: int
    units: int
    layout: bytes
    payload: memoryview | None
    """None when only the header was read."""
    n_bytes: int = 0
    segment: int = -1
    offset: int = -1
    """Offset of the payload in its segment file."""
    crc: int = 0


def segment_file(directory: Path, number: int) -> Path:
    return directory / f"segment-{number:08d}.data"


def segment_numbers(directory: Path) -> list[int]:
    """Segments that lie in a directory, oldest first."""
    found = (_NAME.fullmatch(name) for name in os.listdir(directory))
    return sorted(int(match.group(1)) for match in found if match)


def _start(generation: int) -> bytes:
    """The first line and the first record of a segment: always as many bytes."""
    return KIND.magic + b"".join(frames.pack({"generation": f"{generation:016x}"}))


START_BYTES = len(_start(0))


def _with_checksums(payload: memoryview, units: int) -> memoryview:
    """A copy of a payload with the CRC-32 of each unit in its last four bytes, little-endian. It begins with the number
    of the unit, so that a unit is right in one place only."""
    data = memoryview(bytearray(payload))
    size = len(data) // units
    end, starts = size - UNIT_CHECKSUM_BYTES, range(0, len(data), size)
    sums = (zlib.crc32(data[at : at + end], number) for number, at in enumerate(starts))
    table = np.frombuffer(data, np.uint8).reshape(units, size)
    table[:, end:] = np.fromiter(sums, "<u4", units).view(np.uint8).reshape(units, UNIT_CHECKSUM_BYTES)
    return data


class SegmentWriter:
    """Appends records to one new segment file. Used by one thread."""

    def __init__(self, directory: Path, number: int, generation: int) -> None:
        self.number = number
        self._fd = os.open(segment_file(directory, number), os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
        self.size = frames.write(self._fd, [_start(generation)])
        sync(directory)

    def append(self, records: Sequence[Record]) -> list[Record]:
        """Write records; the same ones with their offsets. Durable after :meth:`sync`."""
        placed: list[Record] = []
        buffers: list[Buffer] = []
        at = self.size
        for record in records:
            assert record.payload is not None
            fields = record.id, record.added, record.evicted, record.draws, record.units
            checked = _with_checksums(record.payload, record.units)
            head, payload = frames.pack({"record": fields, "layout": orjson.Fragment(record.layout)}, [checked])
            buffers += [head, payload]
            at += len(head)
            size, crc = record.payload.nbytes, frames.body_crc(head)
            placed.append(replace(record, payload=None, n_bytes=size, segment=self.number, offset=at, crc=crc))
            at += size
        self.size += frames.write(self._fd, buffers)
        return placed

    def sync(self) -> None:
        os.fsync(self._fd)

    def close(self) -> None:
        os.close(self._fd)


class SegmentReader:
    """Reads payloads from the segments of one directory; keeps them open, so that they outlive their names.

    Raises :class:`StoreError` where a file is missing, cut off or damaged.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._fds: dict[int, int] = {}

    def open(self, number: int) -> int:
        fd = self._fds.get(number)
        if fd is None:
            path = segment_file(self.directory, number)
            try:
                fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            except OSError as error:
                raise StoreError(f"expected the buffer's segment {path}, got {error.strerror}") from error
            try:
                KIND.check(path, os.pread(fd, START_BYTES, 0))
            except StoreError:
                os.close(fd)
                raise
            self._fds[number] = fd
        return fd

    def read(self, entry: Entry) -> bytes:
        """A whole payload, checked."""
        data = os.pread(self.open(entry.segment), entry.n_bytes, entry.offset)
        if len(data) != entry.n_bytes or zlib.crc32(data) != entry.crc:
            raise self._damaged(entry.segment, entry.offset, entry.n_bytes)
        return data

    def read_unit(self, segment: int, offset: int, n_bytes: int, number: int) -> bytes:
        """One unit of a payload, its ``number`` there, with the checksum at its end."""
        data = os.pread(self.open(segment), n_bytes, offset)
        if len(data) != n_bytes or zlib.crc32(data, number) != _CRC_RESIDUE:
            raise self._damaged(segment, offset, n_bytes)
        return data

    def _damaged(self, segment: int, offset: int, n_bytes: int) -> StoreError:
        return StoreError(
            f"{segment_file(self.directory, segment)} is damaged at byte {offset}: expected {n_bytes} bytes with "
            "their checksum. Restore the directory from a copy"
        )

    def forget(self, number: int) -> None:
        fd = self._fds.pop(number, None)
        if fd is not None:
            os.close(fd)

    def close(self) -> None:
        for number in list(self._fds):
            self.forget(number)

    def scan(self, number: int, start: int, *, payloads: bool) -> Iterator[Record]:
        """Records from byte ``start`` (0: the first) to the end; with ``payloads`` their checksums are tried too.
        Stops at the first that is not whole."""
        for frame in frames.scan(self.open(number), max(start, START_BYTES), bodies=payloads):
            header = frame.header
            identity, added, evicted, draws, units = header["record"]
            yield Record(
                identity, added, evicted, draws, units, orjson.dumps(header["layout"]), None,
                frame.n_bytes, number, frame.offset, frame.crc,
            )  # fmt: skip

    def generation(self, number: int) -> int:
        """Generation of the buffer that the segment belongs to."""
        for frame in frames.scan(self.open(number), len(KIND.magic)):
            return int(frame.header["generation"], 16)
        raise StoreError(f"{segment_file(self.directory, number)} is damaged at its start. Restore it from a copy")

    def size(self, number: int) -> int:
        return os.fstat(self.open(number)).st_size


class HeldSegments:
    """Counts trajectories by segment, as the newest durable record has them; removes segments that neither they nor a
    checkpoint need. A trajectory is let go of once the eviction is durable: until then a recovery still has it."""

    def __init__(self) -> None:
        self._live: dict[int, int] = {}
        """Segments in the order in which they were written, and so in that of their trajectories."""
        self._evicted = 0
        self.checkpointed: frozenset[int] = frozenset()
        """Segments that the checkpoint on disk needs."""
        self.saving: frozenset[int] = frozenset()
        """Segments that a checkpoint or copy being written needs."""

    def found(self, segments: Iterable[int], rows: Iterable[int], evicted: int) -> None:
        """``segments`` lie in the directory, ``rows`` are those of its trajectories, and ``evicted`` came before."""
        self._live = dict.fromkeys(segments, 0)
        self._evicted = evicted
        for segment in rows:
            self.add(segment)

    def add(self, segment: int) -> None:
        """Count a trajectory that is durable now."""
        self._live[segment] = self._live.get(segment, 0) + 1

    def evict(self, evicted: int) -> None:
        """Let go of the oldest, of which so many were ever evicted, as is durable now."""
        left = max(0, evicted - self._evicted)
        self._evicted += left
        for segment, live in self._live.items():
            gone = min(left, live)
            self._live[segment] -= gone
            left -= gone

    def remove_empty(self, directory: Path, reader: SegmentReader, current: int) -> None:
        """Remove the files of segments before ``current`` that are not needed."""
        needed = self.checkpointed | self.saving
        for segment, live in list(self._live.items()):
            if live == 0 and segment < current and segment not in needed:
                reader.forget(segment)
                segment_file(directory, segment).unlink(missing_ok=True)
                del self._live[segment]


GROUP_RECORDS_MAX = 1024


class BackgroundWriter:
    """Owns the thread that writes the segments of a directory, the first of them ``segment``.

    ``on_durable`` is called from that thread with the records of a group, placed, before their handles are done.
    """

    def __init__(
        self,
        directory: Path,
        segment: int,
        generation: int,
        segment_bytes: int,
        pending_bytes_max: int,
        on_durable: Callable[[list[Record]], None],
    ) -> None:
        self._directory = directory
        self._next_segment = segment
        self._generation = generation
        self._segment_bytes = segment_bytes
        self._pending_bytes_max = pending_bytes_max
        self._on_durable = on_durable
        self._queue: deque[tuple[Record, Future[int]]] = deque()
        self._pending_bytes = 0
        self._busy = False
        self._closing = False
        self._failure: BaseException | None = None
        self._changed = threading.Condition()
        self._segment: SegmentWriter | None = None
        self.end = (segment, 0)
        """Segment and byte after the last durable record; segments below this one are complete."""
        self._thread = threading.Thread(target=self._run, name="buffer-writer", daemon=True)
        self._thread.start()

    def check(self) -> None:
        """Raise :class:`StoreError` once a write has failed, or the buffer is closed."""
        with self._changed:
            if self._failure is not None or self._closing:
                raise self._explained()

    def put(self, record: Record) -> Future[int]:
        """Queue one record. Raises :class:`StoreError` once a write has failed."""
        assert record.payload is not None
        handle: Future[int] = Future()
        with self._changed:
            while self._pending_bytes > self._pending_bytes_max and self._failure is None:
                self._changed.wait()
            if self._failure is not None or self._closing:
                raise self._explained()
            self._queue.append((record, handle))
            self._pending_bytes += record.payload.nbytes
            self._changed.notify_all()
        return handle

    def flush(self) -> None:
        """Return when everything put so far is durable. Raises :class:`StoreError` when it cannot become so."""
        with self._changed:
            while (self._queue or self._busy) and self._failure is None:
                self._changed.wait()
            if self._failure is not None:
                raise self._explained()

    def close(self) -> None:
        """Write what is queued and end the thread."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self._thread.join()
        if self._segment is not None:
            self._segment.close()

    def _run(self) -> None:
        while True:
            with self._changed:
                while not self._queue and not self._closing:
                    self._changed.wait()
                if not self._queue:
                    return
                group = [self._queue.popleft() for _ in range(min(len(self._queue), GROUP_RECORDS_MAX))]
                self._busy = True
            try:
                placed = self._write([record for record, _ in group])
                self._on_durable(placed)
            except BaseException as error:  # the thread must tell whoever waits, whatever it was
                self._fail(error, [handle for _, handle in group])
                return
            with self._changed:
                self._busy = False
                self._pending_bytes -= sum(record.n_bytes for record in placed)
                self._changed.notify_all()
            for record, handle in group:
                handle.set_result(record.id)

    def _write(self, records: list[Record]) -> list[Record]:
        if self._segment is not None and self._segment.size >= self._segment_bytes:
            self._segment.close()
            self._segment = None
        if self._segment is None:
            self._segment = SegmentWriter(self._directory, self._next_segment, self._generation)
            self._next_segment += 1
        placed = self._segment.append(records)
        self._segment.sync()
        self.end = (self._segment.number, self._segment.size)
        return placed

    def _fail(self, error: BaseException, handles: list[Future[int]]) -> None:
        with self._changed:
            self._failure = error
            self._busy = False
            handles += [handle for _, handle in self._queue]
            self._queue.clear()
            self._changed.notify_all()
        for handle in handles:
            handle.set_exception(self._explained())

    def _explained(self) -> StoreError:
        if self._failure is None:
            return StoreError("this buffer is closed: open it again to add")
        error = StoreError(
            f"the trajectory buffer in {self._directory} cannot be written: {self._failure}. What was acknowledged is "
            "safe; free disk space and open it again"
        )
        error.__cause__ = self._failure
        return error
