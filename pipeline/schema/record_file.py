"""Records of a JSON header and raw bytes, checksummed; and files that are a sequence of such records. Never pickle.

A record is, little-endian:

======  =====  ======================================================================
crc         4  CRC-32 of everything up to the body
json        4  bytes of the JSON
body        8  bytes of the body
crc         4  CRC-32 of the body
json           ``[header, lengths of the parts, whether the body is compressed]``
body           the parts, one after the other; compressed with zlib if marked in the JSON
======  =====  ======================================================================

A file begins with a line of its kind and format (``Afterplay traces 2``); records follow. :func:`scan` gives the whole
records up to the first that is cut off or damaged, so a record that a dying process left half written is dropped by
:func:`truncate` at the end of the last whole one.
"""

from __future__ import annotations

import os
import re
import struct
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import orjson

from pipeline.errors import FormatMismatch, StoreError, WireError

Buffer = bytes | memoryview

INFLATED_BYTES_MAX = 1 << 30
"""Largest size of a body after decompression."""

_LEVELS_MAX = 254
"""Nesting of JSON that orjson can write."""

_LENGTHS = struct.Struct("<IQI")

_PREFIX_BYTES = 4 + _LENGTHS.size

_READ_BYTES = 512
"""Read at once: most headers are shorter."""

_VECTORS_MAX = 512

_MAGIC = re.compile(rb"Afterplay ([a-z ]+?)(?: (\d+))?\r?\n")


class Frame(NamedTuple):
    """A record whose header is whole; its body is not read yet."""

    json: bytes
    checksum: bytes
    """Checksum of the record: it covers the header and the checksum of the body."""
    offset: int
    """Offset of the body in the file."""
    n_bytes: int
    """Bytes of the body."""
    crc: int
    """Checksum of the body."""

    @property
    def end(self) -> int:
        """Byte after the record."""
        return self.offset + self.n_bytes

    @property
    def header(self) -> dict[str, Any]:
        found: dict[str, Any] = orjson.loads(self.json)[0]
        return found

    def load(self, fd: int, bytes_max: int | None = None) -> list[memoryview]:
        """The parts, read from the file. Raises :class:`WireError` for damage, and for more than ``bytes_max``."""
        if bytes_max is not None and self.n_bytes > bytes_max:
            raise WireError(f"expected a record of at most {bytes_max} bytes, got {self.n_bytes}")
        return self.parts(os.pread(fd, self.n_bytes, self.offset), bytes_max)

    def parts(self, body: Buffer, bytes_max: int | None = None) -> list[memoryview]:
        """The parts, as views on ``body`` unless that is compressed; then they may have ``bytes_max``
        (:data:`INFLATED_BYTES_MAX`). Raises :class:`WireError` for damage."""
        if n_bytes(body) != self.n_bytes or zlib.crc32(body) != self.crc:
            raise WireError(f"expected {self.n_bytes} bytes with the checksum of their header, got others")
        _, lengths, compressed = orjson.loads(self.json)
        if compressed:
            body = _inflated(body, sum(lengths), INFLATED_BYTES_MAX if bytes_max is None else bytes_max)
        view, parts, at = memoryview(body), [], 0
        for length in lengths:
            parts.append(view[at : at + length])
            at += length
        if at != len(view):
            raise WireError(f"expected parts of {at} bytes, got {len(view)}")
        return parts


def pack(header: Mapping[str, Any], parts: Sequence[Buffer] = (), *, level: int | None = None) -> list[Buffer]:
    """The bytes of a record: prefix and header, then the body without a copy. ``level``: compress with zlib."""
    lengths = [n_bytes(part) for part in parts]
    json = orjson.dumps((header, lengths, level is not None), option=orjson.OPT_SERIALIZE_NUMPY)
    body = parts if level is None else (zlib.compress(b"".join(parts), level),)
    crc = 0
    for part in body:
        crc = zlib.crc32(part, crc)
    rest = _LENGTHS.pack(len(json), sum(lengths) if level is None else len(body[0]), crc) + json
    return [zlib.crc32(rest).to_bytes(4, "little") + rest, *body]


def body_crc(head: Buffer) -> int:
    """CRC-32 of the body, from the first buffer that :func:`pack` gives."""
    return int(_LENGTHS.unpack_from(head, 4)[2])


def unpack(data: Buffer | bytearray) -> tuple[dict[str, Any], list[memoryview]]:
    """Header and parts of the one record that ``data`` is; the parts are views unless they were compressed.

    Raises :class:`WireError` for anything else.
    """
    view = memoryview(data)
    frame = _frame_at(lambda length, at: view[at : at + length], 0, len(view))
    if frame is None or frame.end != len(view):
        raise WireError("expected one whole record, got truncated, damaged or foreign bytes")
    return frame.header, frame.parts(view[frame.offset :])


