"""Which segments of a directory are still needed: by live trajectories, by the checkpoint, by one being made."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from pathlib import Path

from pipeline.buffer.segments import SegmentReader, segment_file


class HeldSegments:
    """Counts live trajectories by segment and removes what nobody needs."""

    def __init__(self) -> None:
        self._live: Counter[int] = Counter()
        self.checkpointed: frozenset[int] = frozenset()
        """Those that the checkpoint on disk needs."""
        self.saving: frozenset[int] = frozenset()
        """Those that a checkpoint or copy being written needs."""

    def found(self, segments: Iterable[int]) -> None:
        """These lie in the directory."""
        self._live.update(dict.fromkeys(segments, 0))

    def add(self, segment: int, trajectories: int = 1) -> None:
        """So many more (or, negative, fewer) live trajectories are in the segment."""
        self._live[segment] += trajectories

    def remove_empty(self, directory: Path, reader: SegmentReader, current: int) -> None:
        """Remove the files of segments before ``current`` that nobody needs."""
        needed = self.checkpointed | self.saving
        for segment, live in list(self._live.items()):
            if live == 0 and segment < current and segment not in needed:
                reader.forget(segment)
                segment_file(directory, segment).unlink(missing_ok=True)
                del self._live[segment]
