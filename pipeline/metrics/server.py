"""``/metrics`` and ``/healthz`` from a thread, so that they answer while the event loop is busy."""

from __future__ import annotations

import contextlib
import math
import socket
import threading
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any

import orjson
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest

from pipeline.errors import ConfigurationError

SHARE_MAX = 0.1
"""Share of the time in which the text of the metrics may be made."""
CONNECTIONS_MAX = 32
RATE_MAX, BURST_MAX = 100.0, 200.0
"""New connections a second that are served, and how many at once: each costs a thread."""
Health = Callable[[], tuple[bool, dict[str, Any]]]
"""Returns if the process is well, and details about it. Called in the server's thread."""


class MetricsServer:
    """Serves one registry. Use as a context manager: entering binds, leaving closes.

    Raises :class:`ConfigurationError` on entering when the port is in use. ``port`` 0 takes a free one.
    """

    def __init__(self, registry: CollectorRegistry, health: Health, host: str = "127.0.0.1", port: int = 0) -> None:
        self._registry = registry
        self._health = health
        self._host = host
        self._port = port
        self._server: ThreadingHTTPServer | None = None
        self._thread: threading.Thread | None = None
        self.scrapes = 0
        """Reads of ``/metrics``."""
        self.scraped_at = -math.inf
        """Monotonic time of the newest."""

    @property
    def port(self) -> int:
        """The port that was taken (after entering)."""
        return self._server.server_address[1] if self._server else self._port

    def __enter__(self) -> MetricsServer:
        names = {
            "health": staticmethod(self._health),
            "scraped": staticmethod(self._scraped),
            "exposition": Exposition(self._registry),
        }
        handler = type("Handler", (_Handler,), names)
        try:
            self._server = _Server((self._host, self._port), handler)
        except OSError as error:
            raise ConfigurationError(
                f"expected to serve /metrics on {self._host}:{self._port}, got: {error.strerror or error}. "
                "Set metrics.port to a free port, or to 0 for any free port"
            ) from error
        self._thread = threading.Thread(
            target=self._server.serve_forever, kwargs={"poll_interval": 0.1}, name="metrics", daemon=True
        )
        self._thread.start()
        return self

    def _scraped(self) -> None:
        self.scrapes += 1
        self.scraped_at = time.monotonic()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()
        if self._thread is not None:
            self._thread.join(timeout=1)


class Exposition:
    """The text of a registry. It is made again at most in :data:`SHARE_MAX` of the time and is otherwise a little old:
    anybody may ask, and making it holds up the process whose numbers they are."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry
        self._lock = threading.Lock()
        self._text = b""
        self._until = -math.inf

    def text(self) -> bytes:
        with self._lock:
            started = time.monotonic()
            if started >= self._until:
                self._text = generate_latest(self._registry)
                finished = time.monotonic()
                self._until = finished + (finished - started) / SHARE_MAX
            return self._text


class _Server(ThreadingHTTPServer):
    """A thread for each connection. With more than :data:`CONNECTIONS_MAX` the oldest is closed, so that connections
    that are held open keep nobody out."""

    daemon_threads = True
    block_on_close = False
    allow_reuse_address = True
    request_queue_size = 128

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._open: dict[socket.socket, None] = {}
        self._changing = threading.Lock()
        self._tokens, self._seen = BURST_MAX, time.monotonic()

    def process_request(self, request: Any, client_address: Any) -> None:
        with self._changing:
            self._open[request] = None
            oldest = next(iter(self._open)) if len(self._open) > CONNECTIONS_MAX else None
            if oldest is not None:
                del self._open[oldest]
        if oldest is not None:
            with contextlib.suppress(OSError):
                oldest.shutdown(socket.SHUT_RDWR)  # its thread notices, and closes it
        super().process_request(request, client_address)

    def verify_request(self, request: Any, client_address: Any) -> bool:
        """False for a connection beyond :data:`RATE_MAX`: it is closed at once, before a thread serves it."""
        now = time.monotonic()
        self._tokens = min(BURST_MAX, self._tokens + RATE_MAX * (now - self._seen))
        self._seen = now
        if self._tokens < 1.0:
            return False
        self._tokens -= 1.0
        return True

    def shutdown_request(self, request: Any) -> None:
        with self._changing:
            self._open.pop(request, None)
        super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that leaves, or sends what is not HTTP, is not worth a traceback in the log."""


class _Handler(BaseHTTPRequestHandler):
    exposition: Exposition
    health: Health
    scraped: Callable[[], None]
    timeout = 10
    server_version = "afterplay"
    sys_version = ""

    def do_GET(self) -> None:
        path = self.path.split("?", 1)[0]
        if path == "/metrics":
            self._answer(200, CONTENT_TYPE_LATEST, self.exposition.text())
            type(self).scraped()
        elif path == "/healthz":
            well, details = type(self).health()
            self._answer(200 if well else 503, "application/json", orjson.dumps(details, default=str))
        else:
            self._answer(404, "text/plain", b"expected /metrics or /healthz\n")

    def _answer(self, status: int, kind: str, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Scrapes are not worth a line of the log."""
