"""Payloads of stored trajectories: reference counts, which free unused ones, and a cache of the newest."""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Iterable, Sequence

from pipeline.schema.counters import Count
from pipeline.store.experience_records import PoolEntry, StoredGroup
from pipeline.store.journal import Journal
from pipeline.store.records import GroupRecord, GroupState, TrajectoryState, frame_size
from pipeline.transport.messages import Frames

_FREED = (TrajectoryState.BASELINE, TrajectoryState.EVALUATED)


class PayloadRefCounts:
    """Counts holders of a payload by ``row_id``: its own group, the pool, the stored group that it is in,
    every group that may replay it or begins with its first turns."""

    def __init__(self, journal: Journal) -> None:
        self._journal = journal
        self._holders: dict[int, int] = {}

    def restore(
        self, groups: Iterable[GroupRecord], entries: Iterable[PoolEntry], stored: Iterable[StoredGroup] = ()
    ) -> None:
        """Count again after a restart."""
        for group in groups:
            for slot in group.all_slots:
                if slot.trajectory is not None and slot.trajectory.state not in _FREED:
                    self._hold(slot.trajectory.row_id)
            if group.state is not GroupState.CANCELLED and not group.dropped:
                for replay in group.replays:
                    self._hold(replay.row_id)
        for entry in itertools.chain(entries, *(group.members for group in stored)):
            self._hold(entry.row_id)

    def arrived(self, row_id: int, n_bytes: int) -> None:
        """A new payload, with its first holder."""
        self._hold(row_id)
        self._journal.count(Count.PAYLOAD_BYTES, n_bytes)

    def hold(self, row_id: int) -> None:
        """One more holder of a payload that is there. Raises :class:`KeyError` when it is not."""
        self._holders[row_id] += 1

    def release(self, row_id: int, n_bytes: int) -> None:
        """One holder less."""
        self._holders[row_id] -= 1
        if self._holders[row_id] == 0:
            del self._holders[row_id]
            self._journal.forget_payload(row_id)
            self._journal.count(Count.PAYLOAD_BYTES, -n_bytes)

    @property
    def held(self) -> set[int]:
        """``row_id`` of all payloads with a holder."""
        return set(self._holders)

    def __contains__(self, row_id: int) -> bool:
        return row_id in self._holders

    def _hold(self, row_id: int) -> None:
        self._holders[row_id] = self._holders.get(row_id, 0) + 1


class PayloadCache:
    """The newest payloads, up to ``bytes_max``; the oldest go first."""

    def __init__(self, bytes_max: int) -> None:
        self._frames: OrderedDict[int, tuple[int, Frames]] = OrderedDict()
        self._bytes_max = bytes_max
        self.bytes = 0

    def put(self, row_id: int, frames: Frames) -> None:
        size = sum(map(frame_size, frames))
        self._frames[row_id] = (size, frames)
        self.bytes += size
        while self.bytes > self._bytes_max:
            self.bytes -= self._frames.popitem(last=False)[1][0]

    def get(self, row_id: int) -> Frames | None:
        found = self._frames.get(row_id)
        return found[1] if found else None

    def forget(self, row_ids: Sequence[int]) -> None:
        for row_id in row_ids:
            found = self._frames.pop(row_id, None)
            if found:
                self.bytes -= found[0]
