"""Folders that appear complete or not at all: write beside, fsync, rename.

The contents of a folder: size and SHA-256 of every file, so that damage is noticed before the files are used.

::

    u000010/contents.json           {"files": {"training.pt": {"bytes": 5380904, "sha256": "…"}, …}, "sha256": "…"}
    u000010.damaged/damaged.json    why a folder was set aside

The last digest is that of ``files`` itself: damage to ``contents.json`` is noticed too. A core with instructions for
SHA-256 reads about 1.5 GB/s.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import itertools
import os
import shutil
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import orjson

from pipeline.runtime.disk import disk_fault
from pipeline.runtime.run_directory import PathWatch, read_json, sync, write_json_atomically

_TEMPORARY = ".writing-"


@contextmanager
def atomic_folder(target: Path) -> Iterator[Path]:
    """A scratch folder beside ``target`` that takes its name when the block ends without an error.

    All files are on disk before the rename. What was at ``target`` before is replaced. An error removes the scratch
    folder. Raises :class:`OSError` where the file system refuses it, whatever the libraries inside raise for that. The
    folder above ``target`` is made if it is missing, and none above that: a run directory that is gone stays gone, also
    where a library in the block makes it again.
    """
    scratch = target.with_name(f"{_TEMPORARY}{target.name}.{os.getpid()}")
    shutil.rmtree(scratch, ignore_errors=True)
    target.parent.mkdir(exist_ok=True)
    above = PathWatch(target.parent)
    try:
        scratch.mkdir()
        yield scratch
        if above.gone(looks=1):
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(target.parent))
        _open_to_readers(scratch)
        sync_tree(scratch)
        if target.exists():
            old = target.with_name(f"{_TEMPORARY}old-{target.name}.{os.getpid()}")
            os.rename(target, old)
            os.rename(scratch, target)
            shutil.rmtree(old, ignore_errors=True)
        else:
            os.rename(scratch, target)
        sync(target.parent)
    except Exception as error:
        fault = disk_fault(error, target.parent)  # before the scratch folder makes room again
        if fault is None or isinstance(error, OSError):
            raise
        number = fault.errno or 0
        raise OSError(number, f"{os.strerror(number)} ({error})", str(target)) from error
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
        if above.gone(looks=1):
            with contextlib.suppress(OSError):  # raised where others have files in it
                target.parent.rmdir()
                target.parent.parent.rmdir()
        above.close()


def _open_to_readers(folder: Path) -> None:
    """Let whoever may read ``folder`` read its files too: safetensors makes files that only their owner may read, and
    engines may run as another user."""
    readable = folder.stat().st_mode & 0o444
    for path in folder.rglob("*"):
        mode = path.stat().st_mode & 0o7777
        if path.is_file() and mode | readable != mode:
            path.chmod(mode | readable)


def remove_leftovers(parent: Path) -> None:
    """Remove scratch folders of processes that were killed. Only the one writer of ``parent`` may call it."""
    if parent.is_dir():
        for path in parent.glob(f"{_TEMPORARY}*"):
            shutil.rmtree(path, ignore_errors=True)


def remove_folder(folder: Path) -> None:
    """Remove a folder, if the file system lets us. A kill leaves no part of it under its name, but a leftover."""
    old = folder.with_name(f"{_TEMPORARY}old-{folder.name}.{os.getpid()}")
    with contextlib.suppress(OSError):
        os.rename(folder, old)
    shutil.rmtree(old, ignore_errors=True)


def link_or_copy(file: Path, target: Path) -> None:
    """Put ``file``, which nothing rewrites, at ``target`` too: a hard link, or a copy where the file system makes
    none."""
    try:
        target.hardlink_to(file)
    except OSError:
        shutil.copyfile(file, target)


def sync_tree(folder: Path) -> None:
    """fsync every file and folder below ``folder``, and itself."""
    for root, _, names in os.walk(folder):
        for name in names:
            sync(Path(root) / name)
        sync(Path(root))


CONTENTS = "contents.json"

DAMAGED = ".damaged"
"""End of the name of a folder that was set aside; a number may follow."""

_WHY = "damaged.json"

THREADS_MAX = 4
"""Files of a folder that are read at the same time."""


def write_contents(folder: Path) -> int:
    """Write ``contents.json`` for everything in ``folder``, as its last file; bytes of these files. Blocks while it
    reads them."""
    files = sorted(path for path in folder.rglob("*") if path.is_file() and path.name != CONTENTS)
    with ThreadPoolExecutor(THREADS_MAX) as threads:
        digests = threads.map(_digest, files)
        found = {
            path.relative_to(folder).as_posix(): {"bytes": path.stat().st_size, "sha256": digest}
            for path, digest in zip(files, digests, strict=True)
        }
    value = {"files": found, "sha256": _own_digest(found)}
    write_json_atomically(folder / CONTENTS, value, make_folder=False)
    return sum(path.stat().st_size for path in files)


def find_damage(folder: Path, *, digests: bool = True) -> str:
    """The damage of ``folder`` in words; empty where every file is what it was. Files that were added do not count.
    ``digests`` false: compare only sizes, which reads no file. Blocks while it reads them.

    Raises :class:`OSError` where this process cannot look, for example for want of permission.
    """
    try:
        value = orjson.loads((folder / CONTENTS).read_bytes())
        files = value["files"]
        if value["sha256"] != _own_digest(files):
            return f"{CONTENTS} is not what was written"
        names = {name: (file["bytes"], file["sha256"]) for name, file in files.items()}
    except FileNotFoundError:
        return f"{CONTENTS} is missing"
    except (ValueError, KeyError, TypeError, AttributeError):
        return f"{CONTENTS} is not what was written"
    for name, (size, _) in names.items():
        try:
            found = (folder / name).stat().st_size
        except (FileNotFoundError, NotADirectoryError):
            return f"{name} is missing"
        if found != size:
            return f"{name} has {found} bytes instead of {size}"
    return _changed(folder, {name: digest for name, (_, digest) in names.items()}) if digests else ""


def set_aside(folder: Path, facts: Mapping[str, Any]) -> Path:
    """Rename a damaged folder, so that nothing finds it under its name, and write ``facts`` into it."""
    names = itertools.chain([DAMAGED], (f"{DAMAGED}-{n}" for n in itertools.count(2)))
    target = next(target for name in names if not (target := folder.with_name(folder.name + name)).exists())
    folder.rename(target)
    with contextlib.suppress(OSError):  # a full disk, say; the name of the folder remains
        write_json_atomically(target / _WHY, facts)
    return target


def damaged_folders(parent: Path) -> dict[str, dict[str, Any]]:
    """Names of the folders in ``parent`` that were set aside, and the facts about each."""
    return {path.name: read_json(path / _WHY) or {} for path in sorted(parent.glob(f"*{DAMAGED}*")) if path.is_dir()}


def _changed(folder: Path, digests: dict[str, str]) -> str:
    """The first file with another digest."""
    with ThreadPoolExecutor(THREADS_MAX) as threads:
        pending = {name: threads.submit(_digest, folder / name) for name in digests}
        for name, found in pending.items():
            try:
                same = found.result() == digests[name]
            except OSError as error:
                if error.errno != errno.EIO:
                    raise
                return f"the disk cannot read {name}"
            if not same:
                return f"{name} does not hold the bytes that were written"
    return ""


def _digest(path: Path) -> str:
    """The interpreter lock is free meanwhile."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _own_digest(files: dict[str, Any]) -> str:
    return hashlib.sha256(orjson.dumps(files, option=orjson.OPT_SORT_KEYS)).hexdigest()
