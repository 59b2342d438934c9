"""Disks that are full: a small file system of its own that can be filled, and writes that fail in one process."""

from __future__ import annotations

import errno
import os
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

FILLER = "filler"
_CHUNK = 64 * 1024


@contextmanager
def small_disk(folder: Path, megabytes: int) -> Iterator[Path]:
    """``folder`` as a file system of this size. Skips the test where that is not allowed."""
    folder.mkdir()
    options = f"size={megabytes}m"
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", options, "none", folder], capture_output=True, check=False)
    if mounted.returncode:
        pytest.skip(f"a file system cannot be mounted here: {mounted.stderr.decode(errors='replace').strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", folder], check=True)


def keep_full(disk: Path, seconds: float) -> None:
    """Take all room on a small disk, and what becomes free meanwhile; then give it back."""
    path, end = disk / FILLER, time.monotonic() + seconds
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    try:
        while time.monotonic() < end:
            for size in (_CHUNK, 1):
                with suppress(OSError):
                    while os.write(fd, bytes(size)) == size and time.monotonic() < end:
                        pass
            time.sleep(0.02)
    finally:
        os.close(fd)
        path.unlink()


@contextmanager
def full_writes(patch: pytest.MonkeyPatch, bytes_left: int) -> Iterator[None]:
    """In this process ``os.write`` and ``os.writev`` have room for so many bytes and then fail with ENOSPC, as on a
    full disk: the write that meets the end is cut short."""
    write, left = os.write, bytes_left

    def limited(fd: int, data: bytes | memoryview) -> int:
        nonlocal left
        if left == 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        written = write(fd, memoryview(data)[:left])
        left -= written
        return written

    with patch.context() as inside:
        inside.setattr(os, "write", limited)
        inside.setattr(os, "writev", lambda fd, buffers: limited(fd, b"".join(buffers)))
        yield
