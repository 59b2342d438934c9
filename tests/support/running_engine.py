"""Engines as context managers, for tests, benchmarks and tools."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from urllib.request import urlopen

import anyio
import anyio.to_thread

from actors.servers.launch import command, in_process_group
from actors.servers.process_group import GRACE_SECONDS
from learner.models.prepare import prepare_model
from pipeline.config import RunConfig
from pipeline.errors import EngineUnavailable
from pipeline.runtime.engine_keys import authorization, find_key
from pipeline.runtime.run_directory import RunDirectory

PROBE_SECONDS_MAX = 2.0
PROBE_PAUSE_SECONDS = 0.1
STOP_SECONDS_MAX = GRACE_SECONDS + 2.0
START_SECONDS_MAX = 240
LOG_TAIL_BYTES = 2000


@dataclass(frozen=True, slots=True)
class RunningEngine:
    """A server that answers."""

    url: str
    process: subprocess.Popen[bytes]
    """The parent of the server; killing it ends the server too."""
    log: Path
    config: RunConfig
    """With the port that was taken."""

    def key(self, role: str) -> str | None:
        """The key of ``actor`` or ``learner``."""
        return find_key(self.config.engine, f"{role}_key")

    @property
    def control(self) -> dict[str, str]:
        """Headers that open its control routes."""
        return authorization(self.key("learner"))

    def kill(self) -> None:
        """kill -9, as a crash test does."""
        self.process.kill()
        self.process.wait(timeout=10)

    def stop(self) -> int:
        """SIGTERM and wait; returns the exit code."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(timeout=STOP_SECONDS_MAX)


def tiny_engine(folder: Path, max_length: int = 128) -> RunConfig:
    """A run in ``folder`` with an embedded engine, whose tiny model is prepared."""
    config = RunConfig.model_validate(
        {
            "run": {"name": "run", "directory": str(folder)},
            "model": {"source": "tiny", "max_length": max_length},
            "engine": {"kind": "embedded", "port": 0, "threads": 1, "start_seconds_max": START_SECONDS_MAX},
        }
    )
    prepare_model(config, RunDirectory(config.run.path).model)
    return config


@asynccontextmanager
async def start_engine(config: RunConfig, index: int = 0) -> AsyncIterator[RunningEngine]:
    """Engine ``index`` of a run whose model is prepared: started, healthy, and gone at the end.

    ``engine.port: 0`` takes a free port. Raises :class:`ConfigurationError` for what :func:`command` refuses and
    :class:`EngineUnavailable` (with the end of its log) when it ends or is not healthy within
    ``engine.start_seconds_max``.
    """
    running = running_engine(config, index)
    with anyio.CancelScope(shield=True):  # bounded by start_seconds_max; cancelled half-way the process would be lost
        engine = await anyio.to_thread.run_sync(running.__enter__)
    try:
        yield engine
    finally:
        with anyio.CancelScope(shield=True):
            await anyio.to_thread.run_sync(running.__exit__, None, None, None)


@contextmanager
def running_engine(config: RunConfig, index: int = 0) -> Iterator[RunningEngine]:
    """:func:`start_engine` for code that is not async."""
    config = with_free_port(config)
    argv, environment = command(config, index)
    log = RunDirectory(config.run.path).logs / f"engine-{index}.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    environment["PYTHONPATH"] = os.pathsep.join(
        filter(None, [str(Path(__file__).parents[2]), environment.get("PYTHONPATH")])
    )
    environment.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # as in a run: threads that spin take the cores of others
    with log.open("ab") as sink:
        process = subprocess.Popen(
            in_process_group(argv), env=environment, stdin=subprocess.DEVNULL, stdout=sink, stderr=sink
        )
    url = f"http://{config.engine.host}:{config.engine.port + index}"
    try:
        _wait_healthy(process, url, log, config.engine.start_seconds_max)
        yield RunningEngine(url, process, log, config)
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(timeout=STOP_SECONDS_MAX)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait(timeout=10)


def with_free_port(config: RunConfig) -> RunConfig:
    """``config`` with ``engine.port`` filled in when it is 0 (for one replica)."""
    if config.engine.port:
        return config
    with socket.socket() as probe:
        probe.bind((config.engine.host, 0))
        port = probe.getsockname()[1]
    return config.model_copy(update={"engine": config.engine.model_copy(update={"port": port, "urls": ()})})


def _wait_healthy(process: subprocess.Popen[bytes], url: str, log: Path, seconds_max: float) -> None:
    deadline = time.monotonic() + seconds_max
    while time.monotonic() < deadline:
        if _healthy(url):
            return
        try:
            code = process.wait(timeout=PROBE_PAUSE_SECONDS)
        except subprocess.TimeoutExpired:
            continue
        raise EngineUnavailable(
            f"engine {url} ended with exit code {code} before it was ready; its log ends:\n{_tail(log)}"
        )
    raise EngineUnavailable(
        f"engine {url} was not healthy within {seconds_max:g} s (engine.start_seconds_max); its log ends:\n{_tail(log)}"
    )


def _healthy(url: str) -> bool:
    try:
        with urlopen(f"{url}/health", timeout=PROBE_SECONDS_MAX) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False


def _tail(log: Path) -> str:
    return log.read_bytes()[-LOG_TAIL_BYTES:].decode("utf-8", "replace").strip()
