"""Sandboxes by Docker or Podman: a container without network, rights and a file system that can be written.

The first process connects to a socket in a folder that is mounted, which is removed as soon as it did. It ends when
the actor is gone, and its container and folder with it: the shell that waits for the container outlives the actor, and
a restart of the engine. What is left if that is killed too is removed by the next actor of this machine.
"""

from __future__ import annotations

import asyncio
import csv
import io
import os
import platform
import secrets
import shutil
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import anyio

from actors.sandboxes.base import Finished, SandboxOptions, is_private
from actors.sandboxes.bubblewrap import SHM_BYTES, USERS
from actors.sandboxes.first_process import INODE_BYTES
from actors.sandboxes.local import SAID_BYTES_MAX, SOURCE, LocalSandbox
from pipeline.runtime.children import ChildGroup
from pipeline.transport.socket_folder import folder_of_sockets

ENGINE_SECONDS_MAX = 60.0
"""For an answer of the container engine."""
END_SECONDS_MAX = 15.0
"""For a container to end on its own."""
REMOVE_SECONDS_MAX = 600
"""For an engine that does not answer to remove a container."""
STARTER = (
    'folder=$1 name=$2 engine=$3; shift 2; read go && "$@" </dev/null; code=$?; rm -rf -- "$folder"; tries=0; '
    f'while [ $tries -lt {REMOVE_SECONDS_MAX} ] && ! "$engine" rm -f "$name" >/dev/null 2>&1; do '
    'left=$("$engine" ps -aq --filter "name=$name" 2>/dev/null) && [ -z "$left" ] && break; '
    "tries=$((tries + 1)); sleep 1; done; exit $code"
)
"""Runs a container after a line of input, and removes what is left of it and of its folder, also when its engine was
restarted meanwhile. An engine that removes containers on its own (``--rm``) leaves some as dead when it is stopped
(Docker before 29, moby/moby#51692)."""
LABEL = "afterplay.owner"
INSIDE = "/run/afterplay"


class Container(LocalSandbox):
    """One container, of the engine that the options name."""

    _name = ""
    _folder: Path | None = None

    @classmethod
    def unreadable(cls, path: Path) -> bool:
        return is_private(path)

    async def _launch(self) -> tuple[ChildGroup, socket.socket]:
        engine = self.settings.options.kind
        self._name = f"afterplay-{secrets.token_hex(8)}"
        name = f"{self._name}-sandbox"
        self._folder = folder_of_sockets(f"{name}/control/socket") / name
        inside = self._folder / "control"
        waiting, go = os.pipe()
        with socket.socket(socket.AF_UNIX) as listener, os.fdopen(go, "wb") as told:
            try:
                child = self._child = ChildGroup(
                    ["/bin/sh", "-c", STARTER, "sh", str(self._folder), self._name, engine, *self._words(inside)],
                    self.settings.reaper,
                    stdin=waiting,
                    output_bytes_max=SAID_BYTES_MAX,
                )
            finally:
                os.close(waiting)
            self.settings.reaper.forget(child.pid)  # it must not be killed between making and starting a container
            self._folder.mkdir(mode=0o700)
            inside.mkdir()
            listener.bind(str(inside / "socket"))
            inside.chmod(0o755)
            (inside / "socket").chmod(0o777)
            listener.listen(1)
            listener.setblocking(False)
            told.write(b"go\n")
            told.flush()
            accept = asyncio.ensure_future(asyncio.get_running_loop().sock_accept(listener))
            ended = asyncio.ensure_future(child.wait())
            try:
                await asyncio.wait({accept, ended}, return_when=asyncio.FIRST_COMPLETED)
            finally:
                ended.cancel()
                if not accept.done():
                    accept.cancel()
            if not accept.done() or accept.cancelled():
                raise await self._lost("cannot be started")
            self._forget_folder()
            return child, accept.result()[0]

    def _words(self, inside: Path) -> Sequence[str]:
        settings, options = self.settings, self.settings.options
        memory, disk = options.memory_mib * 2**20, options.disk_mib * 2**20
        user = USERS[secrets.randbelow(len(USERS))]
        words = ["run", "--pull", "never", "--name", self._name, "--label", f"{LABEL}={owner()}"]
        words += ["--stop-signal", "KILL"]  # the first process ignores others, and an engine that stops would wait
        words += ["--network", "none", "--read-only", "--cap-drop", "ALL", "--security-opt", "no-new-privileges"]
        words += ["--user", f"{user}:{user}", "--pids-limit", str(options.processes_max + 1)]
        words += ["--memory", str(memory), "--memory-swap", str(memory), "--shm-size", str(SHM_BYTES)]
        words += ["--tmpfs", f"/tmp:exec,mode=1777,size={disk},nr_inodes={disk // INODE_BYTES + 16}"]
        words += _mount("type=bind", f"src={inside}", f"dst={INSIDE}")
        shown = [path for path in settings.readable if path.exists()]
        for path in shown:
            words += _mount("type=bind", f"src={os.path.realpath(path)}", f"dst={path}")
        hidden = [path for path in settings.hidden if path.exists() and path not in shown]
        for path in hidden:
            above = next((other for other in path.parents if other in (*shown, *hidden)), None)
            if above in shown:
                empty = ("type=tmpfs", "tmpfs-size=4k") if path.is_dir() else ("type=bind", "src=/dev/null")
                words += _mount(*empty, f"dst={path}")
        argument = self._argument(control=f"{INSIDE}/socket")
        words += ["--workdir", str(settings.folder or "/"), "--entrypoint", self.python, str(options.image)]
        return [*words, "-I", "-S", "-c", SOURCE.read_text(), argument]

    def _forget_folder(self) -> None:
        folder, self._folder = self._folder, None
        if folder is not None:
            shutil.rmtree(folder, ignore_errors=True)

    async def run(
        self, command: Sequence[str], *, environment: Mapping[str, str], seconds_max: float, output_bytes_max: int
    ) -> Finished:
        own = (self.python, *command[1:]) if command[0] == sys.executable else command  # the one of the image
        return await super().run(
            own, environment=environment, seconds_max=seconds_max, output_bytes_max=output_bytes_max
        )

    async def _finish(self, child: ChildGroup) -> None:
        self._forget_folder()
        with anyio.move_on_after(END_SECONDS_MAX):
            await child.wait()
        if not child.end.done():
            await anyio.run_process([self.settings.options.kind, "rm", "--force", self._name], check=False)


