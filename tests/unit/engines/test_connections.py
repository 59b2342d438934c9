"""Strangers cannot use up the connections of a server, fill its log, or stay after an answer."""

from __future__ import annotations

import asyncio
import logging
import os
import random
from itertools import islice
from typing import Any

import pytest
from aiohttp import web

from actors.servers import connections
from actors.servers.connections import BoundedServer, parting
from tests.support.hostile_traffic import HttpTarget, requests


class Log(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(self.format(record))


async def answer(request: web.Request) -> web.Response:
    await request.read()
    response = web.Response(text="x")
    return parting(response) if request.path == "/refused" else response


async def serve(body: Any) -> None:
    """``body`` with the port of a server."""
    application = web.Application()
    application.router.add_route("*", "/{path:.*}", answer)
    async with BoundedServer(application, keepalive_timeout=60, shutdown_timeout=0.1).running() as runner:
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        await body(site._server.sockets[0].getsockname()[1])  # type: ignore[union-attr]


async def ask(port: int, path: str = "/") -> bytes:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(f"GET {path} HTTP/1.1\r\nHost: x\r\n\r\n".encode())
    head = await asyncio.wait_for(reader.readuntil(b"x"), 5)
    writer.close()
    return head


async def test_connections_without_a_request_are_closed_oldest_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "WAITING_MAX", 8)

    async def body(port: int) -> None:
        held = [await asyncio.open_connection("127.0.0.1", port) for _ in range(20)]
        for index, (_, writer) in enumerate(held):
            writer.write(b"GET / HTTP/1.1\r\n" if index % 2 else b"G")
        for reader, _ in held[:12]:
            assert await asyncio.wait_for(reader.read(), 5) in (b"", b"x"), "closed by the server"
        assert b"200 OK" in await ask(port)
        for _, writer in held:
            writer.close()

    await serve(body)


async def test_a_connection_that_brings_no_request_in_time_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "SECONDS_MAX", 0.1)

    async def body(port: int) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"POST / HTTP/1.1\r\nHost: x\r\n")
        assert await asyncio.wait_for(reader.read(), 5) == b""
        kept, writer_of_kept = await asyncio.open_connection("127.0.0.1", port)
        for _ in range(3):  # one that asks stays, also between its requests
            writer_of_kept.write(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
            assert b"200 OK" in await asyncio.wait_for(kept.readuntil(b"\r\n\r\nx"), 5)
            await asyncio.sleep(2 * connections.LOOK_SECONDS)
        for one in (writer, writer_of_kept):
            one.close()

    await serve(body)


async def test_an_answer_to_a_stranger_ends_its_connection() -> None:
    async def body(port: int) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"GET /refused HTTP/1.1\r\nHost: x\r\n\r\n")
        assert (await asyncio.wait_for(reader.read(), 5)).endswith(b"x"), "and then its end"
        writer.close()

    await serve(body)


async def test_hostile_requests_write_no_more_than_a_line() -> None:
    seen, log = Log(), logging.getLogger("afterplay.http")

    async def body(port: int) -> None:
        for _, data in islice(requests(random.Random(3), HttpTarget((("POST", "/"),))), 150):
            _, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(data)
            writer.write_eof()
            writer.close()
        for _ in range(20):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(os.urandom(64) + b"\r\n\r\n")
            await asyncio.wait_for(reader.read(), 5)
            writer.close()
        assert b"200 OK" in await ask(port)

    logging.getLogger().addHandler(seen)
    log.filters.clear()
    try:
        await serve(body)
    finally:
        logging.getLogger().removeHandler(seen)
    assert 1 <= len(seen.lines) <= 2 and sum(map(len, seen.lines)) < 1000, seen.lines
