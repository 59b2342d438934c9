"""Damages files as disks and people do."""

from __future__ import annotations

import shutil
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path

BLOCK = 4096
_HEADER = b"SQLite format 3\0"


@dataclass(frozen=True, slots=True)
class Damage:
    name: str
    apply: Callable[[Path], None]


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def empty(path: Path) -> None:
    path.write_bytes(b"")


def halve(path: Path) -> None:
    data = path.read_bytes()
    path.write_bytes(data[: len(data) // 2])


def zero(path: Path) -> None:
    path.write_bytes(bytes(path.stat().st_size))


def zero_block(path: Path) -> None:
    """Zero the block in the middle."""
    data = path.read_bytes()
    at = len(data) // 2 // BLOCK * BLOCK
    path.write_bytes(data[:at] + bytes(min(BLOCK, len(data) - at)) + data[at + BLOCK :])


def flip(path: Path, at: int | None = None) -> None:
    """Change one bit, by default in the middle."""
    data = bytearray(path.read_bytes())
    if data:
        data[len(data) // 2 if at is None else at] ^= 4
    path.write_bytes(data)


def remove(path: Path) -> None:
    path.unlink()


def replace(older: Path, path: Path) -> None:
    shutil.copyfile(older, path)


DAMAGES: dict[str, Callable[[Path], None]] = {f.__name__: f for f in (truncate, zero, flip, remove)}


def damages_of(path: Path, older: Path | None) -> Iterator[Damage]:
    """Every damage of a file; of a database also one flipped bit in each of its parts."""
    for name, apply in (
        ("truncated to nothing", empty), ("truncated in the middle", halve), ("zeroed block", zero_block),
        ("flipped bit", flip), ("deleted", remove),
    ):  # fmt: skip
        yield Damage(name, apply)
    if older is not None:
        yield Damage("replaced by an older one", partial(replace, older))
    if path.read_bytes().startswith(_HEADER):
        for part, at in database_parts(path).items():
            yield Damage(f"flipped bit in {part}", partial(flip, at=at))


def database_parts(path: Path) -> dict[str, int]:
    """Places in an SQLite file whose log is empty: header, free list, the root of each table and index, a cell of each,
    and each value of ``meta`` and ``counters``."""
    data = path.read_bytes()
    parts = {"the header (page count)": 31, "the header (change counter)": 27, "the header (schema cookie)": 43}
    if trunk := int.from_bytes(data[32:36], "big"):
        parts["the free list"] = (trunk - 1) * BLOCK + 7
    with closing(sqlite3.connect(f"{path.as_uri()}?mode=ro&immutable=1", uri=True)) as connection:
        roots = connection.execute("SELECT type, name, rootpage FROM sqlite_master WHERE rootpage > 0").fetchall()
        meta = connection.execute("SELECT key, value FROM meta").fetchall()
        counters = connection.execute("SELECT name, value FROM counters WHERE value > 127").fetchall()
        payload = connection.execute("SELECT token_ids FROM payloads LIMIT 1").fetchone()
    for kind, name, root in roots:
        parts[f"{kind} {name} (root)"] = (root - 1) * BLOCK + 4
        parts[f"{kind} {name} (last cell)"] = root * BLOCK - 3
    for key, value in meta:
        place = data.find(key.encode() + value)
        if place >= 0:
            parts[f"meta.{key}"] = place + len(key) + (len(value) - 1) // 2
    for name, _ in counters:
        place = data.find(name.encode())
        if place >= 0:
            parts[f"counter {name}"] = place + len(name)
    if payload is not None and (place := data.find(payload[0])) >= 0:
        parts["a payload"] = place + len(payload[0]) // 2
    return parts


def files_in(folder: Path) -> list[str]:
    """Every file in ``folder``, relative to it."""
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())
