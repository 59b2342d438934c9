"""The HTTP client of engines, judges and other servers: bounds of answers, and requests that are made again."""

from __future__ import annotations

import gzip

import pytest
from aiohttp import web

from pipeline.errors import EngineBusy, EngineGone, EngineProtocolError, EngineRefused, EngineUnavailable
from pipeline.runtime import http
from pipeline.runtime.http import HttpClient, retried
from tests.support.http_server import serving

BYTES_MAX = 1000


async def test_a_compressed_answer_counts_with_the_bytes_that_it_becomes() -> None:
    async def respond(request: web.Request) -> web.Response:
        body = b'"' + b"x" * (int(request.path[1:]) - 2) + b'"'
        return web.Response(body=gzip.compress(body), headers={"Content-Encoding": "gzip"})

    async with serving(respond) as url, HttpClient() as client:
        answer = await client.request("GET", url, f"/{BYTES_MAX}", seconds=30, bytes_max=BYTES_MAX)
        assert len(answer.accepted()) == BYTES_MAX - 2
        with pytest.raises(EngineProtocolError, match=f"{url}: expected an answer of at most {BYTES_MAX} bytes"):
            await client.request("GET", url, "/1000000", seconds=30, bytes_max=BYTES_MAX)


@pytest.mark.parametrize(
    ("method", "status", "kind"),
    [
        ("POST", 429, EngineBusy),
        ("POST", 503, EngineBusy),
        ("GET", 503, EngineUnavailable),
        ("GET", 429, EngineUnavailable),
        ("POST", 408, EngineUnavailable),
        ("POST", 500, EngineUnavailable),
        ("POST", 404, EngineRefused),
        ("POST", 302, EngineProtocolError),
        ("POST", 204, EngineProtocolError),
    ],
)
async def test_the_status_decides_what_is_raised_and_redirects_are_not_followed(
    method: str, status: int, kind: type[Exception]
) -> None:
    async def respond(request: web.Request) -> web.Response:
        return web.Response(status=status, headers={"Location": "/other", "Retry-After": "7"})

    async with serving(respond) as url, HttpClient() as client:
        answer = await client.request(method, url, seconds=30)
        with pytest.raises(kind) as raised:
            answer.accepted()
        assert type(raised.value) is kind
        if isinstance(raised.value, EngineUnavailable):
            assert raised.value.seconds == 7


async def test_a_request_waits_as_the_server_asks_or_twice_as_long_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[float] = []

    async def sleep(seconds: float) -> None:
        waits.append(seconds)

    monkeypatch.setattr(http.anyio, "sleep", sleep)
    monkeypatch.setattr(http.random, "uniform", lambda low, high: low)
    errors = [EngineGone("a"), EngineBusy("b", 5.0), EngineBusy("c", 0.0), EngineBusy("d", 3600.0)]
    seen: list[str] = []

    async def call() -> str:
        if errors:
            raise errors.pop(0)
        return "done"

    assert await retried(call, 5, 0.5, lambda error: seen.append(str(error))) == "done"
    assert waits == [0.5, 5.0, 2.0, http.AGAIN_SECONDS_MAX] and seen == ["a", "b", "c", "d"]
    errors = [EngineUnavailable("a"), EngineUnavailable("b")]
    with pytest.raises(EngineUnavailable, match="b; given up after 2 requests in 0 s"):
        await retried(call, 2, 0.5)
    errors = [EngineRefused("no"), EngineRefused("unasked")]
    with pytest.raises(EngineRefused, match="no"):
        await retried(call, 5, 0.5)
