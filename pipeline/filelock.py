"""A lock that one process holds; freed by the kernel when the process dies, however it dies."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

from pipeline.errors import StoreError


class FileLock:
    """Takes ``file`` (made where there is none, and left behind). Raises :class:`StoreError` that says ``taken`` when
    another process holds it."""

    def __init__(self, file: Path, taken: str) -> None:
        self._fd = os.open(file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(self._fd)
            raise StoreError(taken) from error

    def release(self) -> None:
        os.close(self._fd)
