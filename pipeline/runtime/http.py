"""HTTP requests to servers that do work for a run: engines, references, judges, reward models, lesson services.

A request has limits on its seconds and on the bytes of its answer, and follows no redirect. :func:`retried` makes it
again.
"""

from __future__ import annotations

import random
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from itertools import count
from typing import Any, Self, TypeVar

import aiohttp
import anyio
import orjson

from pipeline.config.rollouts import ANSWERS_BYTES_MAX
from pipeline.errors import EngineBusy, EngineGone, EngineProtocolError, EngineRefused, EngineUnavailable

T = TypeVar("T")

ANSWER_BYTES_MAX = 16 * 1024 * 1024
CONNECT_SECONDS_MAX = 30.0
"""Long, because thousands of first requests at once may have to wait for a server to accept them."""
KEEPALIVE_SECONDS = 3.0
"""Below the 5 s after which vLLM closes idle connections: a request on a connection that is being closed would fail."""
AGAIN_SECONDS_MAX = 60.0
"""Longest wait before a request is made again."""
TEXT_MAX = 300
"""Characters of an answer in a message."""
_JSON_HEADERS = {"Content-Type": "application/json"}


class AnswerMemory:
    """Bytes of answers that are read at the same time, at most ``bytes_max`` and one answer. Use inside one event
    loop."""

    def __init__(self, bytes_max: int) -> None:
        self.bytes_max = bytes_max
        self.bytes_reserved = 0
        self._released = anyio.Event()

    @asynccontextmanager
    async def reserve(self, n_bytes: int) -> AsyncIterator[None]:
        """Room for one answer, waited for; one that is larger than all the room waits until it is alone."""
        while self.bytes_reserved and self.bytes_reserved + n_bytes > self.bytes_max:
            await self._released.wait()
        self.bytes_reserved += n_bytes
        try:
            yield
        finally:
            self.bytes_reserved -= n_bytes
            released, self._released = self._released, anyio.Event()
            released.set()


@dataclass(frozen=True, slots=True)
class Answer:
    """Status and body of one answer."""

    server: str
    """Its name in messages."""
    method: str
    status: int
    body: bytes
    seconds: float | None
    """Wait that ``Retry-After`` asks for; None where it is absent or a date."""

    @property
    def text(self) -> str:
        """The beginning of the body."""
        return self.body[:TEXT_MAX].decode("utf-8", "replace").strip()

    @property
    def error(self) -> str | None:
        """The message of OpenAI's JSON error object; None if the body is not one (a route that does not exist)."""
        try:
            error = orjson.loads(self.body).get("error")
        except (orjson.JSONDecodeError, AttributeError):
            return None
        if isinstance(error, dict) and isinstance(error.get("message"), str):
            return str(error["message"])[:1000]
        return None

    def json(self) -> Any:
        """The body. Raises :class:`EngineProtocolError` if it is no JSON."""
        try:
            return orjson.loads(self.body)
        except orjson.JSONDecodeError as error:
            raise EngineProtocolError(f"{self.server}: expected JSON, got {self.text!r} ({error})") from error

    def accepted(self) -> Any:
        """The JSON of an answer 200. Raises :class:`EngineUnavailable` for a status that may be better the next time
        (:class:`EngineBusy`: the work was refused for now), :class:`EngineRefused`, :class:`EngineProtocolError`."""
        status, server = self.status, self.server
        if status == 200:
            return self.json()
        if status in (429, 503) and self.method == "POST":
            raise EngineBusy(f"{server} answered HTTP {status}: {self.error or self.text}", self.seconds)
        if status >= 500 or status in (408, 425, 429):
            raise EngineUnavailable(f"{server} answered HTTP {status}: {self.error or self.text}", self.seconds)
        if status >= 400:
            raise EngineRefused(f"{server} refused the request (HTTP {status}): {self.error or self.text}")
        raise EngineProtocolError(f"{server}: expected HTTP 200, got {status} {self.text}")


