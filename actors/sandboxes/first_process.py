"""The first process of a sandbox of this machine: it runs the commands that the actor sends, one after the other.

The actor starts it inside (``python3 -I -S -c SOURCE SETTINGS``), with the standard library alone. As process 1 of its
own process namespace it sees all others, cannot be killed or stopped by them, and takes them along when it ends, which
it does as soon as the actor's end of the control socket is closed. It opens the port inside that leads to the gateway
and gives the listening socket to the actor, so that no other way out is needed.

A message is a line of JSON with the number of bytes that follow it (``size``).
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import resource
import selectors
import signal
import socket
import struct
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

TICK_SECONDS = 0.1
"""Between two looks at what the processes use."""
END_SECONDS_MAX = 5.0
"""For killed processes to be gone."""
FIRST_SCORE, COMMAND_SCORE = 500, 1000
"""Scores of proc_pid_oom_score_adj(5): commands end before the first process, both before everything else."""
FILES_MAX = 1024
INODE_BYTES = 4096
"""Bytes of disk for each file: a tmpfs counts empty files as nothing, but they take memory."""
WRITABLE = ("/tmp", "/dev/shm")
_PR_SET_DUMPABLE, _PR_SET_SECCOMP, _PR_SET_NO_NEW_PRIVS, _FILTER = 4, 22, 38, 2
_NAMESPACES = 0x7E020080
"""All CLONE_NEW* flags."""
_FAMILIES = (1, 2, 10, 16)
"""Sockets of the namespace: AF_UNIX, AF_INET, AF_INET6, AF_NETLINK. Others (AF_VSOCK) lead out of it."""
_MACHINES: dict[str, tuple[int, dict[str, int]]] = {
    "x86_64": (
        0xC000003E,
        {"clone": 56, "clone3": 435, "socket": 41, "shmget": 29, "msgget": 68, "semget": 64,
         "pivot_root": 155, "mount": 165, "umount2": 166, "add_key": 248, "request_key": 249, "keyctl": 250,
         "unshare": 272, "perf_event_open": 298, "setns": 308, "memfd_create": 319, "bpf": 321, "userfaultfd": 323,
         "io_uring_setup": 425, "open_tree": 428, "move_mount": 429, "fsopen": 430, "fsmount": 432,
         "mount_setattr": 442, "memfd_secret": 447},
    ),
    "aarch64": (
        0xC00000B7,
        {"clone": 220, "clone3": 435, "socket": 198, "shmget": 194, "msgget": 186, "semget": 190,
         "pivot_root": 41, "mount": 40, "umount2": 39, "add_key": 217, "request_key": 218, "keyctl": 219,
         "unshare": 97, "perf_event_open": 241, "setns": 268, "memfd_create": 279, "bpf": 280, "userfaultfd": 282,
         "io_uring_setup": 425, "open_tree": 428, "move_mount": 429, "fsopen": 430, "fsmount": 432,
         "mount_setattr": 442, "memfd_secret": 447},
    ),
}  # fmt: skip
"""AUDIT_ARCH and system calls by machine (Linux 6.18, asm/unistd): kernel parts that are not bounded by a namespace,
memory that belongs to no process or file, and namespaces of one's own."""


def seccomp_filter(machine: str) -> bytes:
    """A program of classic BPF (seccomp(2)) that refuses the calls of :data:`_MACHINES`. Empty for another machine."""
    if machine not in _MACHINES:
        return b""
    arch, calls = _MACHINES[machine]

    def step(code: int, value: int, yes: int = 0, no: int = 0) -> bytes:
        return struct.pack("HBBI", code, yes, no, value)

    load, equal, above, bits, answer = 0x20, 0x15, 0x35, 0x45, 0x06
    allowed, killed, eperm, enosys = 0x7FFF0000, 0x80000000, 0x00050001, 0x00050026
    program = [step(load, 4), step(equal, arch, yes=1), step(answer, killed), step(load, 0)]
    program += [step(above, 0x40000000, no=1), step(answer, enosys)]  # the x32 calls of x86-64
    for name, number in calls.items():
        if name not in ("clone", "socket"):
            absent = name in ("clone3", "memfd_create", "io_uring_setup")  # callers have another way
            program += [step(equal, number, no=1), step(answer, enosys if absent else eperm)]
    program += [step(equal, calls["clone"], no=4), step(load, 16)]
    program += [step(bits, _NAMESPACES, no=1), step(answer, eperm), step(answer, allowed)]
    program += [step(equal, calls["socket"], no=len(_FAMILIES) + 2), step(load, 16)]
    program += [step(equal, family, yes=len(_FAMILIES) - n) for n, family in enumerate(_FAMILIES)]
    program += [step(answer, eperm), step(answer, allowed)]
    return b"".join(program)