def scan(fd: int, at: int, *, bodies: bool = False) -> Iterator[Frame]:
    """Records of a file from byte ``at`` on, up to the first that is not whole. ``bodies``: check those too."""
    size = os.fstat(fd).st_size
    while (frame := _frame_at(lambda length, at: os.pread(fd, length, at), at, size)) is not None:
        if bodies and zlib.crc32(os.pread(fd, frame.n_bytes, frame.offset)) != frame.crc:
            return
        yield frame
        at = frame.end


def write(fd: int, buffers: Sequence[Buffer]) -> int:
    """Write all buffers, in order; how many bytes they have."""
    size = 0
    for at in range(0, len(buffers), _VECTORS_MAX):
        rest = [memoryview(b) for b in buffers[at : at + _VECTORS_MAX]]
        while rest:
            written = os.writev(fd, rest)
            size += written
            while rest and written >= rest[0].nbytes:
                written -= rest.pop(0).nbytes
            if rest and written:
                rest[0] = rest[0][written:]
    return size


def truncate(path: Path, size: int) -> None:
    """Cut a file off, durably."""
    fd = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
    try:
        os.ftruncate(fd, size)
        os.fsync(fd)
    finally:
        os.close(fd)


@dataclass(frozen=True, slots=True)
class FileKind:
    """A kind of file, known by its first line."""

    name: str
    """In the first line."""
    version: int
    noun: str
    """In messages, with its article."""
    remedy: str
    """Advice for a file of another format, to end a sentence."""

    @property
    def magic(self) -> bytes:
        """The first line of a file."""
        return f"Afterplay {self.name} {self.version}\n".encode()

    def recognises(self, start: bytes) -> bool:
        """True if a file that begins so is of this kind, in whatever format."""
        return self._version(start) is not None

    def check(self, path: Path, start: bytes) -> None:
        """Raise :class:`StoreError` unless a file that begins so is of this kind and format."""
        if not start.startswith(self.magic):
            version = self._version(start)
            came = "something else" if version is None else f"format {version}"
            kind = StoreError if version is None else FormatMismatch
            raise kind(f"expected {path} to be {self.noun} (format {self.version}), got {came}: {self.remedy}")

    def _version(self, start: bytes) -> int | None:
        found = _MAGIC.match(start)
        return int(found[2] or 1) if found and found[1].decode() == self.name else None


def n_bytes(buffer: Buffer) -> int:
    return len(buffer) if isinstance(buffer, bytes) else buffer.nbytes


def array_bytes(array: np.ndarray[Any, Any]) -> memoryview:
    """The bytes of an array, without a copy if it is contiguous."""
    if not array.size:
        return memoryview(b"")  # a view with a zero in its shape cannot be cast
    return np.ascontiguousarray(array).data.cast("B")


def json_object(data: Buffer, what: str) -> dict[str, Any]:
    """Raises :class:`WireError` that calls ``data`` ``what``."""
    try:
        value = orjson.loads(data)
    except orjson.JSONDecodeError as error:
        raise WireError(f"{what} is not JSON: {error}") from error
    if n_bytes(data) > 2 * _LEVELS_MAX:  # each level takes two bytes
        require_writable(value, what)
    if not isinstance(value, dict):
        raise WireError(f"expected {what} to be a JSON object, got {type(value).__name__}")
    return value


def require_writable(value: Any, what: str) -> None:
    """Raises :class:`WireError` that calls ``value``, read from JSON, ``what``.

    Parsers read a thousand levels of nesting, and integers of any size, that orjson does not write. What it cannot
    write can neither be stored nor answered, and Python's ``repr``, which messages show it with, ends near a thousand
    levels.
    """
    try:
        orjson.dumps(value)
    except orjson.JSONEncodeError as error:
        raise WireError(
            f"expected {what} of at most {_LEVELS_MAX} levels of nesting and integers of 64 bits, got more"
        ) from error


def _frame_at(read: Callable[[int, int], Buffer], at: int, size: int) -> Frame | None:
    """The record at byte ``at`` of ``size``; None where it is cut off, or its header damaged."""
    start = read(_READ_BYTES, at)
    if len(start) < _PREFIX_BYTES:
        return None
    n_json, n_body, crc = _LENGTHS.unpack_from(start, 4)
    head_bytes = _PREFIX_BYTES + n_json
    if at + head_bytes + n_body > size:
        return None
    head = (start if head_bytes <= len(start) else read(head_bytes, at))[:head_bytes]
    checksum = bytes(head[:4])
    if zlib.crc32(head[4:]).to_bytes(4, "little") != checksum:
        return None
    return Frame(bytes(head[_PREFIX_BYTES:]), checksum, at + head_bytes, n_body, crc)


def _inflated(body: Buffer, length: int, bytes_max: int) -> bytes:
    if length > bytes_max:
        raise WireError(f"expected at most {bytes_max} bytes once decompressed, got {length}")
    try:
        inflate = zlib.decompressobj()
        found = inflate.decompress(body, length + 1)
    except zlib.error as error:
        raise WireError(f"expected bytes that zlib compressed: {error}") from error
    return found


Frames = tuple[bytes | memoryview, ...]
