"""Stored experience as one portable file: checksummed to the last byte, and never pickle.

A file is :data:`MAGIC`, then blocks: kind (``H``, ``R`` or ``F``), length (``<Q``), SHA-256 of the body, body.

=====  ============================================================================================================
``H``  JSON, first: ``format``, ``schema_version``, ``compression`` (``zlib`` or null), ``run``, ``model``, ``origins``
``R``  one trajectory: length (``<I``) and JSON of its marks, four lengths (``<4Q``), the payload frames of
       ``pipeline.codec``; compressed as the header says
``F``  JSON, last: ``count`` of the records, ``sha256`` of every byte before this block
=====  ============================================================================================================
"""

from __future__ import annotations

import hashlib
import os
import struct
import zlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import orjson

from pipeline.errors import ConfigurationError, StoreError
from pipeline.schema import SCHEMA_VERSION
from pipeline.transport.protocol import Frames

MAGIC = b"Afterplay replay export\r\n\x1a\n\0"
FORMAT = 1
RECORD_BYTES_MAX = 1 << 30
_BLOCK = struct.Struct("<cQ32s")
_FRAMES = struct.Struct("<4Q")


@dataclass(frozen=True, slots=True)
class ArchivedTrajectory:
    """One trajectory of a file."""

    marks: Mapping[str, Any]
    """``entropy``, ``success_rate``, ``uses``, ``reward``, and ``origin``: which store it comes from."""
    frames: Frames


@dataclass(frozen=True, slots=True)
class Header:
    """What a file says of itself."""

    run: str = ""
    model: str = ""
    """``model.source`` of the run: token ids mean nothing to another tokenizer."""
    compression: str | None = None
    origins: tuple[str, ...] = ()
    """Stores that the trajectories come from."""
    schema_version: int = SCHEMA_VERSION
    extra: Mapping[str, Any] = field(default_factory=dict)


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
            writer = _Writer(file)
            writer.raw(MAGIC)
            json = {
                "format": FORMAT,
                "schema_version": header.schema_version,
                "run": header.run,
                "model": header.model,
                "compression": header.compression,
                "origins": list(header.origins),
            }
            writer.block(b"H", orjson.dumps(json))
            count = 0
            for record in records:
                body = _pack(record)
                writer.block(b"R", zlib.compress(body, 6) if header.compression else body)
                count += 1
            writer.block(b"F", orjson.dumps({"count": count, "sha256": writer.sha256.hexdigest()}))
            file.flush()
            os.fsync(file.fileno())
        part.replace(path)
        return count
    except OSError as error:
        raise StoreError(f"{path} could not be written: {error}") from error
    finally:
        part.unlink(missing_ok=True)


def is_archive(path: Path) -> bool:
    """Whether a file begins like an export. Raises :class:`StoreError` when it cannot be read."""
    try:
        with path.open("rb") as file:
            return file.read(len(MAGIC)) == MAGIC
    except OSError as error:
        raise StoreError(f"{path} cannot be read: {error.strerror}") from error


def read_archive(path: Path) -> Iterator[ArchivedTrajectory]:
    """Every record, each checked before it is given out, and the whole at the end.

    Raises :class:`StoreError` that names the byte where a file is foreign, cut off, damaged or of another schema. Read
    it once to the end before anything is done with it.
    """
    with path.open("rb") as file:
        reader = _Reader(path, file)
        header = reader.header()
        count = 0
        while True:
            total = reader.sha256.hexdigest()
            kind, body = reader.block()
            if kind == b"F":
                break
            if kind != b"R":
                raise reader.wrong(f"expected a record, got block {kind!r}")
            count += 1
            yield reader.unpack(body, header.compression)
        footer = reader.json(body)
        if footer.get("count") != count or footer.get("sha256") != total:
            raise reader.wrong(f"expected {footer.get('count')} records with the checksum of the footer, got {count}")
        if file.read(1):
            raise reader.wrong("expected the end of the file after its footer, got more")


