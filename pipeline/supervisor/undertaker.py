"""A process whose only duty is that nothing outlives the supervisor, however the supervisor ends.

It reads lines ``+GROUP`` and ``-GROUP`` (process group ids) from stdin. Stdin closes when the supervisor is gone, by
whatever way, ``kill -9`` included; then every group still on the list gets SIGTERM, and SIGKILL two seconds later.
It runs with the standard library alone, on Linux and macOS.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterable
from types import TracebackType

GRACE_SECONDS = 2.0


class Undertaker:
    """The supervisor's end. Use as a context manager.

    ``keep_open`` are file descriptors that stay open until the last group is gone (the lock of the run directory).
    """

    def __init__(self, keep_open: Iterable[int] = ()) -> None:
        self._keep_open = tuple(keep_open)
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Undertaker:
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", __file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            pass_fds=self._keep_open,
        )
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._process is not None and self._process.stdin is not None:
            with contextlib.suppress(OSError):
                self._process.stdin.close()
            self._process.wait(timeout=GRACE_SECONDS + 5)

    def watch(self, group: int) -> None:
        """End ``group`` should the supervisor die."""
        self._tell(f"+{group}\n")

    def forget(self, group: int) -> None:
        """``group`` has ended; its number may be given to others."""
        self._tell(f"-{group}\n")

    def _tell(self, line: str) -> None:
        assert self._process is not None and self._process.stdin is not None, "enter the context first"
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(line.encode())
            self._process.stdin.flush()


def signal_group(group: int, number: int) -> bool:
    """Send a signal to a process group; False when there is nobody in it (any more)."""
    try:
        os.killpg(group, number)
    except (ProcessLookupError, PermissionError):  # macOS answers EPERM for groups of zombies
        return False
    return True


def main() -> None:
    """The other end."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    groups: set[int] = set()
    for line in sys.stdin:
        group = int(line[1:])
        if line[0] == "+":
            groups.add(group)
        else:
            groups.discard(group)
    alive = {group for group in groups if signal_group(group, signal.SIGTERM)}
    end = time.monotonic() + GRACE_SECONDS
    while alive and time.monotonic() < end:
        time.sleep(0.05)
        alive = {group for group in alive if signal_group(group, 0)}
    for group in alive:
        signal_group(group, signal.SIGKILL)


if __name__ == "__main__":
    main()
