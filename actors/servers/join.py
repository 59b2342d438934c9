"""An engine that announces its address: it joins a run that is alive, serves, and leaves on SIGTERM by draining.

*consumes* signals and the server's health; *produces* an announcement every ``RENEW_SECONDS`` while the server is
healthy. To leave it withdraws the announcement, waits until actors and learner have looked again and no request is
under way, at most ``engine.request_seconds_max``, and stops the server. Turns that are longer than one request
(``engine.part_tokens``) continue at other engines from the tokens that they have. A second signal stops at once.
"""

from __future__ import annotations

import logging
import signal
import socket
from collections.abc import Callable, Mapping, Sequence
from urllib.parse import urlsplit

import anyio
import anyio.to_thread

from actors.engine.client import EngineClient
from pipeline.config import RunConfig
from pipeline.config.explain import bracketed
from pipeline.errors import EngineError
from pipeline.runtime.children import ChildGroup, OrphanReaper, describe_exit
from pipeline.runtime.engine_addresses import LOOK_SECONDS, RENEW_SECONDS, EngineRegistry
from pipeline.runtime.engine_keys import is_loopback

log = logging.getLogger("afterplay.engine")

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
    by which it reaches the replay stage (``stage.address``).

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
    family, _, _, _, address = socket.getaddrinfo(peer, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(address)
        return str(probe.getsockname()[0])
