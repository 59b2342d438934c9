"""Archive of stored trajectories: one portable file, fully checksummed.

It is a file of records (:mod:`pipeline.schema.record_file`). The first says where it comes from (:class:`Header`). Each
of the next is a trajectory: its ``marks``, and as parts the payload frames of :mod:`pipeline.schema.codec`. The last
has the ``count`` of the trajectories, and as ``checksum`` the CRC-32 over the checksums of all records before it.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pipeline.errors import ConfigurationError, StoreError, WireError
from pipeline.schema import SCHEMA_VERSION
from pipeline.schema import record_file as frames
from pipeline.schema.codec import Limits
from pipeline.schema.record_file import Frames

KIND = frames.FileKind(
    "replay export", 2, "an export of Afterplay", "export it again with this Afterplay; nothing was imported"
)
_START_BYTES = 64
_LEVEL = 6
TOKEN_BYTES_MAX = 32
"""Bytes of a token: 8 for its id and log-probability, 12 for a span of its own, and the text of its message."""


@dataclass(frozen=True, slots=True)
class ArchivedTrajectory:
    """One trajectory of a file."""

    marks: Mapping[str, Any]
    """``entropy``, ``success_rate``, ``uses``, ``reward``, and ``origin``: the store it comes from."""
    frames: Frames


@dataclass(frozen=True, slots=True)
class Header:
    """Origin of a file."""

    run: str = ""
    model: str = ""
    """``model.source`` of the run: token ids mean nothing to another tokenizer."""
    origins: tuple[str, ...] = ()
    """Stores that the trajectories come from."""
    schema_version: int = SCHEMA_VERSION


def write_archive(path: Path, header: Header, records: Iterable[ArchivedTrajectory], *, replace: bool = False) -> int:
    """Write a file, complete or not at all; returns how many records it has.

    Raises :class:`ConfigurationError` where there is a file already (unless ``replace``), :class:`StoreError` where it
    cannot be written.
    """
    if path.exists() and not replace:
        raise ConfigurationError(f"expected no file at {path}, got one: give another name, or --force to replace it")
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        with part.open("xb") as file:
            file.write(KIND.magic)
            buffers = frames.pack(asdict(header))
            file.writelines(buffers)
            total, count = zlib.crc32(buffers[0][:4]), 0
            for record in records:
                buffers = frames.pack({"marks": dict(record.marks)}, record.frames, level=_LEVEL)
                file.writelines(buffers)
                total, count = zlib.crc32(buffers[0][:4], total), count + 1
            file.writelines(frames.pack({"count": count, "checksum": total}))
            file.flush()
            os.fsync(file.fileno())
        part.replace(path)
        return count
    except OSError as error:
        raise StoreError(f"{path} could not be written: {error}") from error
    finally:
        part.unlink(missing_ok=True)


def is_archive(path: Path) -> bool:
    """True if a file begins like an archive, of any format. Raises :class:`StoreError` when it cannot be read."""
    try:
        with path.open("rb") as file:
            return KIND.recognises(file.read(_START_BYTES))
    except OSError as error:
        raise StoreError(f"{path} cannot be read: {error.strerror}") from error


def read_archive(path: Path, limits: Limits) -> Iterator[ArchivedTrajectory]:
    """Every trajectory, each checked before it is yielded, and the whole at the end. One has at most
    ``limits.header_bytes_max`` and ``TOKEN_BYTES_MAX`` for each of ``limits.tokens_max``, compressed or not.

    Raises :class:`StoreError` that names the byte where a file is foreign, cut off, damaged or of another schema. Read
    it once to the end before anything is done with it.
    """
    at = len(KIND.magic)
    bytes_max = limits.header_bytes_max + TOKEN_BYTES_MAX * limits.tokens_max

    def wrong(what: str) -> StoreError:
        return StoreError(f"{path}, byte {at}: {what}. Nothing was imported; export it again")

    with path.open("rb") as file:
        KIND.check(path, file.read(_START_BYTES))
        fd = file.fileno()
        total, count, footer = 0, -1, None
        for frame in frames.scan(fd, at):
            try:
                header, parts = frame.header, frame.load(fd, bytes_max)
            except (WireError, ValueError, TypeError, LookupError) as error:
                raise wrong(f"the file is damaged: {error}") from error
            if count < 0:
                _check_schema(path, header)
            elif len(parts) == 4 and isinstance(header.get("marks"), dict):
                yield ArchivedTrajectory(header["marks"], tuple(parts))
            else:
                footer, at = header, frame.end
                break
            total, count, at = zlib.crc32(frame.checksum, total), count + 1, frame.end
        if footer is None:
            raise wrong("expected another record, got the end of the file or damage: it is cut off or damaged")
        if footer != {"count": count, "checksum": total}:
            raise wrong(f"expected {footer.get('count')} records with the checksum of the footer, got {count}")
        if at != os.fstat(fd).st_size:
            raise wrong("expected the end of the file after its footer, got more")


def _check_schema(path: Path, header: Mapping[str, Any]) -> None:
    version = header.get("schema_version")
    if version != SCHEMA_VERSION:
        raise StoreError(
            f"expected {path} with schema version {SCHEMA_VERSION}, got schema version {version!r}: {KIND.remedy}"
        )
