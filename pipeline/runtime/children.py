"""Child processes in process groups of their own, which end when their parent does.

:class:`ChildGroup` is one command with everything it starts. :class:`OrphanReaper` ends such groups when the process
that started them is gone, ``kill -9`` included: it runs this file as a process of its own, with the standard library
alone. On Linux and macOS.
"""

from __future__ import annotations

import contextlib
import errno
import os
import selectors
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent import futures
from typing import IO

GRACE_SECONDS = 2.0
"""Between SIGTERM and SIGKILL for the groups that the supervisor leaves behind."""
POLL_SECONDS = 0.5
"""Longest delay after which the end of a command may be noticed when one of its children holds its output open."""
OUTPUT_SECONDS_MAX = 2.0
"""For output that is still in the pipes after the end of the command."""
KILL_SECONDS_MAX = 5.0
"""Longest time between SIGKILL and the noticed end of a group."""
RESTART_SECONDS = 0.1
"""Before a reaper process that has ended is started again."""
PARENT_SECONDS = 0.5
"""Between two looks at whether the parent lives."""
SUPERVISOR = "AFTERPLAY_SUPERVISOR"
"""Environment variable of a role that is to end with its supervisor: the supervisor's process id."""
PASSIVE_THREADS = {"OMP_WAIT_POLICY": "PASSIVE"}
"""Environment of a process that computes, unless ours has another value: OpenMP threads that spin at their barriers,
which is the default, take the cores from the engine beside a learner, which slows generation several times."""


def wait_passively() -> None:
    """:data:`PASSIVE_THREADS` in this process, which has effect before PyTorch is imported."""
    for name, value in PASSIVE_THREADS.items():
        os.environ.setdefault(name, value)


def module_command(module: str, *arguments: str) -> list[str]:
    """Command that runs ``module`` under this interpreter. The current folder is not searched for modules (``-P``), so
    that a folder of the user named ``pipeline`` or ``actors`` hides none of ours."""
    return [sys.executable, "-P", "-m", module, *arguments]


def append_working_folder() -> None:
    """Let modules of the current folder be imported, behind everything that is installed: a run file names plug-ins
    there as ``module:Name``."""
    if (folder := os.getcwd()) not in sys.path:
        sys.path.append(folder)


def end_with_parent() -> None:
    """End this process soon after its parent, however that ends. For a process whose parent gave it a session of its
    own: the end of the parent's group does not reach it."""
    _when_gone(os.getppid(), lambda: os._exit(1))


def end_with_supervisor() -> None:
    """In a role that a supervisor has started, do what the reaper does when the supervisor is gone: SIGTERM to the
    group of this process, and SIGKILL ``GRACE_SECONDS`` later. For a reaper that was killed in the same instant. Does
    nothing elsewhere, nor in what such a role starts. A program that replaces this one must call it again."""
    supervisor = int(os.environ.get(SUPERVISOR, "0"))

    def end() -> None:
        signal_group(os.getpgrp(), signal.SIGTERM)
        time.sleep(GRACE_SECONDS)
        signal_group(os.getpgrp(), signal.SIGKILL)

    if supervisor and (os.getppid() == supervisor or not _is_alive(supervisor)):
        _when_gone(supervisor, end)


def _when_gone(parent: int, end: Callable[[], object]) -> None:
    """Call ``end`` in a thread soon after ``parent`` is no longer the parent of this process."""

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(PARENT_SECONDS)
        end()

    threading.Thread(target=watch, name="parent", daemon=True).start()


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except OSError as error:
        return error.errno == errno.EPERM
    return True


