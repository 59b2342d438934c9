"""Who still needs which payload. One that nobody needs is freed, in the same transaction."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence

from pipeline.store.experience_records import PoolEntry
from pipeline.store.journal import Journal
from pipeline.store.ledger import Count
from pipeline.store.records import GroupRecord, GroupState, TrajectoryState
from pipeline.transport.protocol import Frames

_FREED = (TrajectoryState.BASELINE, TrajectoryState.EVALUATED)


class PayloadRefCounts:
    """Counts holders by ``seq``: the group it was played for, the pool, every group that may replay it."""

    def __init__(self, journal: Journal) -> None:
        self._journal = journal
        self._holders: dict[int, int] = {}

    def restore(self, groups: Iterable[GroupRecord], entries: Iterable[PoolEntry]) -> None:
        """Count again after a restart."""
        for group in groups:
            for slot in group.places:
                if slot.trajectory is not None and slot.trajectory.state not in _FREED:
                    self._hold(slot.trajectory.seq)
            if group.state is not GroupState.CANCELLED and not group.left_out:
                for replay in group.replays:
                    self._hold(replay.seq)
        for entry in entries:
            self._hold(entry.seq)

    def arrived(self, seq: int, n_bytes: int) -> None:
        """A new payload, with its first holder."""
        self._hold(seq)
        self._journal.count(Count.PAYLOAD_BYTES, n_bytes)

    def hold(self, seq: int) -> None:
        """One more holder of a payload that is there. Raises :class:`KeyError` when it is not."""
        self._holders[seq] += 1

    def release(self, seq: int, n_bytes: int) -> None:
        """One holder less."""
        self._holders[seq] -= 1
        if self._holders[seq] == 0:
            del self._holders[seq]
            self._journal.forget_payload(seq)
            self._journal.count(Count.PAYLOAD_BYTES, -n_bytes)

    @property
    def held(self) -> set[int]:
        """``seq`` of all that somebody needs."""
        return set(self._holders)

    def __contains__(self, seq: int) -> bool:
        return seq in self._holders

    def _hold(self, seq: int) -> None:
        self._holders[seq] = self._holders.get(seq, 0) + 1


class PayloadCache:
    """The newest payloads, up to ``bytes_max``; the oldest go first."""

    def __init__(self, bytes_max: int) -> None:
        self._frames: OrderedDict[int, tuple[int, Frames]] = OrderedDict()
        self._bytes_max = bytes_max
        self.bytes = 0

    def put(self, seq: int, frames: Frames) -> None:
        size = sum(len(f) if isinstance(f, bytes) else f.nbytes for f in frames)
        self._frames[seq] = (size, frames)
        self.bytes += size
        while self.bytes > self._bytes_max:
            self.bytes -= self._frames.popitem(last=False)[1][0]

    def get(self, seq: int) -> Frames | None:
        found = self._frames.get(seq)
        return found[1] if found else None

    def forget(self, seqs: Sequence[int]) -> None:
        for seq in seqs:
            found = self._frames.pop(seq, None)
            if found:
                self.bytes -= found[0]
