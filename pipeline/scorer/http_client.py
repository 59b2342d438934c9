"""Bounded JSON POST requests of judges and reward models: limits on requests in flight, seconds, bytes and retries."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import anyio
import orjson

from pipeline.config.rewards import Service
from pipeline.errors import ConfigurationError, EngineError, EngineRefused, EngineUnavailable
from pipeline.runtime.http import HttpClient, retried

RETRY_SECONDS = 0.5
"""Before the first retry; it doubles with each."""


class JsonPost:
    """The server of one section, at ``url`` and ``route``. Use in one event loop and ``await close()`` it.

    Raises :class:`ConfigurationError` when the environment variable of the token is not set."""

    def __init__(self, section: Service, url: str, route: str, retried: Callable[[str], None]) -> None:
        self._section, self._url, self._route, self._retried = section, url, route, retried
        headers = {}
        if section.api_key_env is not None:
            key = os.environ.get(section.api_key_env)
            if not key:
                raise ConfigurationError(
                    f"scorer: {section.known_as}: expected its token in the environment variable "
                    f"{section.api_key_env}, got none: set it where the replay stage starts"
                )
            headers["Authorization"] = f"Bearer {key}"
        self._http = HttpClient(headers)
        self._slots = anyio.CapacityLimiter(section.concurrency)

    async def close(self) -> None:
        """Close the connections. Requests in flight fail."""
        await self._http.close()

    async def __call__(self, body: dict[str, Any]) -> Any:
        """The answer to ``body``, to which the section's model and extra keys are added. Raises
        :class:`EngineError`."""
        section = self._section
        if section.model:
            body = {"model": section.model, **body}
        data = orjson.dumps({**body, **section.extra})

        async def once() -> Any:
            async with self._slots:
                answer = await self._http.request(
                    "POST", self._url, self._route, data=data, seconds=section.timeout_seconds
                )
            return answer.accepted()

        return await retried(once, section.retries + 1, RETRY_SECONDS, lambda _: self._retried(section.known_as))


def reason_of(error: EngineError) -> str:
    """The reason of a part without a score: ``timeout``, ``unavailable``, ``refused`` or ``protocol``."""
    if not isinstance(error, EngineUnavailable):
        return "refused" if isinstance(error, EngineRefused) else "protocol"
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, TimeoutError):
        cause = cause.__cause__
    return "unavailable" if cause is None else "timeout"
