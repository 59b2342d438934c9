"""Ranks 1, 2, … as children of rank 0, on its machine.

Why not torchrun here: the supervisor watches, stops and restarts one learner process, which serves metrics and health.
That process is rank 0; the others belong to its process group and cannot outlive it: each reads its run file from
stdin, and ends when stdin closes.
"""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
import threading
from collections.abc import Callable

from pipeline.config import RunConfig

END_SECONDS = 5.0
"""How long a child may take from being asked to end until it is killed."""


class Children:
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
                [sys.executable, "-m", "learner.ranks.follower", str(rank), str(size), str(self._port)],
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
