"""Traces: rollouts with the learner's values at their sampled tokens. Files are append-only, bounded in bytes, and
readable while they are written.

``NAME-00000003.traces`` is a file of records (:mod:`pipeline.schema.record_file`): the header is what a list shows,
with the ``update`` that trained the trajectory (-1: none); the parts, compressed, are the frames of
:mod:`pipeline.schema.codec`, and the arrays of :class:`SeenTokens` where a learner saw it. The oldest file goes when
there are more bytes than allowed. A record that a dying process wrote only in part ends a file; the next writer cuts it
off.

S: the sampled tokens of one trajectory, in order of turns.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import IntFlag
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from pipeline.errors import StoreError, WireError
from pipeline.runtime.disk import whole_or_nothing
from pipeline.schema import record_file as frames
from pipeline.schema.record_file import Buffer, Frames

FLOAT = np.dtype("<f2")
FloatArray = npt.NDArray[np.floating]


class Flag(IntFlag):
    """Treatment of a token by the loss."""

    SEEN = 1
    """A row of the update held it."""
    TRAINED = 2
    """The token counted in the loss. Unset: it was rejected by a mask, or because a value was not finite."""
    CLIPPED_LOW = 4
    CLIPPED_HIGH = 8
    MASKED = 16
    """Rejected by the second-moment mask, or by one of ``importance.masks``."""
    TRUNCATED = 32
    """The importance weight was cut at its maximum."""


@dataclass(frozen=True, slots=True)
class SeenTokens:
    """The learner's values as arrays ``[S]``; NaN if unknown.

    Stored as float16. log π is stored as its difference from log μ, so that the ratio keeps its three digits however
    unlikely the token was.
    """

    log_ratios: FloatArray
    """log π - log μ, nats, with π before the optimizer step; log π where log μ was not recorded."""
    entropies: FloatArray
    """Entropies of π, in nats."""
    advantages: FloatArray
    flags: npt.NDArray[np.uint8]
    """:class:`Flag` of each."""

    @classmethod
    def unknown(cls, n: int) -> SeenTokens:
        """``n`` tokens that no learner saw."""
        a, b, c = (np.full(n, np.nan, np.float32) for _ in range(3))
        return cls(a, b, c, np.zeros(n, np.uint8))

    def __len__(self) -> int:
        return len(self.flags)

    def pack(self) -> list[bytes]:
        """Log-ratios, entropies and advantages as float16, and one byte of flags a token."""
        floats = [_half(values) for values in (self.log_ratios, self.entropies, self.advantages)]
        return [*floats, np.ascontiguousarray(self.flags, np.uint8).tobytes()]

    @classmethod
    def unpack(cls, parts: Sequence[Buffer]) -> SeenTokens:
        """The inverse; floats come back as float32. Raises :class:`ValueError`."""
        *halves, flags = parts
        log_ratios, entropies, advantages = (np.frombuffer(half, FLOAT).astype(np.float32) for half in halves)
        if not len(log_ratios) == len(entropies) == len(advantages) == len(flags):
            raise ValueError(f"arrays of {[len(half) for half in halves]} bytes and flags of {len(flags)}")
        return cls(log_ratios, entropies, advantages, np.frombuffer(flags, np.uint8))


def _half(values: FloatArray) -> bytes:
    limit = float(np.finfo(np.float16).max)
    finite = np.clip(np.asarray(values, np.float32), -limit, limit)
    return np.where(np.isfinite(values), finite, np.float32(np.nan)).astype(FLOAT).tobytes()


KIND = frames.FileKind("traces", 2, "a file of traces", "delete it; only afterplay show reads it")
SUFFIX = ".traces"
FILES = 8
"""Files that the allowed bytes are divided among. The oldest is deleted as a whole."""
_NAME = re.compile(r"(.+)-(\d{8})\.traces")
_LEVEL = 1
"""zlib's quickest: token ids shrink to a third, and a learner waits for it."""
_TRAJECTORY_FRAMES = 4


@dataclass(frozen=True, slots=True)
class Trace:
    """One stored rollout."""

    frames: Frames
    """Payload frames of :mod:`pipeline.schema.codec`."""
    seen: SeenTokens | None
    """None: no learner trained it."""


@dataclass(frozen=True, slots=True)
class TraceEntry:
    """A trace in its file; :meth:`load` reads its tokens."""

    path: Path
    frame: frames.Frame
    update: int
    """-1: it was not trained."""
    trajectory_id: str

    @property
    def index(self) -> Mapping[str, Any]:
        """Facts for a list."""
        return self.frame.header

    @property
    def step(self) -> int | None:
        """As ``metrics.jsonl`` counts: update + 1."""
        return None if self.update < 0 else self.update + 1

    def load(self) -> Trace | None:
        """None when it has gone meanwhile (the oldest files make room). Raises :class:`StoreError` for damage."""
        try:
            with self.path.open("rb") as file:
                parts = self.frame.load(file.fileno())
            seen = parts[_TRAJECTORY_FRAMES:]
            return Trace(tuple(parts[:_TRAJECTORY_FRAMES]), SeenTokens.unpack(seen) if seen else None)
        except FileNotFoundError:
            return None
        except (WireError, ValueError) as error:
            raise StoreError(
                f"{self.path} is damaged at byte {self.frame.offset} ({error}): delete it; only afterplay show reads it"
            ) from error


