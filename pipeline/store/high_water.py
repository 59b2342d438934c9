"""Ids that a store has given out, in a small file beside it, so that a store that went back is noticed.

A store goes back when its ``-wal`` is lost, or an older copy is put in its place. ``replay.sqlite.ids`` then knows more
than the store: how many transactions were written, and up to which number ids may have been used. Ids are reserved in
blocks, synced before the first of a block is used, so that an id is never used again. The number of transactions is
written after each, without a sync: a power loss may leave it too small, never too large.

The file has two records, written in turn: a torn one leaves the other.
"""

from __future__ import annotations

import os
import struct
import zlib
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from pipeline.errors import DamagedFiles
from pipeline.runtime.rundir import sync

BLOCK = 4096
"""Ids that are reserved at once."""
_RECORD = struct.Struct("<8s16sQQQQ")
_CRC = struct.Struct("<I")
_SLOT_BYTES = 64
_MAGIC = b"AFIDS 1\n"


@dataclass(frozen=True, slots=True)
class Mark:
    """One record of the file."""

    store: bytes
    """16 random bytes that name the store."""
    transactions: int = 0
    groups: int = 0
    """Smaller group numbers may have been used; this and larger ones have not."""
    rows: int = 0
    """Likewise for ``row_id``."""
    sequence: int = 0
    """Number of this record in the file."""

    def pack(self) -> bytes:
        data = _RECORD.pack(_MAGIC, self.store, self.transactions, self.groups, self.rows, self.sequence)
        return (data + _CRC.pack(zlib.crc32(data))).ljust(_SLOT_BYTES, b"\0")

    @classmethod
    def unpack(cls, data: bytes) -> Mark | None:
        """None for anything that is not a whole record."""
        if len(data) < _RECORD.size + _CRC.size:
            return None
        magic, store, transactions, groups, rows, sequence = _RECORD.unpack_from(data)
        (crc,) = _CRC.unpack_from(data, _RECORD.size)
        if magic != _MAGIC or crc != zlib.crc32(data[: _RECORD.size]):
            return None
        return cls(store, transactions, groups, rows, sequence)


class HighWaterFile:
    """The file of one store. Used by the one process that writes the store, one thread at a time."""

    def __init__(self, path: Path) -> None:
        """Raises :class:`DamagedFiles` for a file that is not readable."""
        self.path = path
        new = not path.exists()
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        slots = [Mark.unpack(os.pread(self._fd, _SLOT_BYTES, at * _SLOT_BYTES)) for at in range(2)]
        found = [mark for mark in slots if mark is not None]
        self.mark: Mark | None = max(found, key=lambda mark: mark.sequence, default=None)
        """The newest record; None in a new file."""
        if self.mark is None and os.fstat(self._fd).st_size:
            os.close(self._fd)
            raise DamagedFiles(
                f"{path} is damaged: it says which ids the store beside it has used. Restore it from a copy; or remove "
                "it, if you are sure that the store is the newest one of the run"
            )
        if new:
            sync(path.parent)

    def set(self, mark: Mark) -> None:
        """Write a record that a power loss does not undo."""
        before = self.mark
        try:
            self._write(mark)
            os.fdatasync(self._fd)
        except OSError:  # it may not be on disk: nothing is reserved
            self.mark = before
            raise

    def reserve(self, groups: int, rows: int) -> None:
        """Smaller ids than these may be used when this returns."""
        mark = self.mark
        assert mark is not None
        if groups > mark.groups or rows > mark.rows:
            self.set(replace(mark, groups=_block(groups, mark.groups), rows=_block(rows, mark.rows)))

    def written(self, transactions: int) -> None:
        """The store has so many transactions. Does not wait for the disk, and does not fail."""
        assert self.mark is not None
        with suppress(OSError):
            self._write(replace(self.mark, transactions=transactions))

    def close(self) -> None:
        os.close(self._fd)

    def _write(self, mark: Mark) -> None:
        sequence = 0 if self.mark is None else self.mark.sequence + 1
        mark = replace(mark, sequence=sequence)
        os.pwrite(self._fd, mark.pack(), sequence % 2 * _SLOT_BYTES)
        self.mark = mark


def _block(wanted: int, reserved: int) -> int:
    return reserved if wanted <= reserved else -(-wanted // BLOCK) * BLOCK