class HttpClient:
    """Connections, opened when they are needed. Use inside one event loop and ``await close()`` it, or ``async with``.

    ``memory``: of the answers of several clients. ``reuse``: keep connections for further requests. ``proxies``: take
    those of the environment.
    """

    def __init__(
        self,
        headers: Mapping[str, str] | None = None,
        *,
        memory: AnswerMemory | None = None,
        reuse: bool = True,
        proxies: bool = False,
    ) -> None:
        self._headers = headers
        self._memory = memory or AnswerMemory(ANSWERS_BYTES_MAX)
        self._reuse, self._proxies = reuse, proxies
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the connections. Requests in flight fail."""
        session, self._session = self._session, None
        if session is not None:
            await session.close()

    async def request(
        self,
        method: str,
        url: str,
        path: str = "",
        *,
        seconds: float | None,
        connect_seconds: float | None = None,
        data: bytes | None = None,
        headers: Mapping[str, str] | None = None,
        bytes_max: int = ANSWER_BYTES_MAX,
        server: str = "",
        heard: Callable[[bytes], None] | None = None,
    ) -> Answer:
        """The answer of the server at ``url`` to ``path``; ``data`` is JSON; ``server`` names it in messages. ``heard``
        gets the bytes of a body of server-sent events as they come; the answer is without them then. Raises
        :class:`EngineGone` (it takes no connection), :class:`EngineUnavailable`, :class:`EngineProtocolError` (the
        answer is too long)."""
        server = server or url
        if data is not None:
            headers = {**_JSON_HEADERS, **headers} if headers else _JSON_HEADERS
        timeout = aiohttp.ClientTimeout(total=seconds, sock_connect=connect_seconds)
        try:
            async with self._open().request(
                method, url + path, data=data, headers=headers, timeout=timeout, allow_redirects=False
            ) as response:
                streamed = heard is not None and response.content_type == "text/event-stream"
                body = await self._read(response, bytes_max, server, heard if streamed else None)
                return Answer(server, method, response.status, body, _seconds(response.headers.get("Retry-After")))
        except aiohttp.ConnectionTimeoutError as error:
            raise EngineUnavailable(f"{server} did not accept a connection{_within(connect_seconds)}") from error
        except TimeoutError as error:
            raise EngineUnavailable(f"{server} did not answer{path and ' '}{path}{_within(seconds)}") from error
        except aiohttp.ClientConnectorError as error:
            raise EngineGone(f"{server} takes no connection: {error}") from error
        except (aiohttp.ClientError, OSError) as error:
            on = f" on {path}" if path else ""
            raise EngineUnavailable(f"{server} failed{on}: {type(error).__name__}: {error}") from error

    async def _read(
        self, response: aiohttp.ClientResponse, bytes_max: int, server: str, heard: Callable[[bytes], None] | None
    ) -> bytes:
        """The body of an answer, of at most ``bytes_max``, once there is room for it. What ``heard`` gets is not kept,
        and needs no room."""
        length = None if "Content-Encoding" in response.headers else response.content_length
        if length is not None and length > bytes_max:
            raise _too_long(server, bytes_max, f"{length}")
        if heard is not None:
            size = 0
            async for chunk in response.content.iter_any():
                size += len(chunk)
                if size > bytes_max:
                    raise _too_long(server, bytes_max, "more")
                heard(chunk)
            return b""
        async with self._memory.reserve(bytes_max if length is None else length):
            if length is not None:
                return await response.read()
            chunks, size = [], 0
            async for chunk in response.content.iter_any():
                size += len(chunk)
                if size > bytes_max:
                    raise _too_long(server, bytes_max, "more")
                chunks.append(chunk)
            return b"".join(chunks)

    def _open(self) -> aiohttp.ClientSession:
        if self._session is None:
            keepalive_seconds = KEEPALIVE_SECONDS if self._reuse else None
            connector = aiohttp.TCPConnector(limit=0, force_close=not self._reuse, keepalive_timeout=keepalive_seconds)
            self._session = aiohttp.ClientSession(
                connector=connector, cookie_jar=aiohttp.DummyCookieJar(), headers=self._headers, trust_env=self._proxies
            )
        return self._session


async def retried(
    call: Callable[[], Awaitable[T]],
    attempts_max: int,
    again_seconds: float,
    failed: Callable[[EngineUnavailable], object] = lambda error: None,
) -> T:
    """The value of ``call``, which is called again where it raises :class:`EngineUnavailable`, after the wait that the
    server asks for or one that doubles. ``failed`` gets each error but the last."""
    started = time.monotonic()
    for attempt in count(1):
        try:
            return await call()
        except EngineUnavailable as error:
            if attempt >= attempts_max:
                waited = time.monotonic() - started
                if attempt == 1:
                    raise
                raise EngineUnavailable(f"{error}; given up after {attempt} requests in {waited:.0f} s") from error
            failed(error)
            seconds = error.seconds or again_seconds * 2.0 ** (attempt - 1)  # 0 tells no time
        await anyio.sleep(min(seconds, AGAIN_SECONDS_MAX) * random.uniform(1.0, 1.5))
    raise AssertionError("unreachable")


def _seconds(retry_after: str | None) -> float | None:
    return float(retry_after) if retry_after is not None and retry_after.isascii() and retry_after.isdecimal() else None


def _within(seconds: float | None) -> str:
    return "" if seconds is None else f" within {seconds:g} s"


def _too_long(server: str, bytes_max: int, came: str) -> EngineProtocolError:
    return EngineProtocolError(f"{server}: expected an answer of at most {bytes_max} bytes, got {came}")
