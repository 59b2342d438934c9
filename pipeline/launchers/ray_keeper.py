"""Keeper of one process on a node of a Ray cluster, and the mark of the replay stage's disk. Imports no Ray.

A keeper is a detached actor: it outlives the driver by :attr:`Keeper.lease_seconds`. Its process ends with it, however
it ends (:class:`OrphanReaper`).
"""

from __future__ import annotations

import asyncio
import os
import secrets
import threading
import time
from pathlib import Path

from pipeline.config.explain import free_ports
from pipeline.runtime.children import ChildGroup, OrphanReaper
from pipeline.runtime.rundir import RunDirectory, read_json, write_json_atomically
from pipeline.supervisor.host import open_log
from pipeline.supervisor.inventory import VISIBLE
from pipeline.supervisor.processes import HealthAnswer, check_health, child_environment, health_url

EXPIRED = 1
"""Exit code of a keeper without a driver."""


class Keeper:
    """Starts one process of the run in ``directory``, asks for its health, and takes it down with itself. ``folder``:
    working folder of the process. Without a word of the driver for ``lease_seconds`` it drains the process, for at most
    ``drain_seconds``, and ends."""

    def __init__(self, directory: str, folder: str, lease_seconds: float, drain_seconds: float) -> None:
        self._directory = RunDirectory(Path(directory))
        self._folder = folder
        self._lease_seconds, self._drain_seconds = lease_seconds, drain_seconds
        self._reaper = OrphanReaper()
        self._child: ChildGroup | None = None
        self._heard_at = time.monotonic()
        threading.Thread(target=self._watch, name="lease", daemon=True).start()

    async def free_port(self, host: str) -> int:
        """A port of ``host`` that is free now."""
        return free_ports(host, 1)

    async def claim(self, store: str) -> str:
        """Empty if the disk with ``store`` is here, else what is missing."""
        return claim_disk(Path(store), self._directory)

    async def begin(self, name: str, command: list[str], environment: dict[str, str], gpus: bool) -> int:
        """Start the process ``name``; returns its process id. Ray chose the GPUs: they are in our environment."""
        if VISIBLE in environment:
            environment[VISIBLE] = os.environ.get(VISIBLE, "") if gpus else ""
        with open_log(self._directory.log_file(name)) as output:
            self._child = ChildGroup(
                command, self._reaper, environment=child_environment(environment), folder=self._folder, output=output
            )
        return self._child.pid

    async def check(self, name: str, url: str | None, any_pid: bool) -> HealthAnswer:
        """Health of the process, at ``url`` or where it says itself. ``any_pid``: one of its children says it."""
        self._heard_at = time.monotonic()
        assert self._child is not None
        found = url or health_url(self._directory, name, None if any_pid else self._child.pid)
        return HealthAnswer(False) if found is None else await asyncio.to_thread(check_health, found)

    async def renew(self) -> None:
        """The driver lives."""
        self._heard_at = time.monotonic()

    async def terminate(self) -> None:
        """SIGTERM to the process."""
        if self._child is not None:
            self._child.terminate()

    async def kill(self) -> None:
        """SIGKILL to the process and its children."""
        if self._child is not None:
            self._child.kill()

    async def wait(self) -> int:
        """Its exit code."""
        assert self._child is not None
        return await self._child.wait()

    def _watch(self) -> None:
        while (left := self._heard_at + self._lease_seconds - time.monotonic()) > 0:
            time.sleep(left)
        if self._child is not None:
            self._child.stop(self._drain_seconds)
        os._exit(EXPIRED)


def claim_disk(store: Path, directory: RunDirectory) -> str:
    """Empty if ``store`` is on this node, else what is missing. A mark beside the store and a record in the run
    directory, made when the stage is first started, tell the disk from an empty folder of the same name."""
    mark, record = store.with_name(f"{store.name}.disk"), directory.path / "replay_disk.json"
    known, found = read_json(record), read_json(mark)
    if known is not None:
        return "" if found == known else f"its disk, which has {mark}"
    if found is None:
        if not store.parent.is_dir():
            return f"its disk, which has the folder {store.parent}"
        found = {"disk": secrets.token_hex(8)}
        write_json_atomically(mark, found, durable=True)
    write_json_atomically(record, found, durable=True)
    return ""


def has_disk(store: str, directory: str) -> bool:
    """True if the disk with ``store`` is on this node, as far as anybody knows. Changes nothing."""
    known = read_json(RunDirectory(Path(directory)).path / "replay_disk.json")
    path = Path(store)
    return path.parent.is_dir() if known is None else read_json(path.with_name(f"{path.name}.disk")) == known
