"""The command of an agent program: where it runs, what it may read there, and what its end means.

It runs in a sandbox of :mod:`actors.sandboxes`, one for each episode. A failure of the sandbox itself has the boundary
``sandbox`` and is never the program's.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from urllib.parse import urlsplit

import anyio
import orjson

from actors.gateway.requests import PROGRAM, Report, last_line, report_in
from actors.gateway.session import Session
from actors.sandboxes.base import SANDBOX, Finished, Sandbox, SandboxOptions
from actors.sandboxes.bubblewrap import SYSTEM
from actors.sandboxes.registry import Sandboxes
from pipeline.errors import ConfigurationError, PlugInError, PlugInTimeout, boundary, line_in
from pipeline.runtime.children import OrphanReaper, describe_exit

LOOPBACK = ("127.0.0.1", "::1", "localhost")
TASK_CHARACTERS_MAX = 100_000
"""A longer task does not fit into an environment variable; the program asks ``GET`` of its session for it."""
SAID_CHARACTERS_MAX = 500
"""Part of the last line on stderr of a program that failed, in the message of the failure."""
STDOUT_CHARACTERS_MAX = 4000
"""Part of a failed program's stdout that is stored after its stderr."""
FILES_BYTES_MAX = 2**20
"""A file of an episode that has become longer is not given to the environment."""
OPTION_OF = {"memory": "memory_mib", "processes": "processes_max", "disk": "disk_mib"}
HINT = (
    "\n[It ran in a sandbox: it has no network but its session, and of files only the system's, its own Python's and "
    "its folders {}. See loop.options.sandbox: readable, or none.]"
)


class ProgramCommand:
    """The command of one section. Raises :class:`ConfigurationError` where it cannot run on this machine."""

    def __init__(
        self,
        command: tuple[str, ...],
        options: SandboxOptions,
        *,
        where: str,
        environment: Mapping[str, str],
        folder: str | None,
        output_bytes_max: int,
        hidden: Sequence[Path],
        gateway: str,
        reaper: OrphanReaper,
        count: Callable[[str], None],
    ) -> None:
        """``where``: the key of the loop's options. ``gateway``: its address."""
        self._command, self._environment, self._output_bytes_max = command, environment, output_bytes_max
        self._folder = Path(folder or ".").expanduser().resolve()
        more = [Path(path).expanduser().absolute() for path in options.readable]
        if missing := [str(path) for path in more if not path.exists()]:
            raise ConfigurationError(f"{where}.sandbox.readable: there is no {', '.join(missing)}")
        if folder is not None and is_broad(self._folder) and options.kind != "none":
            raise ConfigurationError(
                f"{where}.folder: expected a folder of the program's own, which it may read in its sandbox, got "
                f"{self._folder}, which holds files of others too"
            )
        self._programs = program_paths(command, self._folder, own=folder is not None)
        named = [Path(path) for value in environment.values() for path in value.split(os.pathsep) if path[:1] == "/"]
        self._hidden = tuple(path.resolve() for path in hidden)
        readable = (*self._programs, *(path for path in named if path.exists() and not is_broad(path)), *more)
        run = self._hidden[:1]
        self._readable = tuple(path for path in readable if not any(path.resolve().is_relative_to(at) for at in run))
        self._address = urlsplit(gateway)
        self._sandboxes = Sandboxes(options, f"{where}.sandbox", reaper, count)
        if private := [str(path) for path in self._readable if self._sandboxes.kind.unreadable(path)]:
            raise ConfigurationError(
                f"{where}.command: the program runs in a sandbox as a user of its own, who may not read "
                f"{', '.join(private)}: chmod -R o+rX {' '.join(private)}, or set {where}.sandbox: none"
            )

    async def run(self, session: Session, files: Mapping[str, str] | None, seconds_max: float) -> Report | None:
        """Run it to its end, with ``files`` as its working folder where there are some; ``session.files`` is what it
        left of them. None: it reported nothing. Raises :class:`PlugInError` where it failed."""
        deadline = anyio.current_time() + seconds_max
        assert self._address.hostname is not None and self._address.port is not None
        gateway = (self._address.hostname, self._address.port)
        hidden = (*self._hidden, *(path for folder in self._programs for path in folder.glob(".*")))
        folder, command = (self._folder, self._command) if files is None else (None, self._absolute())
        async with self._sandboxes.one(self._readable, hidden, folder, gateway) as sandbox:
            if files is not None:
                with boundary(SANDBOX):
                    await sandbox.put({path: text.encode() for path, text in files.items()})
            finished = await self._finished(sandbox, session, command, deadline - anyio.current_time())
            too_many = files is not None and finished.limit == "disk"  # no command can read them
            if files is not None and not too_many:
                session.files = await taken(sandbox, files)
        stderr, stdout = (data.decode(errors="replace") for data in (finished.stderr, finished.stdout))
        session.last_line = last_line(stdout)
        shown = f"[stdout]\n{stdout[-STDOUT_CHARACTERS_MAX:]}" if session.last_line else ""
        session.output = "\n".join(filter(None, (stderr, shown)))
        if session.report is not None and not too_many:
            return session.report
        if finished.limit == "time":
            raise hung(session)
        if finished.limit is not None:
            reason = f"the program was ended for its use of {finished.limit}: raise sandbox.{OPTION_OF[finished.limit]}"
            raise PlugInError(PROGRAM, "SandboxLimit", reason, session.output)
        if finished.code != 0:
            said = stderr.strip().rpartition("\n")[2].strip()[:SAID_CHARACTERS_MAX]
            reason = f"the program ended: {describe_exit(finished.code)}{', after ' if said else ''}{said}"
            if session.refusal is not None and session.refusal.message not in said:
                reason += f"; its last call was refused: {session.refusal.message}"
            details = session.output + self._hint(sandbox)
            raise PlugInError(PROGRAM, "ExitCode", reason, details, line_in(stderr))
        return report_in(session.last_line)

    def _absolute(self) -> tuple[str, ...]:
        """The command with the paths of its own files, which begins in another folder."""
        paths = (self._folder / word if 0 < len(word) < 4096 and "\0" not in word else None for word in self._command)
        return tuple(
            word if path is None or not path.is_file() else str(path)
            for word, path in zip(self._command, paths, strict=True)
        )

    async def _finished(
        self, sandbox: Sandbox, session: Session, command: tuple[str, ...], seconds_max: float
    ) -> Finished:
        try:
            return await sandbox.run(
                command,
                environment=self._variables(sandbox, session),
                seconds_max=seconds_max,
                output_bytes_max=self._output_bytes_max,
            )
        except OSError as error:
            reason = f"{self._command[0]} cannot be started: {error}"
            raise PlugInError(PROGRAM, type(error).__name__, reason, self._hint(sandbox)) from error

    def _variables(self, sandbox: Sandbox, session: Session) -> dict[str, str]:
        host = self._address.netloc if sandbox.inherits else f"127.0.0.1:{self._address.port}"
        url, task = f"http://{host}/sessions/{session.id}", orjson.dumps(session.task).decode()
        return {
            **self._environment,
            **unproxied(),
            "OPENAI_BASE_URL": f"{url}/v1",
            "OPENAI_API_KEY": session.id,
            "ANTHROPIC_BASE_URL": url,
            "ANTHROPIC_API_KEY": session.id,
            "AFTERPLAY_MODEL": session.policy.model,
            "AFTERPLAY_SESSION": session.id,
            "AFTERPLAY_SESSION_URL": url,
            **({"AFTERPLAY_TASK": task} if len(task.encode()) <= TASK_CHARACTERS_MAX else {}),
        }

    def _hint(self, sandbox: Sandbox) -> str:
        return "" if sandbox.inherits else HINT.format(", ".join(map(str, self._readable)))


