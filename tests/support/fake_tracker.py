"""A tracker in memory that outlives the reporter, and a fuse that kills the reporter at any of its durable steps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from pipeline.trackers.delivery import SentEntry, TrackerRecord
from pipeline.trackers.tracker import TrackedRun, Tracker


class Killed(BaseException):
    """The process is gone."""


class Fuse:
    """Kills at the n-th call of :meth:`tick`; never with None."""

    def __init__(self) -> None:
        self.left: int | None = None

    def tick(self) -> None:
        if self.left is not None:
            self.left -= 1
            if self.left < 0:
                self.left = None
                raise Killed


@dataclass
class TrackerStore:
    """Records as the tracker's server has them, in order, each with its position."""

    rewinds: bool = False
    buffers: bool = False
    """Records become durable only when the client is closed; a kill loses the end of them."""
    place: str = "memory"
    records: list[tuple[TrackerRecord, int]] = field(default_factory=list)
    durable: int = 0
    ids: set[str] = field(default_factory=set)

    def lose(self, count: int) -> None:
        """Drop the last ``count`` of what is not durable."""
        keep = max(self.durable, len(self.records) - count)
        del self.records[keep:]
        self.durable = len(self.records)

    @property
    def keys(self) -> list[str]:
        return [record.key for record, _ in self.records]


class FakeTracker(Tracker):
    """Client of a :class:`TrackerStore`."""

    def __init__(self, store: TrackerStore, fuse: Fuse, run: TrackedRun) -> None:
        self._store, self._fuse = store, fuse
        self.rewinds = store.rewinds
        store.ids.add(run.id)

    @property
    def place(self) -> str:
        return self._store.place

    def is_empty(self) -> bool:
        return not self._store.records

    def held(self, entries: Sequence[SentEntry]) -> set[str]:
        self._fuse.tick()
        positions = {position for _, position in self._store.records}
        return {entry.key for entry in entries if entry.position in positions}

    def rewind(self, step: int) -> None:
        assert self._store.rewinds
        self._fuse.tick()
        self._store.records = [(r, p) for r, p in self._store.records if r.step < step]
        self._store.durable = len(self._store.records)
        self._fuse.tick()

    def send(self, records: Sequence[tuple[TrackerRecord, int]]) -> None:
        for record in records:
            self._fuse.tick()
            self._store.records.append(record)
        self._fuse.tick()

    def flush(self) -> bool:
        self._fuse.tick()
        if not self._store.buffers:
            self._store.durable = len(self._store.records)
        return not self._store.buffers

    def close(self, finished: bool = True) -> None:
        self._fuse.tick()
        self._store.durable = len(self._store.records)
