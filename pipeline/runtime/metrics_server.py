"""``/metrics`` and ``/healthz`` from a thread with an event loop of its own, so that they answer while the process is
busy."""

from __future__ import annotations

import asyncio
import logging
import math
import socket
import threading
import time
from collections.abc import Callable
from functools import partial
from types import TracebackType
from typing import Any

import orjson
import uvloop
from aiohttp import web
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest

from pipeline.errors import ConfigurationError

SHARE_MAX = 0.01
"""Share of a core that making the text of the metrics may take. Asked more often, the text is a little old: anybody may
ask, and making it holds up the process whose numbers they are."""
CONNECTIONS_MAX = 32
"""Open connections. The oldest is closed for the next one, so that connections that are held open keep nobody out."""
Health = Callable[[], tuple[bool, dict[str, Any]]]
"""Returns if the process is well, and details about it. Called in the server's thread."""
_SILENT = logging.Logger("afterplay.metrics", logging.CRITICAL + 1)
"""Strangers that leave or send what is not HTTP are not worth a line of the log."""


class MetricsServer:
    """Serves one registry. Use as a context manager: entering binds, leaving closes.

    Raises :class:`ConfigurationError` on entering when the port is in use. ``port`` 0 takes a free one.
    """

    def __init__(self, registry: CollectorRegistry, health: Health, host: str = "127.0.0.1", port: int = 0) -> None:
        self._registry = registry
        self._health = health
        self._host = host
        self._port = port
        self._text, self._text_until = b"", -math.inf
        self._socket: socket.socket | None = None
        self._running = threading.Event()
        self._stop: Callable[[], object] = lambda: None
        self._thread: threading.Thread | None = None
        self.scrapes = 0
        """Reads of ``/metrics``."""
        self.scraped_at = -math.inf
        """Monotonic time of the newest."""

    @property
    def port(self) -> int:
        """The port that was taken (after entering)."""
        return self._socket.getsockname()[1] if self._socket else self._port

    def __enter__(self) -> MetricsServer:
        try:
            family, both = socket.AF_INET, False
            if ":" in self._host:
                family, both = socket.AF_INET6, socket.has_dualstack_ipv6()
            self._socket = socket.create_server(
                (self._host, self._port), family=family, dualstack_ipv6=both, backlog=128
            )
        except OSError as error:
            raise ConfigurationError(
                f"expected to serve /metrics on {self._host}:{self._port}, got: {error.strerror or error}. "
                "Set metrics.port to a free port, or to 0 for any free port"
            ) from error
        serving = self._serve(self._socket)
        self._thread = threading.Thread(target=uvloop.run, args=(serving,), name="metrics", daemon=True)
        self._thread.start()
        self._running.wait()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._thread is not None:
            self._stop()
            self._thread.join(timeout=1)

    async def _serve(self, listening: socket.socket) -> None:
        loop, stopped = asyncio.get_running_loop(), asyncio.Event()
        answering = web.Server(self._answer, access_log=None, logger=_SILENT, lingering_time=0.0)

        def opened() -> asyncio.Protocol:
            for oldest in answering.connections[: 1 - CONNECTIONS_MAX]:
                oldest.force_close()
            return answering()

        server = await loop.create_server(opened, sock=listening)
        self._stop = partial(loop.call_soon_threadsafe, stopped.set)
        self._running.set()
        await stopped.wait()
        server.close()
        await answering.shutdown(0)

    async def _answer(self, request: web.BaseRequest) -> web.Response:
        if request.method not in ("GET", "HEAD"):
            return web.Response(status=405, text=f"expected GET, got {request.method[:100]}\n")
        if request.path == "/metrics":
            if time.monotonic() >= self._text_until:
                started = time.thread_time()
                self._text = generate_latest(self._registry)
                self._text_until = time.monotonic() + (time.thread_time() - started) / SHARE_MAX
            self.scrapes += 1
            self.scraped_at = time.monotonic()
            return web.Response(body=self._text, headers={"Content-Type": CONTENT_TYPE_LATEST})
        if request.path == "/healthz":
            well, details = self._health()
            body = orjson.dumps(details, default=str)
            return web.Response(status=200 if well else 503, body=body, content_type="application/json")
        return web.Response(status=404, text="expected /metrics or /healthz\n")