def restrict(settings: Mapping[str, Any]) -> None:
    """Give up rights, in the process that will be the command. Raises :class:`OSError`."""
    limits = {
        resource.RLIMIT_CORE: 0,
        resource.RLIMIT_NOFILE: FILES_MAX,
        resource.RLIMIT_DATA: 2 * settings["memory"],  # for one process; it counts what is never touched, as stacks
    }
    uid = settings["uid"]
    if settings["count"]:
        limits[resource.RLIMIT_NPROC] = settings["processes"]
    for kind, most in limits.items():
        hard = resource.getrlimit(kind)[1]
        least = most if hard == resource.RLIM_INFINITY else min(most, hard)
        resource.setrlimit(kind, (least, least))
    if uid is not None:
        os.setgroups([])
        os.setresgid(uid, uid, uid)  # type: ignore[attr-defined, unused-ignore]  # Linux
        os.setresuid(uid, uid, uid)  # type: ignore[attr-defined, unused-ignore]
    _prctl(_PR_SET_NO_NEW_PRIVS, 1)
    if settings["filter"] and (program := seccomp_filter(os.uname().machine)):
        held = ctypes.create_string_buffer(program, len(program))
        _prctl(_PR_SET_SECCOMP, _FILTER, struct.pack("HxxxxxxP", len(program) // 8, ctypes.addressof(held)))


def _prctl(option: int, *arguments: int | bytes) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    given = [ctypes.c_ulong(a) if isinstance(a, int) else a for a in arguments]
    if libc.prctl(option, *given, *[ctypes.c_ulong(0)] * (4 - len(given))):
        raise OSError(ctypes.get_errno(), f"prctl({option}): {os.strerror(ctypes.get_errno())}")


class Channel:
    """Messages over the control socket."""

    def __init__(self, control: socket.socket) -> None:
        self.control = control
        self._left = b""

    def send(self, message: Mapping[str, Any], data: bytes = b"") -> None:
        self.control.sendall(json.dumps({**message, "size": len(data)}).encode() + b"\n" + data)

    def receive(self) -> tuple[dict[str, Any], bytes]:
        """Waits. Ends this process where the actor is gone."""
        while b"\n" not in self._left:
            self._more()
        line, _, self._left = self._left.partition(b"\n")
        message = json.loads(line)
        while len(self._left) < message["size"]:
            self._more()
        data, self._left = self._left[: message["size"]], self._left[message["size"] :]
        return message, data

    def _more(self) -> None:
        try:
            data = self.control.recv(1 << 20)
        except OSError:
            data = b""
        if not data:
            os._exit(0)
        self._left += data


class Command:
    """One command, from its start to the end of everything that it started."""

    def __init__(self, settings: Mapping[str, Any], request: Mapping[str, Any], stdin: bytes) -> None:
        self._settings = settings
        self._bytes_max: int = request["output_bytes_max"]
        self._deadline = time.monotonic() + request["seconds_max"]
        self._stdin = memoryview(stdin)
        self._read: dict[int, bytearray] = {}
        read_in, self._write = os.pipe()
        outputs = [os.pipe(), os.pipe()]
        told, tell = os.pipe()
        self._pid = os.fork()
        if self._pid == 0:
            _become(settings, request, [read_in, outputs[0][1], outputs[1][1]], tell)
        for file in (read_in, outputs[0][1], outputs[1][1], tell):
            os.close(file)
        with os.fdopen(told, "rb") as pipe:
            self.fault = pipe.read().decode()
            """Reason why it could not be started; empty: it was."""
        for file, _ in outputs:
            self._read[file] = bytearray()
            os.set_blocking(file, False)
        os.set_blocking(self._write, False)

    def finish(self, channel: Channel, woken: int) -> None:
        """Wait for its end, or for a limit, and answer."""
        code, limit = None, None
        with selectors.DefaultSelector() as files:
            for file in (channel.control.fileno(), woken, *self._read):
                files.register(file, selectors.EVENT_READ)
            files.register(self._write, selectors.EVENT_WRITE)
            looked = 0.0
            while code is None and limit is None:
                for key, _ in files.select(TICK_SECONDS):
                    if key.fd == woken:
                        os.read(woken, 4096)
                    elif key.fd == channel.control.fileno():
                        channel.receive()  # nothing may come: the actor has gone
                    elif not (self._feed() if key.fd == self._write else self._take(key.fd)):
                        files.unregister(key.fd)
                code = self._reap()
                now = time.monotonic()
                if now >= looked + TICK_SECONDS:
                    limit, looked = exceeded(self._settings), now
                limit = limit or ("time" if now >= self._deadline else None)
            code = self._end(code)
            limit = limit or exceeded(self._settings)  # of files, which stay, it may have made too many since
            for file in self._read:
                while file in files.get_map() and self._take(file):
                    pass
        os.close(self._write)
        out, err = (bytes(data[-self._bytes_max :]) if self._bytes_max else b"" for data in self._read.values())
        for file in self._read:
            os.close(file)
        answer = {"code": code, "limit": limit, "fault": self.fault, "out": len(out)}
        channel.send(answer, out + err)

    def _feed(self) -> bool:
        """Write some of its input; False when it has all of it."""
        try:
            self._stdin = self._stdin[os.write(self._write, self._stdin[:65536]) :] if self._stdin else self._stdin
        except OSError:
            self._stdin = memoryview(b"")
        if not self._stdin:
            null = os.open("/dev/null", os.O_WRONLY)
            os.dup2(null, self._write, inheritable=False)  # the end of its input
            os.close(null)
        return bool(self._stdin)

    def _take(self, file: int) -> bool:
        """Read some of its output; False if there is none now, or no more."""
        try:
            data = os.read(file, 65536)
        except BlockingIOError:
            return False
        kept = self._read[file]
        kept += data
        if len(kept) > 2 * self._bytes_max + 65536:
            del kept[: -self._bytes_max or None]
        return bool(data)

    def _reap(self) -> int | None:
        """The exit code of the command, if it has ended."""
        found = None
        try:
            while (ended := os.waitpid(-1, os.WNOHANG))[0]:
                if ended[0] == self._pid:
                    found = os.waitstatus_to_exitcode(ended[1])
        except ChildProcessError:
            pass
        return found

    def _end(self, code: int | None) -> int:
        """Kill everything that is left."""
        deadline = time.monotonic() + END_SECONDS_MAX
        while time.monotonic() < deadline:
            with contextlib.suppress(ProcessLookupError):
                os.kill(-1, signal.SIGKILL)
            found = self._reap()
            code = found if code is None else code
            if not _others():
                return -signal.SIGKILL if code is None else code
            time.sleep(0.005)
        os._exit(1)  # takes the rest along


def _become(settings: Mapping[str, Any], request: Mapping[str, Any], files: Sequence[int], tell: int) -> NoReturn:
    """Be the command, in a new process."""
    try:
        for number, file in enumerate(files):
            os.dup2(file, number)
        os.setsid()
        signal.set_wakeup_fd(-1)
        for kind in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGPIPE, signal.SIGCHLD):
            signal.signal(kind, signal.SIG_DFL)
        _prctl(_PR_SET_DUMPABLE, 1)
        _prefer_to_end(COMMAND_SCORE)
        environment = {**os.environ, **request["environment"]}
        restrict(settings)
        os.umask(0o022)
        os.makedirs(environment["HOME"], mode=0o700, exist_ok=True)
        os.chdir(request["folder"])
        os.execvpe(request["command"][0], request["command"], environment)
    except BaseException as error:
        number = error.errno if isinstance(error, OSError) and error.errno else 0
        os.write(tell, f"{number} {type(error).__name__}: {error}".encode())
    os._exit(127)


def _prefer_to_end(score: int) -> None:
    """Have the kernel end this process before others when memory runs out."""
    with open("/proc/self/oom_score_adj", "w") as file:
        file.write(str(score))


def _others() -> list[str]:
    return [name for name in os.listdir("/proc") if name.isdigit() and name != "1"]


def exceeded(settings: Mapping[str, Any]) -> str | None:
    """The limit that the processes of this namespace exceed together. Memory is their resident set, pages that several
    share counted once (proc(5): Pss) where it matters."""
    threads, resident = 0, {}
    page = resource.getpagesize()
    for name in _others():
        try:
            with open(f"/proc/{name}/stat", "rb") as file:
                fields = file.read().rpartition(b") ")[2].split()
        except OSError:  # it has ended
            continue
        threads += int(fields[17])
        resident[name] = int(fields[21]) * page
    if threads > settings["processes"]:
        return "processes"
    most = settings["memory"]
    if sum(resident.values()) > most and sum(_proportional(*process) for process in resident.items()) > most:
        return "memory"
    for folder in WRITABLE:
        use = os.statvfs(folder)
        if use.f_files - use.f_ffree > settings["disk"] // INODE_BYTES:
            return "disk"
    return None


def _proportional(name: str, resident: int) -> int:
    """Bytes of a process, its share of what it shares; ``resident`` of one that lets nobody look."""
    try:
        with open(f"/proc/{name}/smaps_rollup", "rb") as file:
            return next(int(line.split()[1]) * 1024 for line in file if line.startswith(b"Pss:"))
    except (OSError, StopIteration):
        return resident


def main(settings: Mapping[str, Any]) -> None:
    """Serve until the actor closes the control socket."""
    if os.getpid() != 1:
        raise SystemExit("expected to be process 1 of a namespace: whatever else runs in it is killed")
    if settings["control"]:
        control = socket.socket(socket.AF_UNIX)
        control.connect(settings["control"])
    else:
        control = socket.socket(fileno=os.dup(0))
    for kind in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(kind, signal.SIG_IGN)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    woken, wake = os.pipe()
    os.set_blocking(wake, False)
    signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
    _prefer_to_end(FIRST_SCORE)
    _prctl(_PR_SET_DUMPABLE, 0)  # nobody looks into this process
    ready, given = b'{"size": 0}\n', []
    if settings["port"]:
        listener = socket.create_server(("127.0.0.1", settings["port"]), backlog=128)
        given = [listener.fileno()]
    socket.send_fds(control, [ready], given)
    if given:
        listener.close()
    channel = Channel(control)
    while True:
        Command(settings, *channel.receive()).finish(channel, woken)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
