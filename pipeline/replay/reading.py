"""What people and files want to know of a store, read while a stage may be writing it."""

from __future__ import annotations

import hashlib
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import orjson

from pipeline.errors import StoreError
from pipeline.replay import store_file
from pipeline.replay.portable import Portable

_POOLED = """
SELECT p.entropy, p.success_rate, p.uses, t.reward, d.header, d.token_ids, d.logprobs, d.spans
FROM pool p JOIN trajectories t USING (seq) JOIN payloads d USING (seq) ORDER BY p.saved"""


@contextmanager
def reading(path: Path) -> Iterator[sqlite3.Connection]:
    """One read-only transaction on the store at ``path``: nothing that a stage writes meanwhile is seen.

    Raises :class:`StoreError` when there is no store, or it is not ours, damaged, or of another version.
    """
    if not store_file.check_header(path):
        raise StoreError(f"there is no replay store at {path}: has the run been started?")
    try:
        connection = store_file.connect(path, read_only=True)
        try:
            connection.execute("BEGIN")
            store_file.check_tables(connection, path)
            yield connection
        finally:
            connection.close()
    except sqlite3.Error as error:
        raise StoreError(f"the replay store {path} could not be read: {error}") from error


def origin(connection: sqlite3.Connection) -> str:
    """A name for the history of this store: two stores never share it, a restarted one keeps it. Empty: nothing was
    stored yet."""
    row = connection.execute("SELECT trajectory_id, received_at FROM trajectories ORDER BY seq LIMIT 1").fetchone()
    return hashlib.sha256(f"{row[0]}|{row[1]!r}".encode()).hexdigest()[:16] if row else ""


def meta(connection: sqlite3.Connection) -> dict[str, Any]:
    return {key: orjson.loads(value) for key, value in connection.execute("SELECT key, value FROM meta")}


def pooled(connection: sqlite3.Connection) -> Iterator[Portable]:
    """Every trajectory of the pool, oldest first."""
    name = origin(connection)
    for entropy, success_rate, uses, reward, *frames in connection.execute(_POOLED):
        marks = {"entropy": entropy, "success_rate": success_rate, "uses": uses, "reward": reward, "origin": name}
        yield Portable(marks, tuple(frames))
