"""A process that has imported everything and forks others on request, so that a start costs no imports. Linux only.

``python -m tests.support.fork_server DESCRIPTOR`` is the server; :class:`ForkServer` is what its user holds. A request
is a command ``[python, -m, MODULE, ...]`` or ``[python, FILE, ...]``. The child runs it as the main module, in a
session of its own, with the environment, the folder and the three standard streams of the request and no other
descriptor: what ``subprocess.Popen`` would start, but for the imports.

A request with ``forks`` is for ``afterplay run``: the child keeps a server of its own, and starts the processes of its
run from that.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import threading
import traceback
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import IO, Any, NoReturn

from tests.support import hang

AVAILABLE = sys.platform == "linux"
"""Elsewhere libraries do not survive a fork without exec."""
ROOT = Path(__file__).parents[2]
IMPORTS = (
    "actors.embedded.generator",
    "actors.embedded.routes",
    "actors.process.role",
    "actors.servers.launch",
    "learner.process.evaluator",
    "learner.models.prepare",
    "learner.process.role",
    "learner.process.rank_processes",
    "matplotlib.backends.backend_agg",
    "peft",
    "pipeline.cli.app",
    "pipeline.stage.role",
    "pipeline.supervisor.run",
    "torch.distributed.tensor",
    "transformers.models.llama.modeling_llama",
    "transformers.models.auto.tokenization_auto",
    "uvloop",
)
"""Heavy things. What is missing here costs the children its import, no more."""
REQUEST_BYTES_MAX = 1 << 16
NUMBER_BYTES = 16
"""In a status pipe: the process number, later the wait status."""
DESCRIPTORS_MAX = 1 << 16
END_SECONDS_MAX = 60.0
"""It sees that it is over when it has imported everything."""


class Forked:
    """A process that a fork server started; as much of ``subprocess.Popen`` as is needed."""

    stdout = stderr = None

    def __init__(self, pid: int, status: int) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._status = status
        weakref.finalize(self, os.close, status)  # not before: several threads may wait for it
        self._lock = threading.Lock()

    def poll(self) -> int | None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.wait(0)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """The exit code. Several threads may wait at once."""
        if self.returncode is None and not select.select([self._status], [], [], timeout)[0]:
            raise subprocess.TimeoutExpired(f"process {self.pid}", timeout or 0)
        with self._lock:
            if self.returncode is None:
                code = os.read(self._status, NUMBER_BYTES)
                self.returncode = os.waitstatus_to_exitcode(int(code)) if code else -signal.SIGKILL
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


class ForkServer:
    """The user's end. Close it, or use it as a context manager; the server ends with it, its children do not. Where
    :data:`AVAILABLE` is False it starts every process with ``subprocess.Popen``."""

    def __init__(self, imports: Sequence[str] = IMPORTS) -> None:
        self._socket: socket.socket | None = None
        if not AVAILABLE:
            return
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.support.fork_server", str(theirs.fileno()), *imports],
                cwd=ROOT,
                # OpenMP reads them when it is loaded
                env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"},
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )

    def __enter__(self) -> ForkServer:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        if self._socket is not None:
            self._socket.close()
            self._process.wait(END_SECONDS_MAX)

    def start(self, command: Sequence[str], *, forks: bool = False, **how: Any) -> Forked | subprocess.Popen[bytes]:
        """Start ``command``. ``how``: ``stdin``, ``stdout``, ``stderr``, ``env``, ``cwd`` of ``subprocess.Popen``."""
        if self._socket is None:
            return subprocess.Popen(command, start_new_session=True, **how)
        return start(self._socket, command, forks=forks, **how)

    def open(self, command: Sequence[str], *, stderr: int = subprocess.PIPE) -> ForkedWithPipes | subprocess.Popen[str]:
        """Start ``command`` with pipes of text as its standard streams."""
        if self._socket is None:
            pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": stderr}
            path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
            environment = {**os.environ, "PYTHONPATH": path}
            return subprocess.Popen(command, env=environment, start_new_session=True, text=True, **pipes)
        return ForkedWithPipes(self._socket, command, stderr)


class ForkedWithPipes:
    """A forked process with pipes of text; as much of ``subprocess.Popen`` as is needed."""

    def __init__(self, server: socket.socket, command: Sequence[str], stderr: int) -> None:
        kinds = ["stdin", "stdout"] + ["stderr"] * (stderr == subprocess.PIPE)
        pipes = {kind: os.pipe() if kind != "stdin" else os.pipe()[::-1] for kind in kinds}
        theirs = {kind: pipe[1] for kind, pipe in pipes.items()}
        try:
            self._forked = start(server, command, **{"stderr": stderr, **theirs})
        finally:
            for descriptor in theirs.values():
                os.close(descriptor)
        self.stdin, self.stdout, self.stderr = (
            os.fdopen(pipes[kind][0], "w" if kind == "stdin" else "r") if kind in pipes else None
            for kind in ("stdin", "stdout", "stderr")
        )

    def __getattr__(self, name: str) -> Any:
        return getattr(self._forked, name)

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        """The rest of its output, which has to fit into its pipes until it ends."""
        with contextlib.suppress(BrokenPipeError):
            self.stdin.close()
        self._forked.wait(timeout)
        said = []
        for stream in (self.stdout, self.stderr):
            said.append("" if stream is None or stream.closed else stream.read())
            if stream is not None:
                stream.close()
        return said[0], said[1]


class ForkedSubprocess:
    """In place of the module ``subprocess`` in :mod:`pipeline.runtime.children`: Python programs without pipes are
    forked by ``starter``."""

    PIPE, STDOUT, DEVNULL = subprocess.PIPE, subprocess.STDOUT, subprocess.DEVNULL

    def __init__(self, starter: Callable[..., Any]) -> None:
        self._start = starter

    def Popen(self, command: Sequence[str], **how: Any) -> Any:
        if command[0] == sys.executable and "-m" in command[1:3] and subprocess.PIPE not in how.values():
            wanted = ("stdin", "stdout", "stderr", "env", "cwd")
            forks = "pipeline.cli.app" in command and "run" in command
            return self._start(command, forks=forks, **{name: how[name] for name in wanted if name in how})
        return subprocess.Popen(command, **how)


def start(
    server: socket.socket,
    command: Sequence[str],
    *,
    forks: bool = False,
    stdin: IO[bytes] | int | None = None,
    stdout: IO[bytes] | int | None = None,
    stderr: IO[bytes] | int | None = None,
    env: Mapping[str, str] | None = None,
    cwd: str | Path | None = None,
) -> Forked:
    """Ask the server at the other end of ``server`` for a process."""
    request = {
        "command": list(command),
        "forks": forks,
        "env": dict(os.environ if env is None else env),
        "cwd": str(cwd or Path.cwd()),
    }
    status, theirs = os.pipe()
    with open(os.devnull, "r+b") as null:
        into = _descriptor(stdout, 1, null)
        errors = into if stderr == subprocess.STDOUT else _descriptor(stderr, 2, null)
        streams = [_descriptor(stdin, 0, null), into, errors]
        try:
            socket.send_fds(server, [json.dumps(request).encode()], [*streams, theirs])
        finally:
            os.close(theirs)
    pid = os.read(status, NUMBER_BYTES)
    if not pid:
        os.close(status)
        raise RuntimeError(f"expected the fork server to start {' '.join(command)}, but it has ended")
    return Forked(int(pid), status)


def _descriptor(stream: IO[bytes] | int | None, ours: int, null: IO[bytes]) -> int:
    if stream is None:
        return ours
    if isinstance(stream, int):
        return null.fileno() if stream == subprocess.DEVNULL else stream
    return stream.fileno()


def serve(requests: socket.socket) -> None:
    """Fork a process for every request, and write into the request's pipe its number and later how it ended. Returns
    when the other end of ``requests`` closes."""
    woken, wake = os.pipe()
    os.set_blocking(wake, False)
    signal.set_wakeup_fd(wake)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    children: dict[int, int] = {}
    while True:
        for ready in select.select([requests, woken], [], [])[0]:
            if ready == woken:
                os.read(woken, 4096)
                _reap(children)
                continue
            data, descriptors, _, _ = socket.recv_fds(requests, REQUEST_BYTES_MAX, 4)
            if not data:
                return
            *streams, status = descriptors
            pid = os.fork()
            if pid == 0:
                signal.set_wakeup_fd(-1)
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                _become(json.loads(data), streams)
            children[pid] = status
            _tell(status, pid)
            for stream in streams:
                os.close(stream)


def _reap(children: dict[int, int]) -> None:
    while children:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid == 0:
            return
        descriptor = children.pop(pid)
        _tell(descriptor, status)
        os.close(descriptor)


def _tell(descriptor: int, number: int) -> None:
    with contextlib.suppress(BrokenPipeError):  # nobody waits for it
        os.write(descriptor, f"{number:{NUMBER_BYTES}}".encode())


def _become(request: Mapping[str, Any], streams: Sequence[int]) -> NoReturn:
    """The life of a child, from the fork to its end."""
    code = 1
    try:
        os.setsid()
        for number, stream in enumerate(streams):
            os.dup2(stream, number)
        os.closerange(3, DESCRIPTORS_MAX)
        sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
        os.environ.clear()
        os.environ.update(request["env"])
        os.chdir(request["cwd"])
        os.execve = _execute
        if not request["forks"]:
            hang.install()
        with _own_children() if request["forks"] else contextlib.nullcontext():
            code = _run(request["command"])
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _run(command: Sequence[str]) -> int:
    """Run the module or file of a command line as the main module; returns the exit code."""
    try:
        command = [part for part in command if part != "-P"]  # this process has imported ours already
        if command[1] == "-m":
            sys.argv = list(command[2:])
            sys.modules.pop(command[2], None)  # runpy warns of a module that is there already
            runpy.run_module(command[2], run_name="__main__", alter_sys=True)
        else:
            sys.argv = list(command[1:])
            runpy.run_path(command[1], run_name="__main__")
    except SystemExit as end:
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
            return 1
        return int(end.code or 0)
    return 0


def _execute(path: str, command: Sequence[str], environment: Mapping[str, str]) -> NoReturn:
    """In place of ``os.execve``: a Python that would replace this one runs here. Others replace it."""
    if path != sys.executable:
        _execve(path, command, environment)
    os.environ.clear()
    os.environ.update(environment)
    sys.exit(_run(command))


_execve = os.execve


@contextlib.contextmanager
def _own_children() -> Iterator[None]:
    """Fork a server from this process, which has no threads yet; Python programs of its child groups start from it."""
    import pipeline.runtime.children as children

    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    server = os.fork()
    if server == 0:
        try:
            ours.close()
            os.setsid()
            serve(theirs)
        finally:
            os._exit(0)
    theirs.close()
    children.subprocess = ForkedSubprocess(partial(start, ours))  # type: ignore[attr-defined]
    try:
        yield
    finally:
        ours.close()
        os.waitpid(server, 0)


def main(descriptor: int, imports: Sequence[str]) -> None:
    for name in imports:
        importlib.import_module(name)
    gc.freeze()
    serve(socket.socket(fileno=descriptor))
    os._exit(0)  # libraries complain when their interpreter ends


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2:])
