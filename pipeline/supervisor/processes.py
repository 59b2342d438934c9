"""The processes of a run, their health checks, and their hosts: this machine, or the machines of a launcher."""

from __future__ import annotations

import http.client
import os
import urllib.error
import urllib.request
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import IO, Any, Protocol

import anyio.to_thread
import orjson

from pipeline.config import RunConfig
from pipeline.config.explain import bracketed
from pipeline.config.load import ENVIRONMENT_PREFIX
from pipeline.errors import AfterplayError
from pipeline.runtime.children import PASSIVE_THREADS, SUPERVISOR, ChildGroup, OrphanReaper
from pipeline.runtime.disk import FULL, left_out, when_room
from pipeline.runtime.engine_keys import key_environments, make_actor_key, write_learner_digest
from pipeline.runtime.process import EVERYWHERE
from pipeline.runtime.run_directory import RunDirectory, read_json, write_bytes_atomically
from pipeline.supervisor.cluster import Cluster
from pipeline.supervisor.plan import REPORTER, Place
from pipeline.supervisor.restarts import Rule


@dataclass(frozen=True, slots=True)
class ProcessSpec:
    """One process: its rule for the machine, its command and its health check."""

    rule: Rule
    command: Sequence[str]
    health_url: str | None = None
    """Answers 200 when healthy. None: the process writes its port to ``processes/NAME.json``."""
    probed: bool = True
    """False: it counts as healthy while it runs."""
    environment: dict[str, str] = field(default_factory=dict)
    here: bool = True
    """False: the command starts the process elsewhere, under another process id."""

    @property
    def name(self) -> str:
        return self.rule.name


def specs_of(
    places: Iterable[Place], config: RunConfig, directory: RunDirectory, cluster: Cluster | None = None
) -> list[ProcessSpec]:
    """The places of a plan as processes of this machine, or as commands that start them on ``cluster``. Everything
    reads the resolved file in ``directory``, which has ``config``; each process gets the keys of its role."""
    make_actor_key(config.engine, directory.path)
    keys, file = key_environments(config.engine), str(directory.config_file)
    write_learner_digest(config.engine, directory.path, keys["learner"])
    specs = []
    for place in places:
        command: Sequence[str] = place.command(file)
        environment = {**place.environment, **keys.get(place.role, keys["other"])}
        if cluster is not None:
            located = replace(place, environment={**place.environment, **cluster.environment(place, config)})
            command = cluster.command(located, command)
        url = f"{config.engine.addresses()[place.index]}/health" if place.role == "engine" else None
        specs.append(
            ProcessSpec(
                place.rule,
                command,
                url,
                probed=not place.rule.once and place.role != REPORTER and place.serves_health,
                environment=environment,
                here=cluster is None,
            )
        )
    return specs


def child_environment(extra: dict[str, str], *, ends_with_us: bool = True) -> dict[str, str]:
    """Our environment without ``AFTERPLAY__…``: the resolved file has those values, and the ports that were 0.

    ``ends_with_us``: the process is a child of this one, and of no other.
    """
    inherited = {key: value for key, value in os.environ.items() if not key.startswith(ENVIRONMENT_PREFIX)}
    ours = {SUPERVISOR: str(os.getpid())} if ends_with_us else {}
    return {**PASSIVE_THREADS, **inherited, "PYTHONUNBUFFERED": "1", **ours, **extra}


PROBE_SECONDS_MAX = 15.0
"""Long, because an engine on a slow core may hold its interpreter for seconds."""


@dataclass(frozen=True, slots=True)
class HealthAnswer:
    """Answer of a process to a health check. Without one ``healthy`` is False and ``state`` empty."""

    healthy: bool
    state: str = ""
    reason: str = ""
    details: dict[str, Any] = field(default_factory=dict)
    notices: tuple[str, ...] = ()
    worked: bool = True
    """True if it has done work since it was started, and for a process that does not tell."""
    progress_age_seconds: float | None = None
    """Since its last progress. None for a process that does not tell."""
    answered: bool = False
    """True if anything came from it."""


def check_health(url: str) -> HealthAnswer:
    """GET a health URL. Blocks; failures of the other side never raise."""
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(url, timeout=PROBE_SECONDS_MAX) as reply:
            return _read(True, reply.read(65536))
    except urllib.error.HTTPError as error:
        with error:
            return _read(False, error.read(65536))
    except (OSError, ValueError, http.client.HTTPException):
        return HealthAnswer(False)


def health_url(directory: RunDirectory, name: str, pid: int | None) -> str | None:
    """URL of a role's ``/healthz``, once process ``pid`` has written its port; None: any process."""
    record = read_json(directory.process_file(name))
    if record is None or pid not in (None, record.get("pid")):
        return None
    host = record.get("metrics_host", "127.0.0.1")
    return f"http://{'127.0.0.1' if host in EVERYWHERE else bracketed(host)}:{record['metrics_port']}/healthz"


def _read(healthy: bool, body: bytes) -> HealthAnswer:
    try:
        answer = orjson.loads(body)
    except orjson.JSONDecodeError:
        answer = None
    answer = answer if isinstance(answer, dict) else {}
    details, notices, age = (answer.get(key) for key in ("details", "notices", "progress_age_seconds"))
    return HealthAnswer(
        healthy,
        str(answer.get("state", "serving" if healthy else "")),
        str(answer.get("reason", "")),
        details if isinstance(details, dict) else {},
        tuple(map(str, notices)) if isinstance(notices, list) else (),
        answer.get("worked") is not False,
        age if isinstance(age, float) else None,
        answered=True,
    )


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
            return HealthAnswer(bool(unwritable), reason=unwritable)
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
