"""Digests of the pages of an SQLite database in WAL mode, in the file ``PATH.pages`` beside it.

SQLite notices flipped bits in its log, not in its pages: a value in a row changes without a trace. The file has the
CRC-32 of each page, in order; 0 for one that is not covered. Pages of which payloads overflow to are not: the payloads
have checksums of their own, and are most of the bytes. About 20 µs of CPU for a trajectory of 25 kB.

The digests of a transaction are written after its commit, from the frames of the log, and are durable before the log is
copied into the database. A kill in between does no harm: pages in the log are compared with nothing.
"""

from __future__ import annotations

import os
import sqlite3
import struct
import time
import zlib
from array import array
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from pipeline.store.sqlite import PAGE_BYTES

CHECKPOINT_FRAMES = 2000
"""Frames in the log, after which it is copied into the database."""
_LOG_HEADER = 32
_FRAME = struct.Struct(">II8s8x")
_FRAME_BYTES = _FRAME.size + PAGE_BYTES
_DIGEST = struct.Struct("=I")


class PageDigests:
    """Used by the one process that writes the database, one thread at a time. The connection that writes must not copy
    the log by itself (``wal_autocheckpoint``)."""

    def __init__(self, database: Path) -> None:
        self.path = database.with_name(database.name + ".pages")
        self._database = database
        self._log = database.with_name(database.name + "-wal")
        self._fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        self.known = os.fstat(self._fd).st_size > 0
        """False for a database that has no digests yet."""
        self._salt = b""
        self._frames = 0
        """Frames of the log whose digests were taken."""
        self._tried = 0
        """Frames that the log had when it was last copied."""
        self._unwritten: dict[int, int] = {}
        """Digests that found no room."""
        self.uncertain = False
        """A transaction failed, so the log may end with pages that nobody knows."""

    def open(self, writer: sqlite3.Connection) -> None:
        """Copy what an earlier process left in the log, and take its digests."""
        _, frames, _ = writer.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchone()
        self._note(int(frames))
        os.fdatasync(self._fd)  # the next transaction may overwrite the log

    def build(self) -> None:
        """Take the digests of a database as it is."""
        with self._database.open("rb") as file:
            pages = iter(lambda: file.read(PAGE_BYTES), b"")
            digests = array("I", (_digest(page) for page in pages))
        os.ftruncate(self._fd, 0)
        os.pwrite(self._fd, digests.tobytes(), 0)
        self._unwritten |= self._in_log(self._frames)
        self._write()
        os.fdatasync(self._fd)
        self.known = True

    def find_damage(self, seconds_max: float) -> str:
        """The first page of the database that is not the one that was written, in words; empty where none is. Blocks
        while it reads, about 1 GB a second."""
        deadline = time.monotonic() + seconds_max
        size = os.fstat(self._fd).st_size
        digests, in_log = os.pread(self._fd, size, 0), self._in_log(self._frames)
        if size % _DIGEST.size:
            return f"{self.path.name} is cut off"
        with self._database.open("rb") as file:
            for number, (digest,) in enumerate(_DIGEST.iter_unpack(digests), 1):
                page = file.read(PAGE_BYTES)
                if not page or time.monotonic() > deadline:
                    break
                if number not in in_log and digest != _digest(page):
                    return f"page {number} is not the one that was written"
        return ""

    def committed(self, writer: sqlite3.Connection) -> None:
        """Take the digests of the transaction that was committed, and copy a long log into the database. Never fails:
        without room for the digests the log stays as it is."""
        with suppress(OSError):
            self._note()
            if self._frames - self._tried >= CHECKPOINT_FRAMES:
                os.fdatasync(self._fd)
                self._tried = self._frames
                with suppress(sqlite3.Error):  # a full disk: at the next one
                    writer.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchone()

    def close(self) -> None:
        """Before the connection that writes, which then copies the log. Without room, and after a transaction that
        failed, the digests are given up: the next process takes new ones."""
        try:
            if not self.uncertain:
                self._write()
                os.fdatasync(self._fd)
        except OSError:
            self.uncertain = True
        if self.uncertain:
            self.path.unlink(missing_ok=True)
        os.close(self._fd)

    def _note(self, until: int | None = None) -> None:
        """Take the digests of new frames: those up to ``until``, or to the next end of a transaction."""
        try:
            log = os.open(self._log, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            return
        try:
            salt = os.pread(log, 8, 16)
            if salt != self._salt:
                self._salt, self._frames, self._tried = salt, 0, 0
            found: dict[int, int] = {}
            frames = self._frames
            for page, size, digest in self._read(log, frames):
                if frames == until:
                    break
                frames += 1
                found[page] = digest
                if (size and until is None) or frames == until:
                    self._unwritten |= found
                    self._frames = frames
                    break
        finally:
            os.close(log)
        self._write()

    def _in_log(self, frames: int) -> dict[int, int]:
        """Digests of the pages in the first frames of the log."""
        if not frames:
            return {}
        log = os.open(self._log, os.O_RDONLY | os.O_CLOEXEC)
        try:
            return {page: digest for _, (page, _, digest) in zip(range(frames), self._read(log, 0), strict=False)}
        finally:
            os.close(log)

    def _read(self, log: int, frame: int) -> Iterator[tuple[int, int, int]]:
        """Page number, size of the database after a commit (else 0) and digest of each frame of this log. Pages that
        are not covered are not read."""
        at = _LOG_HEADER + frame * _FRAME_BYTES
        while len(head := os.pread(log, _FRAME.size + 1, at)) > _FRAME.size:
            page, size, salt = _FRAME.unpack_from(head)
            if salt != self._salt:
                return
            digest = _digest(os.pread(log, PAGE_BYTES, at + _FRAME.size)) if head[-1] else 0
            yield page, size, digest
            at += _FRAME_BYTES

    def _write(self) -> None:
        """Neighbours at once: most new pages are."""
        unwritten = self._unwritten
        pages = sorted(unwritten)
        first = 0
        for end in range(1, len(pages) + 1):
            if end == len(pages) or pages[end] != pages[end - 1] + 1:
                run = pages[first:end]
                data = array("I", map(unwritten.__getitem__, run)).tobytes()
                os.pwrite(self._fd, data, (run[0] - 1) * _DIGEST.size)
                first = end
        unwritten.clear()


def _digest(page: bytes) -> int:
    """0 for a page of overflow or of the free list, which begins with the number of another page."""
    return zlib.crc32(page) if page[0] else 0
