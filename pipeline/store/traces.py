"""Files of traces: append-only, bounded in bytes, readable while they are written.

``NAME-00000003.traces`` is :data:`MAGIC`, then records. The oldest file goes when there are more bytes than allowed. A
record is

======  =====  ===================================================================
magic       4  ``APTR``
crc         4  CRC-32 of what follows of the record, body excepted
crc         4  CRC-32 of the body
index       4  bytes
body        4  bytes
update      8  update that trained the trajectory; -1: none
======  =====  ===================================================================

then the index (JSON: what a list shows) and the body (zlib): the frames of :mod:`pipeline.transport.codec`, and the
arrays of :class:`SeenTokens` where a learner saw it; their lengths are in the index. Little-endian. A record that a
dying process left half written ends a file; the next writer cuts it off.

What the learner saw at the sampled tokens of one trajectory. S: its sampled tokens, in order of turns.
"""

from __future__ import annotations

import os
import re
import struct
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import IntFlag
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import orjson

from pipeline.errors import StoreError
from pipeline.transport.protocol import Frames

FLOAT = np.dtype("<f2")
FloatArray = npt.NDArray[np.floating]


class Flag(IntFlag):
    """What the loss did with a token."""

    SEEN = 1
    """A row of the update held it."""
    TRAINED = 2
    """It counted in the loss; unset: rejected as not finite, or by a mask."""
    CLIPPED_LOW = 4
    CLIPPED_HIGH = 8
    MASKED = 16
    """Rejected by the second-moment mask, or by one of ``importance.masks``."""
    TRUNCATED = 32
    """The importance weight was cut at its maximum."""


@dataclass(frozen=True, slots=True)
class SeenTokens:
    """Arrays ``[S]``; NaN where nothing is known.

    Stored as float16. log π is stored as its difference from log μ, so that the ratio keeps its three digits however
    unlikely the token was.
    """

    log_ratios: FloatArray
    """log π - log μ, nats, with π before the optimizer step; log π where log μ was not recorded."""
    entropies: FloatArray
    """Of π, nats."""
    advantages: FloatArray
    flags: npt.NDArray[np.uint8]
    """:class:`Flag` of each."""

    @classmethod
    def unknown(cls, n: int) -> SeenTokens:
        """Of ``n`` tokens that nobody saw."""
        a, b, c = (np.full(n, np.nan, np.float32) for _ in range(3))
        return cls(a, b, c, np.zeros(n, np.uint8))

    def __len__(self) -> int:
        return len(self.flags)

    def pack(self) -> dict[str, bytes]:
        """Bytes by name: float16, and one byte of flags."""
        return {
            "log_ratios": _half(self.log_ratios),
            "entropies": _half(self.entropies),
            "advantages": _half(self.advantages),
            "flags": np.ascontiguousarray(self.flags, np.uint8).tobytes(),
        }

    @classmethod
    def unpack(cls, parts: Mapping[str, bytes]) -> SeenTokens:
        """The inverse; floats come back as float32. Raises KeyError or ValueError."""
        halves = [np.frombuffer(parts[name], FLOAT).astype(np.float32) for name in
                  ("log_ratios", "entropies", "advantages")]  # fmt: skip
        flags = np.frombuffer(parts["flags"], np.uint8)
        if {len(half) for half in halves} != {len(flags)}:
            raise ValueError(f"arrays of {[len(half) for half in halves]} tokens and flags of {len(flags)}")
        return cls(halves[0], halves[1], halves[2], flags)


def _half(values: FloatArray) -> bytes:
    limit = float(np.finfo(np.float16).max)
    finite = np.clip(np.asarray(values, np.float32), -limit, limit)
    return np.where(np.isfinite(values), finite, np.float32(np.nan)).astype(FLOAT).tobytes()


