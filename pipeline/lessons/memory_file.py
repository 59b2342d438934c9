"""The file of the memory: its tables, what proves that it is ours, and opening it without harming one that is not."""

from __future__ import annotations

import os
import sqlite3
import struct
from pathlib import Path

from pipeline.errors import StoreError

APPLICATION_ID = 0x41464C4D
"""``AFLM`` in the SQLite header (bytes 68-71)."""
MEMORY_VERSION = 1
"""``user_version`` in the SQLite header (bytes 60-63)."""
BUSY_SECONDS_MAX = 10.0
"""How long one stage waits for another that writes to the same file."""

TABLES = """
CREATE TABLE lessons (
    id INTEGER PRIMARY KEY AUTOINCREMENT, task TEXT NOT NULL, lesson TEXT NOT NULL, fingerprint BLOB NOT NULL UNIQUE,
    written_at REAL NOT NULL
);
CREATE VIRTUAL TABLE lessons_text USING fts5(
    task, lesson, content='lessons', content_rowid='id', tokenize='unicode61 remove_diacritics 2'
);
CREATE VIRTUAL TABLE lessons_words USING fts5vocab(lessons_text, row);
CREATE TRIGGER lessons_added AFTER INSERT ON lessons BEGIN
    INSERT INTO lessons_text (rowid, task, lesson) VALUES (new.id, new.task, new.lesson);
END;
CREATE TRIGGER lessons_removed AFTER DELETE ON lessons BEGIN
    INSERT INTO lessons_text (lessons_text, rowid, task, lesson) VALUES ('delete', old.id, old.task, old.lesson);
END;
"""


def open_memory(path: Path, *, read_only: bool = False) -> sqlite3.Connection:
    """A connection to the memory at ``path``; a new file is made, complete or not at all, where there is none.

    Raises :class:`StoreError` that names the remedy. Usable from any one thread at a time.
    """
    remedy = "Move it away (with its -wal) to start with an empty memory, or set lessons.store to another file"
    if not _is_ours(path, remedy):
        _create(path)
    mode = "ro" if read_only else "rw"
    try:
        connection = sqlite3.connect(
            f"{path.absolute().as_uri()}?mode={mode}",
            uri=True,
            isolation_level=None,
            check_same_thread=False,
            timeout=BUSY_SECONDS_MAX,
        )
    except sqlite3.Error as error:
        raise StoreError(f"the memory of lessons {path} cannot be opened: {error}. {remedy}") from error
    try:
        if not read_only:
            connection.execute("PRAGMA journal_mode = WAL")
            connection.execute("PRAGMA synchronous = NORMAL")
            found = connection.execute("PRAGMA quick_check(1)").fetchone()[0]
            if found != "ok":
                raise StoreError(f"the memory of lessons {path} is damaged: {found}. {remedy}")
            connection.execute("INSERT INTO lessons_text (lessons_text) VALUES ('integrity-check')")
        connection.execute("SELECT id FROM lessons LIMIT 1").fetchone()
    except sqlite3.Error as error:
        connection.close()
        raise StoreError(f"the memory of lessons {path} is damaged: {error}. {remedy}") from error
    except StoreError:
        connection.close()
        raise
    return connection


def _is_ours(path: Path, remedy: str) -> bool:
    """Whether ``path`` is a memory (False: there is nothing yet). Reads 100 bytes and changes nothing."""
    try:
        with path.open("rb") as file:
            header = file.read(100)
    except FileNotFoundError:
        log = path.with_name(path.name + "-wal")
        if log.exists() and log.stat().st_size:
            raise StoreError(
                f"{log} belongs to a memory of lessons, but {path} is not there: move it back, or {log} away too"
            ) from None
        return False
    except OSError as error:
        raise StoreError(f"the memory of lessons {path} cannot be read: {error}. {remedy}") from error
    if len(header) < 100 or not header.startswith(b"SQLite format 3\0"):
        raise StoreError(f"expected {path} to be a memory of lessons (an SQLite file), got something else. {remedy}")
    version, application = struct.unpack(">I", header[60:64])[0], struct.unpack(">I", header[68:72])[0]
    if application != APPLICATION_ID:
        raise StoreError(
            f"expected {path} to be a memory of lessons of Afterplay, got an SQLite file of something else. {remedy}"
        )
    if version != MEMORY_VERSION:
        raise StoreError(
            f"{path} was written by another Afterplay (memory version {version}, this one reads {MEMORY_VERSION}). "
            f"{remedy}"
        )
    return True


def _create(path: Path) -> None:
    """Make an empty memory. Of several processes that try at once, one succeeds and all use its file."""
    part = path.with_name(f"{path.name}.{os.getpid()}.part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        part.unlink(missing_ok=True)
        connection = sqlite3.connect(part, isolation_level=None)
        try:
            connection.execute(f"PRAGMA application_id = {APPLICATION_ID}")
            connection.execute(f"PRAGMA user_version = {MEMORY_VERSION}")
            connection.executescript(f"BEGIN; {TABLES} COMMIT;")
        finally:
            connection.close()
        try:
            os.link(part, path)
        except FileExistsError:
            pass
        finally:
            part.unlink(missing_ok=True)
    except (OSError, sqlite3.Error) as error:
        raise StoreError(
            f"the memory of lessons {path} cannot be made: {error}. Set lessons.store to a place that can be written"
        ) from error