def _pack(record: ArchivedTrajectory) -> bytes:
    marks = orjson.dumps(dict(record.marks))
    lengths = [memoryview(frame).nbytes for frame in record.frames]
    return b"".join((struct.pack("<I", len(marks)), marks, _FRAMES.pack(*lengths), *record.frames))


class _Writer:
    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self.sha256 = hashlib.sha256()

    def raw(self, data: bytes) -> None:
        self._file.write(data)
        self.sha256.update(data)

    def block(self, kind: bytes, body: bytes) -> None:
        self.raw(_BLOCK.pack(kind, len(body), hashlib.sha256(body).digest()))
        self.raw(body)


class _Reader:
    def __init__(self, path: Path, file: IO[bytes]) -> None:
        self._path, self._file = path, file
        self._at = 0
        self.sha256 = hashlib.sha256()

    def header(self) -> Header:
        if self._file.read(len(MAGIC)) != MAGIC:
            raise StoreError(
                f"expected {self._path} to be an export of Afterplay (or a .jsonl file), got something else"
            )
        self._at = len(MAGIC)
        self.sha256.update(MAGIC)
        kind, body = self.block()
        value = self.json(body) if kind == b"H" else {}
        known = value.get("format") == FORMAT and value.get("schema_version") == SCHEMA_VERSION
        if not known or value.get("compression") not in (None, "zlib"):
            raise StoreError(
                f"expected {self._path} with format {FORMAT} and schema version {SCHEMA_VERSION}, got format "
                f"{value.get('format')!r}, schema version {value.get('schema_version')!r} and compression "
                f"{value.get('compression')!r}: export it again with this Afterplay"
            )
        origins = tuple(str(o) for o in value.get("origins") or ())
        return Header(str(value.get("run", "")), str(value.get("model", "")), value["compression"], origins)

    def block(self) -> tuple[bytes, bytes]:
        head = self._file.read(_BLOCK.size)
        if len(head) < _BLOCK.size:
            raise self.wrong("expected another block, got the end of the file: it is cut off")
        kind, length, digest = _BLOCK.unpack(head)
        if length > RECORD_BYTES_MAX:
            raise self.wrong(f"expected a block of at most {RECORD_BYTES_MAX} bytes, got one of {length}")
        body = self._file.read(length)
        if len(body) < length:
            raise self.wrong(f"expected a block of {length} bytes, got {len(body)}: the file is cut off")
        if hashlib.sha256(body).digest() != digest:
            raise self.wrong("expected the checksum of the block, got another: the file is damaged")
        self.sha256.update(head)
        self.sha256.update(body)
        self._at += len(head) + length
        return kind, body

    def unpack(self, body: bytes, compression: str | None) -> ArchivedTrajectory:
        try:
            if compression:
                inflate = zlib.decompressobj()
                body = inflate.decompress(body, RECORD_BYTES_MAX)
                if not inflate.eof:
                    raise ValueError("the compressed record is larger than allowed, or not whole")
            (n_marks,) = struct.unpack_from("<I", body)
            marks = orjson.loads(body[4 : 4 + n_marks])
            at = 4 + n_marks
            lengths = _FRAMES.unpack_from(body, at)
            at += _FRAMES.size
            if not isinstance(marks, dict) or at + sum(lengths) != len(body):
                raise ValueError("lengths do not add up")
            frames = []
            for length in lengths:
                frames.append(body[at : at + length])
                at += length
            return ArchivedTrajectory(marks, tuple(frames))
        except (struct.error, zlib.error, ValueError) as error:
            raise self.wrong(f"the record is not understood: {error}") from error

    def json(self, body: bytes) -> dict[str, Any]:
        try:
            value = orjson.loads(body)
        except orjson.JSONDecodeError:
            value = None
        if not isinstance(value, dict):
            raise self.wrong("expected a JSON object")
        return value

    def wrong(self, what: str) -> StoreError:
        return StoreError(f"{self._path}, byte {self._at}: {what}. Nothing was imported; export it again")
