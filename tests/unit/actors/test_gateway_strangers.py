"""Requests of strangers to the gateway are answered, and fill no log."""

from __future__ import annotations

import asyncio

import pytest

from actors.gateway.server import Gateway


@pytest.mark.parametrize("headers", [{"Content-Encoding": "gzip"}, {"Transfer-Encoding": "chunked"}])
async def test_a_body_that_cannot_be_read_is_refused_without_a_line_in_the_log(
    headers: dict[str, str], caplog: pytest.LogCaptureFixture
) -> None:
    gateway = Gateway("127.0.0.1", 0, None, 10_000, "x", lambda route, outcome: None)
    async with gateway.serving():
        reader, writer = await asyncio.open_connection("127.0.0.1", int(gateway.url.rpartition(":")[2]))
        lines = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
        length = "" if "Transfer-Encoding" in headers else "Content-Length: 5\r\n"
        writer.write(f"POST /sessions HTTP/1.1\r\nHost: x\r\n{lines}{length}\r\nhello".encode())
        answer = await asyncio.wait_for(reader.read(), 10)
        writer.close()
    assert b" 400 " in answer.split(b"\r\n")[0], answer
    assert [r for r in caplog.records if r.name.startswith("actors.") or r.exc_info] == []
