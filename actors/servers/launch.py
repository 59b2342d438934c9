"""Command line and environment of one inference server of a run (``afterplay engine FILE``).

:class:`JoiningEngine` announces its address: it joins a run that is alive, serves, and leaves on SIGTERM by draining.
It *consumes* signals and the server's health; *produces* an announcement every ``RENEW_SECONDS`` while the server is
healthy. To leave it withdraws the announcement, waits until actors and learner have looked again and no request is
under way, at most ``engine.request_seconds_max``, and stops the server. Turns that are longer than one request
(``engine.part_tokens``) continue at other engines from the tokens that they have. A second signal stops at once.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from urllib.parse import urlsplit

import anyio
import anyio.to_thread

from actors.engine.client import EngineClient
from actors.servers import vllm
from actors.servers.authorization import DIGESTS, MIDDLEWARE, locked_environment
from actors.servers.process_group import ENDS_WITH
from actors.servers.progress import limits_environment
from actors.servers.vllm import SERVED_NAME, engine_dtype, has_gpu, vllm_available, vllm_command
from pipeline.config import RunConfig
from pipeline.config.explain import bracketed, free_ports, is_free
from pipeline.config.rollouts import EngineConfig
from pipeline.errors import AfterplayError, ConfigurationError, EngineError
from pipeline.runtime.children import ChildGroup, OrphanReaper, describe_exit, module_command
from pipeline.runtime.engine_addresses import LOOK_SECONDS, RENEW_SECONDS, EngineRegistry
from pipeline.runtime.engine_keys import LEARNER_DIGEST_FILE, find_digests, is_loopback
from pipeline.runtime.logs import configure_logging
from pipeline.runtime.process import ADDRESS, role_name
from pipeline.runtime.run_directory import AWAIT_MODEL, PREPARE_SECONDS_MAX, RunDirectory, take_index
from pipeline.supervisor.plan import Gang

log = logging.getLogger(__name__)

HEALTH_SECONDS = 0.5
"""Time between two looks at a server that is starting, or draining."""

SEEN_SECONDS = 3 * LOOK_SECONDS
"""After this time everybody has seen that the engine has withdrawn."""

STOP_SECONDS_MAX = 8.0
"""Between SIGTERM and SIGKILL of the server."""


class JoiningEngine:
    """One server process and its announcement as ``name``."""

    def __init__(
        self,
        config: RunConfig,
        registry: EngineRegistry,
        name: str,
        url: str,
        belongs: Callable[[], bool] = lambda: True,
    ) -> None:
        """``url``: address at which others reach it. ``belongs``: False once the run is over."""
        self._registry, self._name, self._url, self._belongs = registry, name, url, belongs
        self._start_seconds_max = config.engine.start_seconds_max
        self._drain_seconds_max = config.engine.request_seconds_max
        self._leaving = anyio.Event()

    async def run(self, command: Sequence[str], environment: Mapping[str, str]) -> int:
        """Serve until a signal, the end of the run or of the server. Returns the exit code."""
        with OrphanReaper() as reaper:
            server = ChildGroup(command, reaper, environment=environment)
            code = 0
            async with EngineClient(self._url) as client, anyio.create_task_group() as tasks:
                tasks.start_soon(self._obey, server)
                tasks.start_soon(self._serve, client, server)
                code = await server.wait()
                tasks.cancel_scope.cancel()
            self._withdraw()
        if self._leaving.is_set():
            return 0
        log.error("the server of %s ended by itself: %s", self._name, describe_exit(code))
        return code if code > 0 else 128 - code

    def leave(self) -> None:
        """Withdraw, drain, and end."""
        self._leaving.set()

    async def _obey(self, server: ChildGroup) -> None:
        with anyio.open_signal_receiver(signal.SIGTERM, signal.SIGINT) as signals:
            async for _ in signals:
                if self._leaving.is_set():
                    server.kill()
                self.leave()

    async def _serve(self, client: EngineClient, server: ChildGroup) -> None:
        with anyio.move_on_after(self._start_seconds_max) as starting:
            while not self._leaving.is_set() and not await _healthy(client):
                await self._pause(HEALTH_SECONDS)
        if starting.cancelled_caught:
            log.error("%s was not ready after engine.start_seconds_max=%g", self._name, self._start_seconds_max)
            server.kill()
            return
        announced = False
        while not self._leaving.is_set():
            try:
                self._registry.announce(self._name, self._url)
                if not announced:
                    log.info("%s joins the run at %s", self._name, self._url)
                announced = True
            except OSError as error:
                log.warning("%s cannot announce itself: %s", self._name, error)
            await self._pause(RENEW_SECONDS)
            if not self._belongs():
                log.info("the run of %s is over, or has begun again with other keys", self._name)
                self.leave()
        self._withdraw()
        if announced:
            await self._drain(client)
        await anyio.to_thread.run_sync(server.stop, STOP_SECONDS_MAX)

    async def _drain(self, client: EngineClient) -> None:
        """Wait until nobody sends any more, and what was sent has ended."""
        await anyio.sleep(SEEN_SECONDS)
        with anyio.move_on_after(self._drain_seconds_max):
            while await _requests(client):
                await anyio.sleep(HEALTH_SECONDS)
        log.info("%s has left the run", self._name)

    def _withdraw(self) -> None:
        try:
            self._registry.withdraw(self._name)
        except OSError as error:
            log.warning("%s cannot withdraw, and counts as there for a while: %s", self._name, error)

    async def _pause(self, seconds: float) -> None:
        with anyio.move_on_after(seconds):
            await self._leaving.wait()


async def _healthy(client: EngineClient) -> bool:
    try:
        await client.health()
    except EngineError:
        return False
    return True


async def _requests(client: EngineClient) -> float:
    """Requests at the engine; 0 where it does not answer."""
    try:
        report = await client.report()
    except EngineError:
        return 0.0
    return 0.0 if report is None else report.running + report.waiting


def announced_url(host: str, port: int, replay: str) -> str:
    """Base URL at which others reach an engine that binds ``host``. For a wildcard it has the address of this machine
    by which it reaches the replay stage (``stage.address``). Raises :class:`ConfigurationError` where it cannot.

    >>> announced_url("10.0.0.2", 8100, "ipc://")
    'http://10.0.0.2:8100'
    >>> announced_url("0.0.0.0", 8100, "ipc://")
    'http://127.0.0.1:8100'
    """
    if host in ("0.0.0.0", "::", ""):
        host = _own_address(urlsplit(replay).hostname if replay.startswith("tcp://") else None)
    return f"http://{bracketed(host)}:{port}"


def _own_address(peer: str | None) -> str:
    """Address of this machine on the way to ``peer``; nothing is sent."""
    if peer is None or is_loopback(peer):
        return "127.0.0.1"
    try:
        family, _, _, _, address = socket.getaddrinfo(peer, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(address)
            return str(probe.getsockname()[0])
    except OSError as error:
        raise ConfigurationError(
            f"expected a way from here to the host of stage.address, {peer}, got: {error}. Let its name resolve here, "
            "or give the address of this machine with --set engine.host=ADDRESS"
        ) from error


EMBEDDED_BLOCK_SIZE = 16


def main(
    config: RunConfig,
    index: int | None,
    *,
    await_model: bool = False,
    joins: bool = False,
    port: int | None = None,
    ends_with_run: bool = False,
    gang: Gang | None = None,
) -> int:
    """Replace this process by engine ``index``, 0 if None. One that ``joins`` a run that is alive, and each of
    ``engine.discovery: registry``, is a child process instead, announced in the run directory while it serves.
    ``port``: of one that joins; None: a free one. ``ends_with_run``: nobody else ends it when the run has finished.
    ``gang``: it is one of the parts of an engine on several nodes, of which the first alone is announced. Returns 2 on
    an error, after one line on stderr with the remedy."""
    try:
        if joins and gang is not None:
            raise ConfigurationError("--join is for engines on one node: give --index")
        if port is not None and not joins:
            raise ConfigurationError("--port is for an engine that joins (--join): give --set engine.port=N")
        if joins or (config.engine.discovery == "registry" and (gang is None or not gang.node)):
            return _announced(config, index, await_model, joins, port, gang)
        argv, environment = command(config, index or 0, await_model=await_model, gang=gang)
    except AfterplayError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if ends_with_run:
        argv = in_process_group([ENDS_WITH, str(config.run.path.absolute()), str(config.run.total_steps), *argv])
    elif engine_kind(config)[0] == "vllm":
        argv = in_process_group(argv)
    sys.stdout.flush()
    sys.stderr.flush()
    os.execve(argv[0], argv, environment)


def _announced(
    config: RunConfig, index: int | None, await_model: bool, joins: bool, given: int | None, gang: Gang | None
) -> int:
    engine, directory = config.engine, RunDirectory(config.run.path)
    if engine.colocate != "none":
        raise ConfigurationError(f"engine.colocate is {engine.colocate}, where no engine can join: set it to none")
    own, first = (index, engine.replicas) if joins else (index or 0, 0)
    found, _lock = take_index(directory, "engine", own, first, placed=ADDRESS in os.environ)
    host, port = _joining_address(engine, found, given) if joins else address(config, found)
    argv, environment = command(config, found, await_model=await_model, at=(host, port), gang=gang)
    name, digest = role_name("engine", found), directory.path / LEARNER_DIGEST_FILE
    configure_logging(name, config.run.name)
    before = _content(digest)
    joining = JoiningEngine(
        config,
        EngineRegistry(directory.engines, find_digests(engine, directory.path)),
        name,
        announced_url(host, port, config.stage.address),
        belongs=lambda: before is None or _content(digest) == before,
    )
    return anyio.run(joining.run, argv, environment)


def _content(file: Path) -> bytes | None:
    try:
        return file.read_bytes()
    except OSError:
        return None


def _joining_address(engine: EngineConfig, index: int, given: int | None) -> tuple[str, int]:
    """Host and port of one more engine: the given port, or that of its index if it is free, else another one."""
    if given is not None:
        return engine.host, given
    port = engine.port + index
    return engine.host, port if engine.port and is_free(engine.host, port) else free_ports(engine.host, 1)


def command(
    config: RunConfig,
    index: int,
    *,
    await_model: bool = False,
    at: tuple[str, int] | None = None,
    gang: Gang | None = None,
) -> tuple[list[str], dict[str, str]]:
    """Arguments and environment of engine ``index``, for a process that the caller starts and watches; or of one at
    another address, ``at``; or of its part on a node of ``gang``.

    ``await_model``: the model folder may still be missing; the engine imports its libraries and then waits for it.

    Raises :class:`ConfigurationError`: no such replica, engine is external, port in use, model not prepared, no keys
    for an address beyond loopback, a combination that the engine cannot do.
    """
    engine = config.engine
    if engine.kind == "external":
        raise ConfigurationError("engine.kind is external: the engines at engine.urls are started outside this run")
    if at is None and not 0 <= index < engine.replicas:
        raise ConfigurationError(
            f"expected an engine index of 0 to {engine.replicas - 1} (engine.replicas), got {index}"
        )
    host, port = at or address(config, index)
    model = RunDirectory(config.run.path).model.absolute()
    if not await_model and not (model / "config.json").exists():
        raise ConfigurationError(
            f"no model in {model}: 'afterplay run FILE' prepares it, or 'python -m learner.models.prepare FILE' "
            "alone does"
        )
    if (gang is None or not gang.node) and not is_free(host, port):
        raise ConfigurationError(
            f"port {port} on {host} is in use or may not be bound: stop what listens there, or choose another with "
            "--set engine.port=N (0 under 'afterplay run' takes free ports)"
        )
    waits = {AWAIT_MODEL: str(PREPARE_SECONDS_MAX)} if await_model else {}
    kind, reason = engine_kind(config)
    if kind == "vllm":
        arguments, environment = vllm_command(config, model, host, port, gang)
        environment = locked_environment(engine, {**environment, **waits}, config.run.path)
        return [*arguments, *(["--middleware", MIDDLEWARE] if DIGESTS in environment else [])], environment
    if gang is not None:
        raise ConfigurationError(f"an engine on {gang.nodes} nodes is one of vLLM, but here {reason}")
    if engine.kind == "vllm":
        print(f"note: {reason}; the embedded engine serves instead (the same routes, slower)", file=sys.stderr)
    own = {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", **limits_environment(config.supervisor)}
    if engine.threads:
        own["OMP_NUM_THREADS"] = str(engine.threads)
    environment = {**os.environ, **own, **engine.env, **waits}
    return _embedded_command(config, model, host, port), locked_environment(engine, environment, config.run.path)


def in_process_group(argv: list[str]) -> list[str]:
    """The same command under :mod:`actors.servers.process_group`, which leaves no process behind."""
    return module_command("actors.servers.process_group", *argv)


def engine_kind(config: RunConfig) -> tuple[str, str]:
    """``vllm`` or ``embedded``, and the reason: where vLLM cannot run, a CPU run uses the embedded engine.

    Raises :class:`ConfigurationError` where the run needs vLLM (GPU, GPU weight transfer).
    """
    engine = config.engine
    if engine.kind == "embedded":
        return "embedded", "engine.kind is embedded"
    usable, reason = vllm_available(engine.device)
    if usable:
        return "vllm", reason
    if engine.device == "cuda" or engine.gpu_transfer:
        raise ConfigurationError(f"engine.kind is vllm on a GPU, but {reason}")
    return "embedded", f"vLLM cannot be used: {reason}"


def check_routing_replay(config: RunConfig) -> None:
    """Raises :class:`ConfigurationError` where an engine that this machine starts cannot return its experts."""
    if config.engine.kind == "vllm" and engine_kind(config)[0] == "vllm":
        vllm.check_routing_replay(config)


def address(config: RunConfig, index: int) -> tuple[str, int]:
    """Host and port of engine ``index``. Raises :class:`ConfigurationError` for port 0 outside ``afterplay run``."""
    engine = config.engine
    port = engine.port + index if engine.port else 0
    if engine.urls and not port and index < len(engine.urls):
        port = urlsplit(engine.urls[index]).port or 0
    if not port:
        raise ConfigurationError(
            "engine.port is 0, which only 'afterplay run' can fill in: give --set engine.port=8100"
        )
    return engine.host, port


def _embedded_command(config: RunConfig, model: Path, host: str, port: int) -> list[str]:
    engine, sampling = config.engine, config.sampling
    if engine.gpu_transfer:
        raise ConfigurationError(
            "the embedded engine takes weights as files: set engine.weight_transfer: files or delta"
        )
    if sampling.stop:
        raise ConfigurationError(
            "sampling.stop: the embedded engine does not support stop strings; the end-of-turn token ends a reply"
        )
    flags = {
        "model": model,
        "host": host,
        "port": port,
        "served-name": SERVED_NAME,
        "dtype": engine_dtype(engine, on_cpu=engine.device == "cpu" or not has_gpu()),
        "device": engine.device,
        "threads": engine.threads or 0,
        "max-length": config.model.max_length,
        "max-sequences": engine.max_sequences,
        "kv-cache-gib": engine.kv_cache_gib,
        "block-size": engine.block_size or EMBEDDED_BLOCK_SIZE,
        "return-routed-experts": config.learner.routing_replay,
    }
    options = [f"--{name}={value}" for name, value in flags.items()]
    return module_command("actors.embedded.server", *options, *engine.args)
