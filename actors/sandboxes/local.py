"""A sandbox of this machine: the actor's end of :mod:`actors.sandboxes.first_process`.

How its first process is started is up to a subclass. *Waits* for answers on the control socket; when that breaks, the
sandbox is lost, and all calls raise.
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import logging
import math
import os
import socket
import tarfile
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import anyio

from actors.sandboxes.base import SANDBOX, Finished, Sandbox, SandboxSettings
from pipeline.errors import PlugInError
from pipeline.runtime.children import KILL_SECONDS_MAX, ChildGroup, describe_exit

log = logging.getLogger(__name__)
HOME = "/tmp/home"
SOURCE = Path(__file__).with_name("first_process.py")
CONNECTIONS_MAX = 64
"""Connections of one sandbox to the gateway; more wait."""
ACCEPT_AGAIN_SECONDS = 0.5
COPY_BYTES = 65536
SAID_BYTES_MAX = 4096
FILES_SECONDS_MAX = 120.0
"""For files to be written or read inside."""
UNPACK = "import sys, tarfile; tarfile.open(fileobj=sys.stdin.buffer, mode='r|').extractall('.')"
PACK = (
    "import sys, tarfile, os\n"
    "out = tarfile.open(fileobj=sys.stdout.buffer, mode='w|')\n"
    "for path in sys.argv[1:]:\n"
    "    if os.path.isfile(path) and not os.path.islink(path) and os.access(path, os.R_OK): out.add(path)\n"
    "out.close()\n"
)


class LocalSandbox(Sandbox):
    """A sandbox whose first process is a child of this one, or of a container engine here."""

    def __init__(self, settings: SandboxSettings) -> None:
        super().__init__(settings)
        self._child: ChildGroup | None = None
        self._control: socket.socket | None = None
        self._relay: _Relay | None = None
        self._reader: asyncio.StreamReader | None = None
        self._writer: asyncio.StreamWriter | None = None

    def _own_variables(self) -> Mapping[str, str]:
        """Variables of all commands, beside those of the first process."""
        return {}

    @abstractmethod
    async def _launch(self) -> tuple[ChildGroup, socket.socket]:
        """Start the first process; the child, and the actor's end of the control socket."""

    def _argument(self, **more: Any) -> str:
        """The settings of the first process."""
        options, gateway = self.settings.options, self.settings.gateway
        limits = {"memory": options.memory_mib * 2**20, "processes": options.processes_max}
        limits["disk"] = options.disk_mib * 2**20
        given = {
            "control": None,
            "uid": None,
            "filter": False,
            "count": False,
            "port": gateway and gateway[1],
            **limits,
            **more,
        }
        return json.dumps(given)

    async def start(self) -> None:
        self._child, self._control = await self._launch()
        self._control.setblocking(False)
        await anyio.wait_readable(self._control)
        said, files, *_ = socket.recv_fds(self._control, 4096, 1)
        if not said:
            raise await self._lost("cannot be started")
        if files:
            assert self.settings.gateway is not None
            self._relay = _Relay(socket.socket(fileno=files[0]), self.settings.gateway)
        self._reader, self._writer = await asyncio.open_unix_connection(sock=self._control)

    async def put(self, files: Mapping[str, bytes]) -> None:
        packed = io.BytesIO()
        with tarfile.open(fileobj=packed, mode="w") as archive:
            for name, data in files.items():
                entry = tarfile.TarInfo(name)
                entry.size = len(data)
                archive.addfile(entry, io.BytesIO(data))
        done = await self._python(UNPACK, (), packed.getvalue(), SAID_BYTES_MAX)
        if done.code:
            raise OSError(f"files cannot be written in the sandbox: {done.stderr.decode(errors='replace')[-500:]}")

    async def take(self, paths: Sequence[str], bytes_max: int) -> dict[str, bytes]:
        room = bytes_max + 2048 * (len(paths) + 10)  # headers and padding of the archive
        try:
            done = await self._python(PACK, paths, b"", room + 1)
        except (PermissionError, FileExistsError) as error:  # a command has closed the folder, or put a file there
            raise FileNotFoundError(f"{HOME} in the sandbox is no folder that can be read: {error}") from error
        if len(done.stdout) > room or (done.code and done.limit == "disk"):
            raise ValueError(f"expected files of at most {bytes_max} bytes together, got more")
        found = {}
        with tarfile.open(fileobj=io.BytesIO(done.stdout)) as archive:
            for entry in archive:
                if (file := archive.extractfile(entry)) is not None:
                    found[entry.name] = file.read()
        for path in paths:
            if os.path.normpath(path) not in map(os.path.normpath, found):
                raise FileNotFoundError(f"there is no file {path} in the sandbox")
        return found

    async def _python(self, source: str, arguments: Sequence[str], stdin: bytes, output_bytes_max: int) -> Finished:
        command = (self.python, "-I", "-S", "-c", source, *arguments)
        return await self._command(command, {}, FILES_SECONDS_MAX, output_bytes_max, stdin, HOME)

    async def run(
        self, command: Sequence[str], *, environment: Mapping[str, str], seconds_max: float, output_bytes_max: int
    ) -> Finished:
        folder = str(self.settings.folder or HOME)
        return await self._command(command, environment, seconds_max, output_bytes_max, b"", folder)

    async def _command(
        self,
        command: Sequence[str],
        environment: Mapping[str, str],
        seconds_max: float,
        output_bytes_max: int,
        stdin: bytes,
        folder: str,
    ) -> Finished:
        if self._writer is None or self._reader is None:
            raise await self._lost("has ended")
        own = {"USER": "sandbox", "LANG": "C.UTF-8", "TMPDIR": "/tmp", **self._own_variables()}
        request = {
            "command": list(command),
            "environment": own | dict(environment) | {"HOME": HOME},
            "seconds_max": seconds_max if math.isfinite(seconds_max) else 1e9,
            "output_bytes_max": output_bytes_max,
            "folder": folder,
            "size": len(stdin),
        }
        try:
            self._writer.write(json.dumps(request).encode() + b"\n" + stdin)
            await self._writer.drain()
            answer = json.loads(await self._reader.readline() or b"null")
            if answer is None or answer["size"] > 2 * output_bytes_max:
                raise await self._lost("has ended")
            output = await self._reader.readexactly(answer["size"])
        except (OSError, EOFError, ValueError) as error:
            raise await self._lost("has ended") from error
        if answer["fault"]:
            number, _, words = answer["fault"].partition(" ")
            raise OSError(int(number), words)
        out = answer["out"]
        return Finished(answer["code"], output[:out], output[out:], answer["limit"])

    async def _lost(self, what: str) -> PlugInError:
        """The error for a sandbox that is gone."""
        code, said = None, ""
        if self._child is not None:
            with anyio.move_on_after(KILL_SECONDS_MAX):
                code = await self._child.wait()
            said = self._child.stderr.strip()[-500:]
        how = "" if code is None else f": {describe_exit(code)}"
        return PlugInError(SANDBOX, "Lost", f"the sandbox {what}{how}{', after ' if said else ''}{said}")

    async def end(self) -> None:
        if self._relay is not None:
            await self._relay.close()
        if self._writer is not None:
            self._writer.close()
        if self._control is not None:
            self._control.close()
        if self._child is not None:
            await self._finish(self._child)
        self._writer = self._control = self._relay = None

    async def _finish(self, child: ChildGroup) -> None:
        """The control socket is closed; wait until nothing is left."""
        child.kill()
        with anyio.move_on_after(KILL_SECONDS_MAX):
            await child.wait()


