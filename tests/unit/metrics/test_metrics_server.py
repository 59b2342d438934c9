"""The port of the metrics answers whoever asks, whatever others do to it, and costs its process little."""

from __future__ import annotations

import socket
import struct
import time
import urllib.request
from collections.abc import Iterator

import pytest
from prometheus_client import CollectorRegistry, Gauge
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.metrics_core import Metric

from pipeline.runtime.metrics_server import CONNECTIONS_MAX, SHARE_MAX, MetricsServer


@pytest.fixture
def server() -> Iterator[MetricsServer]:
    registry = CollectorRegistry()
    Gauge("x", "x", registry=registry).set(3)
    with MetricsServer(registry, lambda: (True, {})) as running:
        yield running


def get(server: MetricsServer, path: str = "/metrics") -> bytes:
    with urllib.request.urlopen(f"http://127.0.0.1:{server.port}{path}", timeout=5) as answer:
        return answer.read()  # type: ignore[no-any-return]


def connect(server: MetricsServer) -> socket.socket:
    return socket.create_connection(("127.0.0.1", server.port), timeout=5)


def closed(sock: socket.socket) -> bool:
    try:
        return sock.recv(100) == b""
    except ConnectionResetError:
        return True


@pytest.mark.parametrize(("host", "asked"), [("::1", ["[::1]"]), ("::", ["[::1]", "127.0.0.1"])])
def test_metrics_are_served_over_ipv6(host: str, asked: list[str]) -> None:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError as error:
        pytest.skip(f"no IPv6 on this machine: {error}")
    with MetricsServer(CollectorRegistry(), lambda: (True, {}), host) as running:
        for one in asked:
            urllib.request.urlopen(f"http://{one}:{running.port}/healthz", timeout=5).close()


def test_connections_that_are_held_open_keep_nobody_out_and_are_bounded(server: MetricsServer) -> None:
    held = [connect(server) for _ in range(2 * CONNECTIONS_MAX)]
    for sock in held:
        sock.sendall(b"GET /metrics HTTP/1.1\r\nX: ")
    assert b"x 3.0" in get(server) and get(server, "/healthz") == b"{}"
    assert all(map(closed, held[:CONNECTIONS_MAX])), "the oldest were closed"
    for sock in held:
        sock.close()


def test_clients_that_leave_or_send_rubbish_are_not_worth_a_line(
    server: MetricsServer, capfd: pytest.CaptureFixture[str]
) -> None:
    for data in (b"GET /metrics HTTP/1.1\r\n\r\n", b"\xff\xfe\x00 \r\n\r\n", b"GET /x HTTP/9.9\r\n\r\n", b""):
        for reset in (True, False):
            sock = connect(server)
            sock.sendall(data)
            if reset:
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            sock.close()
    assert b"x 3.0" in get(server)
    printed = capfd.readouterr()
    assert printed.out + printed.err == ""


class Slow:
    """A collector that takes a while, and counts."""

    def __init__(self) -> None:
        self.times = 0

    def collect(self) -> Iterator[Metric]:
        self.times += 1
        begun = time.thread_time()
        while time.thread_time() < begun + 0.005:
            pass
        yield GaugeMetricFamily("slow", "slow", value=self.times)


def test_who_asks_all_the_time_does_not_hold_up_the_process() -> None:
    registry, slow = CollectorRegistry(auto_describe=False), Slow()
    registry.register(slow)
    with MetricsServer(registry, lambda: (True, {})) as server:
        made = slow.times
        started = time.monotonic()
        for _ in range(300):
            assert b"slow" in get(server)
        spent, seconds = (slow.times - made) * 0.005, time.monotonic() - started
        assert spent <= 0.005 + 1.5 * SHARE_MAX * seconds