class OrphanReaper:
    """Ends the groups that it watches when this process ends. Close it, or use it as a context manager.

    The reaper process reads ``+GROUP`` and ``-GROUP`` from stdin, which closes when its parent is gone; then every
    group still on the list gets SIGTERM, and SIGKILL ``grace_seconds`` later (at once without a grace). It is started
    with the first group, and again, with all groups, when it has ended on its own. The file descriptors ``keep_open``
    stay open until the last group is gone.
    """

    def __init__(self, grace_seconds: float = GRACE_SECONDS, keep_open: Iterable[int] = ()) -> None:
        self._grace_seconds = grace_seconds
        self._keep_open = tuple(keep_open)
        self._process: subprocess.Popen[bytes] | None = None
        self._groups: set[int] = set()
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self.on_restart: Callable[[int], None] = lambda code: None
        """Called in a thread with the exit code of a reaper process that ended on its own, once another runs."""

    def __enter__(self) -> OrphanReaper:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    @property
    def pid(self) -> int | None:
        """Process id of the reaper; None before it is started."""
        return None if self._process is None else self._process.pid

    def start(self) -> None:
        """Start the reaper process, unless it runs."""
        with self._lock:
            if self._process is None:
                process = self._process = self._start()
                threading.Thread(target=self._guard, args=(process,), name="reaper guard", daemon=True).start()

    def watch(self, group: int) -> None:
        """End ``group`` should this process die."""
        with self._lock:
            self._groups.add(group)
            self._send(f"+{group}\n")

    def forget(self, group: int) -> None:
        """``group`` has ended; the system may use its number again."""
        with self._lock:
            self._groups.discard(group)
            self._send(f"-{group}\n")

    def close(self) -> None:
        """End the groups that are left. Blocks until they are gone."""
        with self._lock:
            self._closed.set()
            process = self._process
        if process is not None and process.stdin is not None:
            process.stdin.close()
            process.wait(timeout=self._grace_seconds + KILL_SECONDS_MAX)

    def _start(self) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            [sys.executable, "-I", "-S", __file__, str(self._grace_seconds)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            pass_fds=self._keep_open,
            bufsize=0,
        )

    def _guard(self, process: subprocess.Popen[bytes]) -> None:
        """Start the reaper process again whenever it ends before it is closed."""
        while True:
            code = process.wait()
            if self._closed.wait(RESTART_SECONDS):
                return
            with self._lock:
                if self._closed.is_set():
                    return
                if process.stdin is not None:
                    process.stdin.close()
                try:
                    process = self._process = self._start()
                except OSError:  # no process or descriptor is free at the moment
                    continue
                for group in self._groups:
                    self._send(f"+{group}\n")
            self.on_restart(code)

    def _send(self, line: str) -> None:
        """The lock is held."""
        assert self._process is not None and self._process.stdin is not None
        with contextlib.suppress(OSError, ValueError):  # the reaper was killed, or closed before its last group
            self._process.stdin.write(line.encode())


