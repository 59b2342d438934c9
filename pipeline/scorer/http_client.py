"""Bounded JSON POST requests: limits on requests in flight, seconds, bytes and retries."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import aiohttp
import anyio
import orjson

from pipeline.config.rewards import Service
from pipeline.errors import AfterplayError, ConfigurationError

ANSWER_BYTES_MAX = 16 * 1024 * 1024
KEEPALIVE_SECONDS = 3.0
RETRY_SECONDS, PAUSE_SECONDS_MAX = 0.5, 30.0
"""Before the first retry, and at most: it doubles with each."""
_TRY_AGAIN = frozenset({408, 425, 429, 500, 502, 503, 504})


class ServiceError(AfterplayError):
    """A request failed; ``reason`` is one of ``timeout``, ``unavailable``, ``refused``, ``protocol``."""

    def __init__(self, reason: str, message: str, pause_seconds: float = 0.0) -> None:
        super().__init__(message)
        self.reason = reason
        self.pause_seconds = pause_seconds
        """Wait before the next try that the server asks for."""

    @property
    def passing(self) -> bool:
        """True if another try may help."""
        return self.reason in ("timeout", "unavailable")


class JsonPost:
    """One URL. Use in one event loop and ``await close()`` it.

    Raises :class:`ConfigurationError` when the environment variable of the token is not set."""

    def __init__(self, section: Service, url: str, retried: Callable[[str], None]) -> None:
        self._section, self._url, self._retried = section, url, retried
        self._headers = {"Content-Type": "application/json"}
        if section.api_key_env is not None:
            key = os.environ.get(section.api_key_env)
            if not key:
                raise ConfigurationError(
                    f"scorer: {section.known_as}: expected its token in the environment variable "
                    f"{section.api_key_env}, got none: set it where the replay stage starts"
                )
            self._headers["Authorization"] = f"Bearer {key}"
        self._slots = anyio.CapacityLimiter(section.concurrency)
        self._session: aiohttp.ClientSession | None = None

    async def close(self) -> None:
        """Close the connections. Requests in flight fail."""
        if self._session is not None:
            await self._session.close()
            self._session = None

    async def __call__(self, body: dict[str, Any]) -> Any:
        """The answer to ``body``, to which the section's model and extra keys are added. Raises
        :class:`ServiceError`."""
        section = self._section
        if section.model:
            body = {"model": section.model, **body}
        data = orjson.dumps({**body, **section.extra})
        pause = RETRY_SECONDS
        for attempt in range(section.retries + 1):
            try:
                async with self._slots:
                    return await self._once(data)
            except ServiceError as error:
                if not error.passing or attempt == section.retries:
                    raise
                wait = min(PAUSE_SECONDS_MAX, max(pause, error.pause_seconds))
            self._retried(section.known_as)
            await anyio.sleep(wait)
            pause *= 2
        raise AssertionError("unreachable")

    async def _once(self, data: bytes) -> Any:
        if self._session is None:
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEPALIVE_SECONDS)
            )
        timeout = aiohttp.ClientTimeout(total=self._section.timeout_seconds)
        try:
            async with self._session.post(
                self._url, data=data, headers=self._headers, timeout=timeout, allow_redirects=False
            ) as response:
                answer = await self._read(response)
                status, pause = response.status, _seconds(response.headers.get("Retry-After"))
        except TimeoutError as error:
            raise ServiceError("timeout", f"{self._url}: no answer within {self._section.timeout_seconds} s") from error
        except (aiohttp.ClientError, OSError) as error:
            raise ServiceError("unavailable", f"{self._url}: {type(error).__name__}: {error}") from error
        if status in _TRY_AGAIN:
            raise ServiceError("unavailable", f"{self._url}: HTTP {status}: {_shown(answer)}", pause)
        if status != 200:
            raise ServiceError("refused", f"{self._url}: expected HTTP 200, got {status}: {_shown(answer)}")
        try:
            return orjson.loads(answer)
        except orjson.JSONDecodeError as error:
            raise ServiceError("protocol", f"{self._url}: expected JSON, got {_shown(answer)}") from error

    async def _read(self, response: aiohttp.ClientResponse) -> bytes:
        chunks, size = [], 0
        async for chunk in response.content.iter_any():
            size += len(chunk)
            if size > ANSWER_BYTES_MAX:
                raise ServiceError("protocol", f"{self._url}: expected at most {ANSWER_BYTES_MAX} bytes, got more")
            chunks.append(chunk)
        return b"".join(chunks)


def _seconds(retry_after: str | None) -> float:
    return float(retry_after) if retry_after is not None and retry_after.isascii() and retry_after.isdigit() else 0.0


def _shown(answer: bytes) -> str:
    return answer[:200].decode("utf-8", "replace")