class _Relay:
    """Copies between a listening socket inside a sandbox, which came from there, and the gateway."""

    def __init__(self, listener: socket.socket, gateway: tuple[str, int]) -> None:
        self._listener, self._gateway = listener, gateway
        listener.setblocking(False)
        self._free = asyncio.Semaphore(CONNECTIONS_MAX)
        self._tasks = {asyncio.create_task(self._accept())}

    async def close(self) -> None:
        tasks = tuple(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._listener.close()

    async def _accept(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            await self._free.acquire()
            try:
                connection, _ = await loop.sock_accept(self._listener)
            except OSError as error:  # no descriptor is free at the moment
                log.warning("a sandbox cannot call the gateway: %s", error)
                self._free.release()
                await asyncio.sleep(ACCEPT_AGAIN_SECONDS)
                continue
            task = asyncio.create_task(self._copy_both(connection))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _copy_both(self, connection: socket.socket) -> None:
        writers: list[asyncio.StreamWriter] = []
        try:
            inside = await asyncio.open_connection(sock=connection)
            writers.append(inside[1])
            outside = await asyncio.open_connection(*self._gateway)
            writers.append(outside[1])
            await asyncio.gather(_copy(inside[0], outside[1]), _copy(outside[0], inside[1]))
        except OSError:
            pass  # one of them hung up; the other one sees it
        finally:
            for writer in writers:
                writer.close()
            connection.close()
            self._free.release()


async def _copy(source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
    while data := await source.read(COPY_BYTES):
        sink.write(data)
        await sink.drain()
    with contextlib.suppress(OSError):
        sink.write_eof()