MAGIC = b"Afterplay traces 1\n\0"
SUFFIX = ".traces"
FILES = 8
"""Files that the allowed bytes are divided among: so much is lost at once when the oldest goes."""
INDEX_BYTES_MAX = 1 << 20
BODY_BYTES_MAX = 1 << 30
_HEADER = struct.Struct("<4sIIIIq")
_RECORD = b"APTR"
_NAME = re.compile(r"(.+)-(\d{8})\.traces")
_LEVEL = 1
"""zlib's quickest: token ids shrink to a third, and a learner waits for it."""


@dataclass(frozen=True, slots=True)
class Trace:
    """One rollout as it was kept."""

    frames: Frames
    """Payload frames of :mod:`pipeline.transport.codec`."""
    seen: SeenTokens | None
    """None: no learner trained it."""


@dataclass(frozen=True, slots=True)
class TraceEntry:
    """Where a trace lies, and what its index says; the body is read by :meth:`load`."""

    path: Path
    offset: int
    """Of the body."""
    n_bytes: int
    crc: int
    update: int
    """-1: it was not trained."""
    trajectory_id: str
    raw: bytes
    """The index as it is stored: some 200 bytes, a fifth of what it takes as a dictionary."""

    @property
    def index(self) -> Mapping[str, Any]:
        """What a list shows."""
        found: dict[str, Any] = orjson.loads(self.raw)
        return found

    @property
    def step(self) -> int | None:
        """As ``metrics.jsonl`` counts: update + 1."""
        return None if self.update < 0 else self.update + 1

    def load(self) -> Trace | None:
        """None when it has gone meanwhile (the oldest files make room). Raises :class:`StoreError` for damage."""
        try:
            with self.path.open("rb") as file:
                file.seek(self.offset)
                body = file.read(self.n_bytes)
        except FileNotFoundError:
            return None
        if zlib.crc32(body) != self.crc:
            raise StoreError(f"{self.path} is damaged at byte {self.offset}: delete it, it is only there to look at")
        return _unpack(body, self.index, self.path)