class ChildGroup:
    """A command in a session of its own, with everything it starts there.

    When the command ends, the rest of its group is killed; a process that has left the session (``setsid``) is not
    found. ``output`` takes stdout and stderr, None passes them to ours; with ``output_bytes_max`` the last bytes of
    each are kept instead. Raises :class:`OSError` when the command cannot be started.
    """

    def __init__(
        self,
        command: Sequence[str],
        reaper: OrphanReaper,
        *,
        environment: Mapping[str, str] | None = None,
        folder: str | None = None,
        stdin: IO[bytes] | int = subprocess.DEVNULL,
        output: IO[bytes] | None = None,
        output_bytes_max: int = 0,
    ) -> None:
        joined = None if output is None else subprocess.STDOUT
        self._reaper = reaper
        reaper.start()
        self._process = subprocess.Popen(
            command,
            stdin=stdin,
            stdout=subprocess.PIPE if output_bytes_max else output,
            stderr=subprocess.PIPE if output_bytes_max else joined,
            env=environment,
            cwd=folder,
            start_new_session=True,
            bufsize=0,
        )
        self.pid = self._process.pid
        """Also the number of the group."""
        reaper.watch(self.pid)
        self.end: futures.Future[int] = futures.Future()
        """The exit code, or minus the number of the signal, once it has ended and the rest of its group is killed."""
        self.end.set_running_or_notify_cancel()
        self._stdout, self._stderr = _Tail(output_bytes_max), _Tail(output_bytes_max)
        try:
            threading.Thread(target=self._watch, name=f"child {self.pid}", daemon=True).start()
        except RuntimeError as error:  # no thread is free at the moment
            self.kill()
            self._watch()
            raise BlockingIOError(errno.EAGAIN, str(error)) from error

    @property
    def stdout(self) -> str:
        """The end of the output so far."""
        return self._stdout.text

    @property
    def stderr(self) -> str:
        """The end of the error output so far."""
        return self._stderr.text

    def terminate(self) -> None:
        """SIGTERM to the command, which ends its children itself."""
        self._process.terminate()

    def kill(self) -> None:
        """SIGKILL to the whole group."""
        if not self.end.done():
            signal_group(self.pid, signal.SIGKILL)

    def stop(self, grace_seconds: float) -> bool:
        """Terminate, and kill the group after the grace; False when that was necessary. Blocks."""
        self.terminate()
        if futures.wait([self.end], grace_seconds).done:
            return True
        self.kill()
        futures.wait([self.end], KILL_SECONDS_MAX)
        return False

    async def wait(self) -> int:
        """The exit code. Cancelling it leaves the group alone."""
        import asyncio  # the reaper runs this file too and has no use for it

        return await asyncio.wrap_future(self.end)

    def _watch(self) -> None:
        process = self._process
        with selectors.DefaultSelector() as pipes:
            for pipe, tail in ((process.stdout, self._stdout), (process.stderr, self._stderr)):
                if pipe is not None:
                    pipes.register(pipe, selectors.EVENT_READ, tail)
            while pipes.get_map() and process.poll() is None:
                _read(pipes, POLL_SECONDS)
            code = process.wait()
            signal_group(self.pid, signal.SIGKILL)
            deadline = time.monotonic() + OUTPUT_SECONDS_MAX
            while pipes.get_map() and (left := deadline - time.monotonic()) > 0:
                _read(pipes, left)
        for pipe in filter(None, (process.stdout, process.stderr)):
            pipe.close()
        self._reaper.forget(self.pid)
        self.end.set_result(code)


class _Tail:
    """The last bytes of a stream."""

    def __init__(self, bytes_max: int) -> None:
        self._bytes_max = bytes_max
        self._data = bytearray()

    def add(self, data: bytes) -> None:
        self._data += data
        if len(self._data) > 2 * self._bytes_max:
            del self._data[: -self._bytes_max]

    @property
    def text(self) -> str:
        return self._data[-self._bytes_max :].decode("utf-8", "replace")


def _read(pipes: selectors.BaseSelector, seconds_max: float) -> None:
    for key, _ in pipes.select(seconds_max):
        data = os.read(key.fd, 65536)
        if data:
            key.data.add(data)
        else:
            pipes.unregister(key.fileobj)


def signal_group(group: int, number: int) -> bool:
    """Send a signal to a process group; False when no process of it is left."""
    try:
        os.killpg(group, number)
    except (ProcessLookupError, PermissionError):  # macOS answers EPERM for groups of zombies
        return False
    return True


def describe_exit(code: int) -> str:
    """An exit status in words: ``killed by SIGKILL`` or ``exit code 1``."""
    return f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"


def main(grace_seconds: float) -> None:
    """The reaper process."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    groups: set[int] = set()
    for line in sys.stdin:
        group = int(line[1:])
        if line[0] == "+":
            groups.add(group)
        else:
            groups.discard(group)
    if grace_seconds:
        groups = {group for group in groups if signal_group(group, signal.SIGTERM)}
    end = time.monotonic() + grace_seconds
    while groups and time.monotonic() < end:
        time.sleep(0.05)
        groups = {group for group in groups if signal_group(group, 0)}
    for group in groups:
        signal_group(group, signal.SIGKILL)


if __name__ == "__main__":
    main(float(sys.argv[1]))
