"""Hosts of the processes of a run: this machine, or the machines of a launcher."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import IO, Protocol

import anyio.to_thread

from pipeline.errors import AfterplayError
from pipeline.runtime.children import ChildGroup, OrphanReaper
from pipeline.runtime.disk_wait import FULL, left_out, when_room
from pipeline.runtime.rundir import RunDirectory, write_bytes_atomically
from pipeline.supervisor.processes import HealthAnswer, ProcessSpec, check_health, child_environment, health_url

Waiting = Callable[[str], None]
"""Called with the reason while there is no place for a process, and with an empty one when it has a place."""


class ProcessLost(AfterplayError):
    """A process is gone with its machine; the message says which."""


class Child(Protocol):
    """A process that was started, with everything that it starts itself."""

    pid: int

    def terminate(self) -> None:
        """SIGTERM to the process, which ends its children itself."""
        ...

    def kill(self) -> None:
        """SIGKILL to all of them."""
        ...

    async def wait(self) -> int:
        """The exit code, or minus the number of the signal. Raises :class:`ProcessLost`."""
        ...


class ProcessHost(Protocol):
    """Starts processes and asks for their health."""

    async def start(self, spec: ProcessSpec, waiting: Waiting) -> Child:
        """Start a process, as soon as there is a place for it. Cancelled when the run ends meanwhile. Raises
        :class:`ProcessLost`."""
        ...

    async def check(self, spec: ProcessSpec, child: Child) -> HealthAnswer:
        """Its health, within some seconds; never raises for what may happen to it."""
        ...


class LocalHost:
    """This machine."""

    def __init__(self, directory: RunDirectory, reaper: OrphanReaper) -> None:
        self._directory = directory
        self._reaper = reaper

    async def start(self, spec: ProcessSpec, waiting: Waiting) -> Child:
        log_file = self._directory.log_file(spec.name)
        return await when_room(partial(self._begin, spec, log_file), log_file, f"the log of {spec.name}")

    def _begin(self, spec: ProcessSpec, log_file: Path) -> ChildGroup:
        with open_log(log_file) as output:
            environment = child_environment(spec.environment, ends_with_us=spec.here)
            return ChildGroup(spec.command, self._reaper, environment=environment, output=output)

    async def check(self, spec: ProcessSpec, child: Child) -> HealthAnswer:
        url = spec.health_url or health_url(self._directory, spec.name, child.pid if spec.here else None)
        if url is None:
            unwritable = await anyio.to_thread.run_sync(self._unwritable, spec.name, abandon_on_cancel=True)
            return HealthAnswer(bool(unwritable), waiting_for=unwritable)
        return await anyio.to_thread.run_sync(check_health, url, abandon_on_cancel=True)

    def _unwritable(self, name: str) -> str:
        """The reason for which a process cannot say in ``processes/`` where to ask for its health; it counts as healthy
        while it runs."""
        path = self._directory.process_file(name)
        if path.is_dir():
            return f"{path}, which is a folder"
        trial = path.with_name(f".{path.name}.trial")
        write = partial(write_bytes_atomically, trial, b"", make_folder=False)
        return left_out(write, trial) or left_out(trial.unlink, trial)


def open_log(path: Path) -> IO[bytes]:
    """The log of a process, for appending. Where the file system refuses it, for another reason than that it is full,
    the process runs without."""
    try:
        path.parent.mkdir(exist_ok=True)
        return path.open("ab")
    except OSError as error:
        if error.errno in FULL:
            raise
        return open(os.devnull, "ab")
