"""An engine that joins a run is announced while it serves, and ends only when nothing is under way there."""

from __future__ import annotations

import socket
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import pytest

from actors.servers import launch
from actors.servers import launch as join
from actors.servers.launch import JoiningEngine, announced_url
from pipeline.config import RunConfig
from pipeline.errors import ConfigurationError
from pipeline.runtime.engine_addresses import EngineRegistry
from pipeline.runtime.run_directory import RunDirectory, take_index

pytestmark = pytest.mark.anyio

SERVER = """
import http.server, pathlib, signal, sys
folder = pathlib.Path(sys.argv[2])
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        well = (folder / "healthy").exists()
        body = b"vllm:num_requests_running 1\\n" if (folder / "busy").exists() else b"vllm:num_requests_running 0\\n"
        self.send_response(200 if well else 503)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
    def log_message(self, *arguments): pass
def stop(*arguments):
    (folder / "stopped").touch()
    sys.exit(0)
signal.signal(signal.SIGTERM, stop)
server = http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler)
(folder / "started").touch()
server.serve_forever()
"""


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HEALTH_SECONDS", "SEEN_SECONDS", "RENEW_SECONDS"):
        monkeypatch.setattr(join, name, 0.02)


async def until(look: Callable[[], Any]) -> None:
    with anyio.fail_after(60):
        while not look():
            await anyio.sleep(0.01)


@asynccontextmanager
async def joining(folder: Path, **more: Any) -> AsyncIterator[tuple[JoiningEngine, EngineRegistry, list[int]]]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    registry, codes = EngineRegistry(folder / "engines"), []
    engine = JoiningEngine(RunConfig(), registry, "engine-1", f"http://127.0.0.1:{port}", **more)

    async def run() -> None:
        codes.append(await engine.run([sys.executable, "-S", "-c", SERVER, str(port), str(folder)], {}))

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(run)
        yield engine, registry, codes
        engine.leave()


async def test_an_engine_is_announced_once_it_is_healthy_and_withdrawn_before_it_drains(tmp_path: Path) -> None:
    async with joining(tmp_path) as (engine, registry, codes):
        await until((tmp_path / "started").exists)
        assert registry.read() == ()
        (tmp_path / "busy").touch()
        (tmp_path / "healthy").touch()
        await until(registry.read)
        engine.leave()
        await until(lambda: not registry.read())
        assert not (tmp_path / "stopped").exists() and codes == [], "a request is under way"
        (tmp_path / "busy").unlink()
        await until(lambda: codes)
    assert codes == [0] and (tmp_path / "stopped").exists()


async def test_an_engine_leaves_when_its_run_is_over(tmp_path: Path) -> None:
    (tmp_path / "healthy").touch()
    over: list[bool] = []
    async with joining(tmp_path, belongs=lambda: not over) as (_, registry, codes):
        await until(registry.read)
        over.append(True)
        await until(lambda: codes)
    assert codes == [0] and registry.read() == ()


async def test_a_server_that_ends_by_itself_is_withdrawn_and_its_end_is_told(tmp_path: Path) -> None:
    registry, code = EngineRegistry(tmp_path), None
    registry.announce("engine-1", "http://127.0.0.1:1")
    engine = JoiningEngine(RunConfig(), registry, "engine-1", "http://127.0.0.1:1")
    code = await engine.run([sys.executable, "-S", "-c", "raise SystemExit(7)"], {})
    assert code == 7 and registry.read() == ()


def test_one_more_engine_takes_the_next_index_and_a_port_of_its_own(tmp_path: Path) -> None:
    config = RunConfig.model_validate({"run": {"directory": tmp_path}, "engine": {"replicas": 2, "port": 0}})
    directory = RunDirectory(config.run.path)
    first, lock = take_index(directory, "engine", first=2)
    second, other = take_index(directory, "engine", first=2)
    assert (first, second) == (2, 3)
    assert lock is not None and other is not None
    lock.release()
    other.release()
    host, port = launch._joining_address(config.engine, 2, None)
    assert host == "127.0.0.1" and port > 0
    assert launch._joining_address(config.engine, 2, 8100) == ("127.0.0.1", 8100), "a port that others may reach"
    with pytest.raises(ConfigurationError, match="no engine can join"):
        colocated = config.model_copy(update={"engine": config.engine.model_copy(update={"colocate": "split"})})
        launch._announced(colocated, None, await_model=True, joins=True, given=None, gang=None)


def test_the_announced_address_is_one_that_others_reach() -> None:
    assert announced_url("fd00::2", 8100, "ipc://") == "http://[fd00::2]:8100"
    assert announced_url("0.0.0.0", 8100, "tcp://127.0.0.1:5555") == "http://127.0.0.1:8100"
    assert announced_url("::", 8100, "ipc://") == "http://127.0.0.1:8100"


def test_a_stage_whose_host_has_no_address_here_is_named_with_a_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(*_: object, **__: object) -> None:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(launch.socket, "getaddrinfo", unknown)
    with pytest.raises(ConfigurationError, match=r"elsewhere, got: .*not known.* --set engine\.host=ADDRESS"):
        announced_url("0.0.0.0", 8100, "tcp://elsewhere:5555")
    assert announced_url("10.0.0.2", 8100, "tcp://elsewhere:5555") == "http://10.0.0.2:8100"
