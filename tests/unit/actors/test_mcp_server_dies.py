"""An MCP server over HTTP belongs to somebody else: when it dies calls fail, and when it is back they go on."""

from __future__ import annotations

import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import anyio
import pytest

from actors.tools.mcp import MCP

SERVER = Path(__file__).with_name("mcp_server.py")
SECONDS = 240.0
"""For two starts of a server on a loaded machine."""
pytestmark = pytest.mark.timeout(400)


@contextmanager
def serving(port: int) -> Iterator[None]:
    with subprocess.Popen([sys.executable, str(SERVER), "--http", str(port)], stderr=subprocess.DEVNULL) as process:
        try:
            yield
        finally:
            process.kill()


async def add(tool: MCP, a: int, b: int) -> str:
    (found,) = (t for t in await tool.tools() if t.name == "add")
    return (await found.execute("e", {"a": a, "b": b})).text


async def answered(tool: MCP, a: int, b: int) -> str:
    """The first answer: a call that meets the old connection fails, the next one waits for the new one."""
    while True:
        with suppress(Exception):
            return await add(tool, a, b)


@pytest.mark.slow
async def test_calls_fail_while_the_server_is_away_and_go_on_when_it_is_back() -> None:
    pytest.importorskip("mcp", reason="pip install mcp")
    pytest.importorskip("uvicorn", reason="pip install uvicorn")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    tool = MCP(url=f"http://127.0.0.1:{port}/mcp", backoff_seconds=0.1, backoff_seconds_max=0.2, ping_seconds=1.0)
    async with anyio.create_task_group() as group:
        group.start_soon(tool.serve)
        with anyio.fail_after(SECONDS):
            with serving(port):
                assert await add(tool, 1, 2) == "3"
            failed = False
            with anyio.move_on_after(3.0) as waiting:
                try:
                    await add(tool, 1, 2)
                except Exception:
                    failed = True
            assert failed or waiting.cancelled_caught, "the caller is told, or its limit ends the call"
            with serving(port):
                assert await answered(tool, 20, 22) == "42"
        assert tool.connections == 2
        group.cancel_scope.cancel()
