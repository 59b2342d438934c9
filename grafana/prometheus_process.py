"""A real Prometheus for a while: started on a free loopback port, pointed at a list of targets, stopped again."""

from __future__ import annotations

import json
import shutil
import signal
import socket
import subprocess
import tempfile
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import yaml


@dataclass(frozen=True, slots=True)
class Target:
    """Process that Prometheus scrapes: ``job`` label and ``host:port``."""

    job: str
    address: str


class Api:
    """The few calls of Prometheus' HTTP API that are needed. Each raises ``OSError`` when there is no answer."""

    def __init__(self, url: str, timeout_seconds: float = 5.0) -> None:
        self.url = url.rstrip("/")
        self._timeout_seconds = timeout_seconds

    def get(self, path: str, **parameters: Any) -> Any:
        """``data`` of the reply; ValueError with Prometheus' own message when it refuses the query."""
        query = urllib.parse.urlencode(parameters)
        try:
            with urllib.request.urlopen(f"{self.url}{path}?{query}", timeout=self._timeout_seconds) as reply:
                return json.load(reply)["data"]
        except urllib.error.HTTPError as error:
            raise ValueError(f"Prometheus refused {parameters}: {error.read().decode(errors='replace')}") from error

    def ready(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.url}/-/ready", timeout=self._timeout_seconds) as reply:
                return bool(reply.status == 200)
        except OSError:
            return False


class PrometheusProcess:
    """Use as a context manager; ``url`` is valid inside.

    Raises ``FileNotFoundError`` when no ``prometheus`` is installed, ``RuntimeError`` with its log when it fails.
    """

    def __init__(
        self,
        targets: Sequence[Target],
        rules: Path | None = None,
        scrape_interval: str = "500ms",
        start_seconds_max: float = 30.0,
        alertmanager: str = "",
    ) -> None:
        self._targets = tuple(targets)
        self._rules = rules
        self._scrape_interval = scrape_interval
        self._start_seconds_max = start_seconds_max
        self._alertmanagers = [{"static_configs": [{"targets": [alertmanager]}]}] if alertmanager else []
        self._directory: tempfile.TemporaryDirectory[str] | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self.url = ""

    def configuration(self) -> str:
        jobs: dict[str, list[str]] = {}
        for target in self._targets:
            jobs.setdefault(target.job, []).append(target.address)
        return yaml.safe_dump(
            {
                "global": {
                    "scrape_interval": self._scrape_interval,
                    "scrape_timeout": self._scrape_interval,
                    "evaluation_interval": "1s",
                },
                "alerting": {"alertmanagers": self._alertmanagers},
                "rule_files": [str(self._rules.resolve())] if self._rules else [],
                "scrape_configs": [
                    {"job_name": job, "static_configs": [{"targets": addresses}]} for job, addresses in jobs.items()
                ],
            }
        )

    def __enter__(self) -> PrometheusProcess:
        binary = shutil.which("prometheus")
        if binary is None:
            raise FileNotFoundError("expected `prometheus` on PATH, found none: install the package prometheus")
        self._directory = tempfile.TemporaryDirectory(prefix="afterplay-prometheus-")
        root = Path(self._directory.name)
        (root / "prometheus.yml").write_text(self.configuration())
        port = _free_port()
        self.url = f"http://127.0.0.1:{port}"
        with (root / "log").open("wb") as log:
            self._process = subprocess.Popen(
                [
                    binary,
                    f"--config.file={root / 'prometheus.yml'}",
                    f"--storage.tsdb.path={root / 'data'}",
                    f"--web.listen-address=127.0.0.1:{port}",
                ],
                stdout=log,
                stderr=subprocess.STDOUT,
            )
        try:
            self._wait_ready(root / "log")
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def _wait_ready(self, log: Path) -> None:
        assert self._process is not None
        api, pause = Api(self.url), threading.Event()
        deadline = time.monotonic() + self._start_seconds_max
        while not api.ready():
            if self._process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"expected Prometheus at {self.url}, it did not start:\n{log.read_text()[-2000:]}")
            pause.wait(0.05)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._process is not None:
            self._process.send_signal(signal.SIGTERM)
            try:
                self._process.wait(timeout=5)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait(timeout=5)
        if self._directory is not None:
            self._directory.cleanup()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
