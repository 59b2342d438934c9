"""A program as a child process: its output bounded, its whole process group ended with it.

Output is read through pipes of our own, so that a grandchild which keeps them open delays nobody, and only its end is
kept. When the program ends, is cancelled or runs out of time, everything in its process group is killed; a grandchild
that left the group on purpose (``setsid``) is not found.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import anyio

OUTPUT_SECONDS_MAX = 2.0
"""For output that is still in the pipes after the end of the program."""
KILL_SECONDS_MAX = 5.0


@dataclass(frozen=True, slots=True)
class Ended:
    """How a program ended."""

    code: int
    """Its exit code, or minus the number of the signal."""
    stdout: str
    """The end of it."""
    stderr: str


class _Tail(asyncio.Protocol):
    """Keeps the last bytes of a pipe."""

    def __init__(self, bytes_max: int) -> None:
        self._bytes_max = bytes_max
        self._data = bytearray()
        self.closed = asyncio.Event()

    def data_received(self, data: bytes) -> None:
        self._data += data
        if len(self._data) > 2 * self._bytes_max:
            del self._data[: -self._bytes_max]

    def connection_lost(self, exc: Exception | None) -> None:
        self.closed.set()

    @property
    def text(self) -> str:
        return self._data[-self._bytes_max :].decode("utf-8", "replace")


class ChildProgram:
    """``async with ChildProgram(...) as child: ended = await child.wait()``. Raises OSError where it cannot start."""

    def __init__(
        self, command: Sequence[str], environment: Mapping[str, str], folder: str | None, output_bytes_max: int
    ) -> None:
        self._command = command
        self._environment = environment
        self._folder = folder
        self._stdout = _Tail(output_bytes_max)
        self._stderr = _Tail(output_bytes_max)
        self._transports: list[asyncio.BaseTransport] = []
        self._process: asyncio.subprocess.Process | None = None

    @property
    def stderr(self) -> str:
        """Its end, so far."""
        return self._stderr.text

    async def __aenter__(self) -> ChildProgram:
        ends: list[int] = []
        try:
            for tail in (self._stdout, self._stderr):
                ends.append(await self._pipe(tail))
            self._process = await asyncio.create_subprocess_exec(
                *self._command,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=ends[0],
                stderr=ends[1],
                env=dict(self._environment),
                cwd=self._folder,
                start_new_session=True,
            )
        except BaseException:
            self._close_pipes()
            raise
        finally:
            for end in ends:
                os.close(end)
        return self

    async def __aexit__(self, *args: Any) -> None:
        with anyio.move_on_after(KILL_SECONDS_MAX, shield=True):
            self._kill()
            if self._process is not None:
                await self._process.wait()
        self._close_pipes()

    async def wait(self) -> Ended:
        """Its end, and that of everything it started."""
        assert self._process is not None
        code = await self._process.wait()
        self._kill()
        with anyio.move_on_after(OUTPUT_SECONDS_MAX):
            await self._stdout.closed.wait()
            await self._stderr.closed.wait()
        return Ended(code, self._stdout.text, self._stderr.text)

    async def _pipe(self, tail: _Tail) -> int:
        """The end that the program writes to."""
        read, write = os.pipe()
        try:
            transport, _ = await asyncio.get_running_loop().connect_read_pipe(lambda: tail, os.fdopen(read, "rb", 0))
        except BaseException:
            os.close(write)
            raise
        self._transports.append(transport)
        return write

    def _kill(self) -> None:
        if self._process is not None:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, signal.SIGKILL)

    def _close_pipes(self) -> None:
        for transport in self._transports:
            transport.close()
