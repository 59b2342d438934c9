"""A process whose only duty is that nothing outlives the supervisor, however the supervisor ends.

It reads lines ``+GROUP`` and ``-GROUP`` (process group ids) from stdin. Stdin closes when the supervisor is gone, by
whatever way, ``kill -9`` included; then every group still on the list gets SIGTERM, and SIGKILL two seconds later.
It runs with the standard library alone, on Linux and macOS.

Ranks 1, 2, … as children of rank 0, on its machine.

Why not torchrun here: the supervisor watches, stops and restarts one learner process, which serves metrics and health.
That process is rank 0; the others belong to its process group and cannot outlive it: each reads its run file from
stdin, and ends when stdin closes.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable
from types import TracebackType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pipeline.config import RunConfig

GRACE_SECONDS = 2.0


class OrphanReaper:
    """The supervisor's end. Use as a context manager.

    ``keep_open`` are file descriptors that stay open until the last group is gone (the lock of the run directory).
    """

    def __init__(self, keep_open: Iterable[int] = ()) -> None:
        self._keep_open = tuple(keep_open)
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> OrphanReaper:
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


END_SECONDS = 5.0
"""How long a child may take from being asked to end until it is killed."""


class RankProcesses:
    """``on_loss`` is called, in a thread, with words for a child that ends unasked."""

    def __init__(self, config: RunConfig, port: int, on_loss: Callable[[str], None]) -> None:
        self._config = config
        self._port = port
        self._on_loss = on_loss
        self._processes: dict[int, subprocess.Popen[bytes]] = {}
        self._ending = False

    def start(self) -> None:
        """Returns when they are started; they meet rank 0 at ``port``."""
        config, size = self._config.model_dump_json().encode(), self._config.learner.ranks
        for rank in range(1, size):
            process = subprocess.Popen(
                [sys.executable, "-m", "learner.rank_worker", str(rank), str(size), str(self._port)],
                stdin=subprocess.PIPE,
            )
            assert process.stdin is not None
            process.stdin.write(config + b"\n")
            process.stdin.flush()
            self._processes[rank] = process
            threading.Thread(target=self._watch, args=(rank, process), daemon=True).start()

    def close(self, *, asked: bool) -> None:
        """Wait for them, where they were ``asked`` to end; then close their stdin, which ends them; then kill. Blocks
        for at most twice ``END_SECONDS`` each."""
        self._ending = True
        for close in ([False] if asked else []) + [True]:
            for process in self._processes.values():
                if close and process.stdin is not None:
                    with contextlib.suppress(OSError):
                        process.stdin.close()
            for process in self._processes.values():
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(END_SECONDS)
        for process in self._processes.values():
            if process.poll() is None:
                process.kill()
                process.wait()

    def gone(self, wait_seconds: float = 0.0) -> str:
        """Words for the children that have ended, or do so in time; empty where none has."""
        for process in self._processes.values():
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(wait_seconds)
        codes = {rank: process.poll() for rank, process in self._processes.items()}
        return "; ".join(f"rank {rank} ended ({_words(code)})" for rank, code in codes.items() if code is not None)

    def _watch(self, rank: int, process: subprocess.Popen[bytes]) -> None:
        code = process.wait()
        if not self._ending:
            self._on_loss(f"rank {rank} ended ({_words(code)})")


def _words(code: int) -> str:
    return f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"


if __name__ == "__main__":
    main()
