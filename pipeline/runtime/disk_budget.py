"""The bytes that a run directory may have, ``run.disk_bytes_max``: first what only people read makes room, then
admission pauses until there is room again."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from pipeline.runtime.disk_wait import size
from pipeline.runtime.rundir import RunDirectory

RESUME_SHARE = 0.95
"""Admission starts again when the directory is this much smaller than its budget."""
LOOK_SECONDS = 10.0
"""Interval at which the directory is measured."""


@dataclass(slots=True)
class DiskBudget:
    """Measures one run directory. Blocks for the file system; used by one thread at a time."""

    directory: RunDirectory
    bytes_max: int | None
    """None: no bound."""
    used: int = 0
    """Bytes at the last :meth:`look`."""
    exceeded: str = ""
    """The reason for which admission must pause; empty: none."""

    def look(self) -> None:
        """Measure; beyond the budget remove what may be removed."""
        self.used = bytes_below(self.directory.path)
        if self.bytes_max is None:
            return
        limit = int(self.bytes_max * (RESUME_SHARE if self.exceeded else 1.0))
        for path in expendable(self.directory):
            if self.used <= limit:
                break
            n_bytes = path.stat().st_size if path.exists() else 0
            path.unlink(missing_ok=True)
            self.used -= n_bytes
        self.exceeded = ""
        if self.used > limit:
            self.exceeded = (
                f"room below run.disk_bytes_max: {self.directory.path} has {size(self.used)} of "
                f"{size(self.bytes_max)}; raise it, or remove checkpoints or weights that you do not need"
            )


def expendable(directory: RunDirectory) -> Iterator[Path]:
    """Files that the run does without, in the order in which they go: older halves of logs, traces but for the newest
    file of each kind, batches of skipped steps."""
    yield from sorted(directory.logs.glob("*.log.1"))
    traces = sorted(directory.traces.glob("*.traces"))
    newest = {path.name.rpartition("-")[0]: path for path in traces}
    yield from (path for path in traces if path not in newest.values())
    yield from sorted(directory.skipped.glob("u*.batch"))


def bytes_below(folder: Path) -> int:
    """Bytes of all files in a folder; one with several hard links counts once."""
    seen: dict[tuple[int, int], int] = {}
    for root, _, names in os.walk(folder):
        for name in names:
            try:
                status = os.lstat(os.path.join(root, name))
            except OSError:
                continue
            seen[status.st_dev, status.st_ino] = status.st_size
    return sum(seen.values())
