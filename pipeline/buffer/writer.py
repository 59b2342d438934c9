"""Payload writes off the hot path: one thread, one fsync for everything that came meanwhile (group commit).

*consumes* records; *produces* handles that are done once a record is durable. *waits for*: the disk. *unblocked by*:
:meth:`BackgroundWriter.put`. Back-pressure: ``put`` waits while more than ``pending_bytes_max`` are not written.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path

from pipeline.buffer.segments import Record, SegmentWriter
from pipeline.errors import StoreError

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
        self._end = (segment, 0)
        self._thread = threading.Thread(target=self._run, name="buffer-writer", daemon=True)
        self._thread.start()

    @property
    def current(self) -> int:
        """Segments below this one are complete."""
        return self._end[0]

    @property
    def end(self) -> tuple[int, int]:
        """Segment and byte after the last durable record."""
        return self._end

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
        self._end = (self._segment.number, self._segment.size)
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
