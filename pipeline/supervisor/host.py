"""Hosts of the processes of a run: this machine, or the machines of a launcher."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import IO, Protocol

import anyio.to_thread

from pipeline.errors import AfterplayError
from pipeline.runtime.children import ChildGroup, OrphanReaper
from pipeline.runtime.disk_wait import when_room
from pipeline.runtime.rundir import RunDirectory
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
        with await when_room(partial(open_log, log_file), log_file, f"the log of {spec.name}") as output:
            environment = child_environment(spec.environment, ends_with_us=spec.here)
            return ChildGroup(spec.command, self._reaper, environment=environment, output=output)

    async def check(self, spec: ProcessSpec, child: Child) -> HealthAnswer:
        url = spec.health_url or health_url(self._directory, spec.name, child.pid if spec.here else None)
        if url is None:
            return HealthAnswer(False)
        return await anyio.to_thread.run_sync(check_health, url, abandon_on_cancel=True)


def open_log(path: Path) -> IO[bytes]:
    """The log of a process, for appending."""
    path.parent.mkdir(parents=True, exist_ok=True)
    return path.open("ab")