async def taken(sandbox: Sandbox, paths: Iterable[str]) -> dict[str, str]:
    """Texts of the files that exist and are not too long."""
    found = {}
    for path in paths:
        with boundary(SANDBOX), contextlib.suppress(FileNotFoundError, ValueError):
            data = await sandbox.take([path], FILES_BYTES_MAX)
            found[path] = data[path].decode(errors="replace")
    return found


def unproxied() -> dict[str, str]:
    """Variables with which clients reach this machine without the proxy of the environment."""
    others = (os.environ.get("no_proxy") or os.environ.get("NO_PROXY") or "").split(",")
    names = ",".join(dict.fromkeys(filter(None, (*others, *LOOPBACK))))
    return {"NO_PROXY": names, "no_proxy": names}


def hung(session: Session) -> PlugInTimeout:
    """The failure of a program that did not end in time."""
    return PlugInTimeout(
        PROGRAM,
        "TimeoutError",
        "the program had not ended when the time of its episode was over (environments.<name>.max_seconds), and was "
        "ended; its output says what it was doing",
        session.output,
    )


def is_broad(folder: Path) -> bool:
    """True for a folder that holds files of others: ``/``, the home folder, that of temporary files, and those above.

    >>> is_broad(Path("/")), is_broad(Path.home()), is_broad(Path.home() / "agents")
    (True, True, False)
    """
    return any(folder in (place, *place.parents) for place in (Path.home(), Path(tempfile.gettempdir()).resolve()))


def program_paths(command: Sequence[str], folder: Path, own: bool) -> tuple[Path, ...]:
    """Paths that belong to a command: the working folder if it is its ``own``, the folders of files that its words name
    (the files alone where the folder is broad), and its interpreter with the virtual environment that it is in."""
    found = [folder] if own else []
    if command[0] != sys.executable:  # which every sandbox has
        program = shutil.which(command[0]) if "/" not in command[0] else str(folder / command[0])
        found += _interpreter(Path(program)) if program is not None and os.path.isfile(program) else []
    for word in command[1:]:
        path = Path(os.path.normpath(folder / word))
        if word and not word.startswith("-") and os.path.exists(path) and not is_broad(path):
            found.append(path if path.is_dir() or is_broad(path.parent) else path.parent)
    return tuple(path for path in dict.fromkeys(found) if not any(path.is_relative_to(system) for system in SYSTEM))


def _interpreter(program: Path) -> list[Path]:
    """A program file, or the virtual environment that it is the Python of, and that one's own."""
    settings = program.parent.parent / "pyvenv.cfg"
    if not settings.is_file():
        return [program]
    pairs = (line.partition("=") for line in settings.read_text().splitlines())
    home = next((Path(value.strip()) for key, _, value in pairs if key.strip() == "home"), None)
    return [program.parent.parent, *([home.parent] if home is not None else [])]