class TraceWriter:
    """Appends traces under one name. Used by one thread at a time; nothing is synced: traces are for looking at.

    Opening it drops what is of updates from ``updates`` on (they will be made again) and a record that is not whole.
    Raises :class:`OSError` where the disk refuses.
    """

    def __init__(self, directory: Path, name: str, bytes_max: int, updates: int | None = None) -> None:
        self._directory, self._name = directory, name
        self._file_bytes_max = max(1, bytes_max // FILES)
        directory.mkdir(parents=True, exist_ok=True)
        if updates is not None:
            _rewind(directory, name, updates)
        numbers = _numbers(directory, name)
        self._number = numbers[-1] if numbers else 0
        self._fd = self._open()
        self._size = os.fstat(self._fd).st_size

    def append(self, index: Mapping[str, Any], frames: Frames, seen: SeenTokens | None, update: int = -1) -> None:
        """Write one trace whole. ``index`` holds JSON: ``trajectory_id`` and what a list shows."""
        if self._size > self._file_bytes_max:
            self._next()
        record = pack_record(index, frames, seen, update)
        written = 0
        while written < len(record):
            written += os.write(self._fd, record[written:])
        self._size += len(record)

    def close(self) -> None:
        os.close(self._fd)

    def _next(self) -> None:
        os.close(self._fd)
        self._number += 1
        self._fd = self._open()
        self._size = os.fstat(self._fd).st_size
        for number in _numbers(self._directory, self._name)[:-FILES]:
            _path(self._directory, self._name, number).unlink(missing_ok=True)

    def _open(self) -> int:
        path = _path(self._directory, self._name, self._number)
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        if os.fstat(fd).st_size < len(MAGIC):
            os.ftruncate(fd, 0)
            os.write(fd, MAGIC)
        else:
            os.ftruncate(fd, _end(path))
        return fd


def pack_record(index: Mapping[str, Any], frames: Frames, seen: SeenTokens | None, update: int) -> bytes:
    """Bytes of one record."""
    arrays = {} if seen is None else seen.pack()
    parts = [*(bytes(frame) for frame in frames), *arrays.values()]
    body = zlib.compress(b"".join(parts), _LEVEL)
    lengths = {"frames": [len(part) for part in parts[: len(frames)]], "arrays": {k: len(v) for k, v in arrays.items()}}
    json = orjson.dumps({**index, **lengths})
    header = _HEADER.pack(_RECORD, 0, zlib.crc32(body), len(json), len(body), update)
    return struct.pack("<4sI", _RECORD, zlib.crc32(json, zlib.crc32(header[8:]))) + header[8:] + json + body


def trace_files(directory: Path) -> list[Path]:
    """Of every name, oldest first."""
    return sorted(p for p in directory.glob(f"*{SUFFIX}") if _NAME.fullmatch(p.name)) if directory.is_dir() else []


def scan_traces(paths: Sequence[Path]) -> Iterator[TraceEntry]:
    """What files hold, without bodies, each file up to the first record that is not whole. A file that has gone, or is
    none of ours, is passed over."""
    for path in paths:
        yield from _scan(path)


def _scan(path: Path) -> Iterator[TraceEntry]:
    try:
        file = path.open("rb")
    except OSError:
        return
    with file:
        if file.read(len(MAGIC)) != MAGIC:
            return
        size, at = os.fstat(file.fileno()).st_size, len(MAGIC)
        while True:
            file.seek(at)
            header = file.read(_HEADER.size)
            if len(header) < _HEADER.size:
                return
            magic, crc, body_crc, n_index, n_body, update = _HEADER.unpack(header)
            offset = at + _HEADER.size + n_index
            if magic != _RECORD or n_index > INDEX_BYTES_MAX or offset + n_body > size:
                return
            json = file.read(n_index)
            if zlib.crc32(json, zlib.crc32(header[8:])) != crc:
                return
            name = str(orjson.loads(json).get("trajectory_id", ""))
            yield TraceEntry(path, offset, n_body, body_crc, update, name, json)
            at = offset + n_body


def _unpack(body: bytes, index: Mapping[str, Any], path: Path) -> Trace:
    try:
        inflate = zlib.decompressobj()
        raw = inflate.decompress(body, BODY_BYTES_MAX)
        if not inflate.eof:
            raise ValueError("it is larger than allowed, or not whole")
        frames, at = [], 0
        for length in index["frames"]:
            frames.append(raw[at : at + length])
            at += length
        arrays = {}
        for name, length in index["arrays"].items():
            arrays[name] = raw[at : at + length]
            at += length
        if at != len(raw):
            raise ValueError("lengths do not add up")
        return Trace(tuple(frames), SeenTokens.unpack(arrays) if arrays else None)
    except (KeyError, TypeError, ValueError, AttributeError, zlib.error) as error:
        raise StoreError(f"a trace in {path} is not understood: {error}. Delete the file") from error


def _rewind(directory: Path, name: str, updates: int) -> None:
    """Drop records of updates from ``updates`` on: they are at the end."""
    for number in reversed(_numbers(directory, name)):
        path = _path(directory, name, number)
        entries = list(_scan(path))
        kept = [e for e in entries if e.update < updates]
        if len(kept) < len(entries):
            os.truncate(path, kept[-1].offset + kept[-1].n_bytes if kept else len(MAGIC))
        if kept:
            return


def _end(path: Path) -> int:
    """Where the last whole record ends."""
    end = len(MAGIC)
    for entry in _scan(path):
        end = entry.offset + entry.n_bytes
    return end


def _numbers(directory: Path, name: str) -> list[int]:
    found = (_NAME.fullmatch(p.name) for p in directory.glob(f"*{SUFFIX}"))
    return sorted(int(m.group(2)) for m in found if m and m.group(1) == name)


def _path(directory: Path, name: str, number: int) -> Path:
    return directory / f"{name}-{number:08d}{SUFFIX}"