class TraceWriter:
    """Appends traces under one name. Used by one thread at a time; nothing is synced: traces are for looking at.

    Opening it drops what is of updates from ``updates`` on (they will be made again) and a record that is not whole.
    Raises :class:`OSError` where the disk refuses. A trace that found the disk full is left out (:meth:`append` may be
    called again).
    """

    def __init__(self, directory: Path, name: str, bytes_max: int, updates: int | None = None) -> None:
        self._directory, self._name = directory, name
        self._file_bytes_max = max(1, bytes_max // FILES)
        directory.mkdir(parents=True, exist_ok=True)
        if updates is not None:
            _rewind(directory, name, updates)
        numbers = _numbers(directory, name)
        self._number = numbers[-1] if numbers else 0
        if numbers and not _is_current(_path(directory, name, self._number)):
            self._number += 1
        self._fd = self._open()
        self._size = os.fstat(self._fd).st_size

    def append(self, index: Mapping[str, Any], payload: Frames, seen: SeenTokens | None, update: int = -1) -> None:
        """Write one trace, whole or not at all. ``index`` holds JSON: ``trajectory_id`` and what a list shows."""
        if self._size > self._file_bytes_max:
            self._next()
        parts = [*payload, *(seen.pack() if seen is not None else ())]
        with whole_or_nothing(self._fd):
            self._size += frames.write(self._fd, frames.pack({**index, "update": update}, parts, level=_LEVEL))

    def close(self) -> None:
        os.close(self._fd)

    def _next(self) -> None:
        self._number += 1
        try:
            following = self._open()
        except OSError:
            self._number -= 1
            raise
        os.close(self._fd)
        self._fd = following
        self._size = os.fstat(self._fd).st_size
        for number in _numbers(self._directory, self._name)[:-FILES]:
            _path(self._directory, self._name, number).unlink(missing_ok=True)

    def _open(self) -> int:
        path = _path(self._directory, self._name, self._number)
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        try:
            if os.fstat(fd).st_size < len(KIND.magic):
                os.ftruncate(fd, 0)
                frames.write(fd, [KIND.magic])
            else:
                os.ftruncate(fd, _end(list(_scan(path))))
        except BaseException:
            os.close(fd)
            raise
        return fd


def trace_files(directory: Path) -> list[Path]:
    """Trace files of all names, oldest first."""
    return sorted(p for p in directory.glob(f"*{SUFFIX}") if _NAME.fullmatch(p.name)) if directory.is_dir() else []


def scan_traces(paths: Sequence[Path]) -> Iterator[TraceEntry]:
    """The traces of files, without their tokens, each file up to the first record that is not whole. A file that has
    gone, or is none of ours, is passed over. Raises :class:`StoreError` for one of another format."""
    for path in paths:
        yield from _scan(path)


def _scan(path: Path) -> Iterator[TraceEntry]:
    try:
        file = path.open("rb")
    except OSError:
        return
    with file:
        start = file.read(len(KIND.magic))
        if not KIND.recognises(start):
            return
        KIND.check(path, start)
        for frame in frames.scan(file.fileno(), len(start)):
            index = frame.header
            yield TraceEntry(path, frame, index["update"], str(index.get("trajectory_id", "")))


def _rewind(directory: Path, name: str, updates: int) -> None:
    """Drop records of updates from ``updates`` on: they are at the end."""
    for number in reversed(_numbers(directory, name)):
        path = _path(directory, name, number)
        if not _is_current(path):
            return
        entries = list(_scan(path))
        kept = [e for e in entries if e.update < updates]
        if len(kept) < len(entries):
            frames.truncate(path, _end(kept))
        if kept:
            return


def _is_current(path: Path) -> bool:
    """True if a writer can append to the file: it is of our format, or just being made."""
    with path.open("rb") as file:
        return KIND.magic.startswith(file.read(len(KIND.magic)))


def _end(entries: Sequence[TraceEntry]) -> int:
    """Byte after the last record."""
    return entries[-1].frame.end if entries else len(KIND.magic)


def _numbers(directory: Path, name: str) -> list[int]:
    found = (_NAME.fullmatch(p.name) for p in directory.glob(f"*{SUFFIX}"))
    return sorted(int(m.group(2)) for m in found if m and m.group(1) == name)


def _path(directory: Path, name: str, number: int) -> Path:
    return directory / f"{name}-{number:08d}{SUFFIX}"