def _mount(*fields: str) -> list[str]:
    """The option for something that is only read. Engines read its fields as a line of CSV."""
    line = io.StringIO()
    csv.writer(line).writerow([*fields, "readonly"])
    return ["--mount", line.getvalue().rstrip()]


def owner() -> str:
    """This process: the start of its machine, its number and its own start."""
    return f"{_boot()}:{os.getpid()}:{_started(os.getpid())}"


def _boot() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def _started(pid: int) -> str:
    """The start of a process in clock ticks; empty for one that is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()[19]
    except OSError:
        return ""


def refusal(options: SandboxOptions) -> str | None:
    """Reason why there can be no containers here; None where there can. Removes those that dead processes have left."""
    engine = options.kind
    if options.image is None:
        return f"{engine} needs an image: set image"
    if sys.platform != "linux":  # elsewhere containers run in a virtual machine, which our socket does not reach
        return f"sandboxes of {engine} need Linux, this is {platform.system()}"
    if shutil.which(engine) is None:
        return f"there is no {engine} on the PATH"
    try:
        found = _asked(engine, "image", "inspect", "--format", "{{.Id}}", options.image)
        if found.returncode:
            said = found.stderr.strip()[-500:]
            return f"{engine} has no image {options.image} ({said}): {engine} pull {options.image}"
        remove_left(engine)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"{engine} does not answer: {error}"
    return None


def remove_left(engine: str) -> list[str]:
    """Remove the containers whose owners on this machine are gone; their ids."""
    there = _asked(engine, "ps", "--all", "--quiet", "--filter", f"label={LABEL}").stdout.split()
    if not there:
        return []
    told = _asked(engine, "inspect", "--format", f'{{{{.Id}}}} {{{{index .Config.Labels "{LABEL}"}}}}', *there).stdout
    left = [container for container, _, whose in (line.partition(" ") for line in told.splitlines()) if _is_gone(whose)]
    if left:
        _asked(engine, "rm", "--force", *left)
    return left


def _is_gone(whose: str) -> bool:
    boot, _, process = whose.partition(":")
    pid, _, started = process.partition(":")
    return boot == _boot() and pid.isdigit() and _started(int(pid)) != started


def _asked(engine: str, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [engine, *words], capture_output=True, text=True, timeout=ENGINE_SECONDS_MAX, stdin=subprocess.DEVNULL
    )
