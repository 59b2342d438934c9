"""Bounds on what strangers may do to an aiohttp server: connections that bring no request, and lines of the log. Its
errors as JSON.

A connection must bring the head of a request within :data:`SECONDS_MAX`, and of those that have not, the oldest are
closed when there are more than :data:`WAITING_MAX`. So they do not use up the descriptors of the process. Answers to
strangers end their connection (:func:`parting`).
"""

from __future__ import annotations

import asyncio
import logging
import re
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from typing import Any

import orjson
from aiohttp import web

from actors.servers.refusal import Refusal

log = logging.getLogger(__name__)
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
SECONDS_MAX = 10.0
WAITING_MAX = 256
LOOK_SECONDS = 0.25
LINE_SECONDS = 10.0
"""Shortest time between two lines about requests that are not HTTP."""


class _OncePerWhile(logging.Filter):
    """Lets one record pass in a while, without its traceback: anybody can cause them as often as they like."""

    def __init__(self) -> None:
        super().__init__()
        self._after = float("-inf")
        self._left_out = 0

    def filter(self, record: logging.LogRecord) -> bool:
        if time.monotonic() < self._after:
            self._left_out += 1
            return False
        error = record.exc_info[1] if record.exc_info else None
        text = f"{record.getMessage()}: {type(error).__name__ if error else 'closed'}: {str(error)[:200]!r}"
        record.msg = f"{text} ({self._left_out} more since the last line)"
        record.args, record.exc_info, record.exc_text = (), None, None
        self._after, self._left_out = time.monotonic() + LINE_SECONDS, 0
        return True


def json_answer(value: Any, status: int = 200, headers: dict[str, str] | None = None) -> web.Response:
    """An answer with a JSON body."""
    return web.Response(body=orjson.dumps(value), status=status, content_type="application/json", headers=headers or {})


def errors_as_json(form: Callable[[web.Request, Refusal], Any] = lambda request, refusal: refusal.body()) -> Any:
    """Middleware that answers errors in a ``form``, else in OpenAI's. Its log lines and answers do not hold a session's
    id."""

    def answer(request: web.Request, refusal: Refusal) -> web.Response:
        return json_answer(form(request, refusal), refusal.status)

    @web.middleware
    async def answering(request: web.Request, handler: Handler) -> web.StreamResponse:
        try:
            return await handler(request)
        except (Refusal, web.HTTPException) as error:
            refusal = as_refusal(request, error)
            told = answer(request, refusal)
            return parting(told) if refusal is not error or refusal.status in (401, 403, 404) else told
        except web.RequestPayloadError as error:  # chunks, lengths or a compression that are none
            return parting(answer(request, Refusal(400, f"the body cannot be read: {error}", code="invalid_body")))
        except (asyncio.CancelledError, ConnectionError):
            raise
        except Exception as error:
            log.exception("%s %s failed", request.method, _public(request))
            return answer(request, Refusal(500, f"{type(error).__name__}: {error}"))

    return answering


def as_refusal(request: web.Request, error: Refusal | web.HTTPException) -> Refusal:
    """Aiohttp's own errors as refusals too."""
    if isinstance(error, Refusal):
        return error
    return Refusal(error.status, f"{request.method} {_public(request)}: {error.reason}")


def _public(request: web.Request) -> str:
    return re.sub(r"^/sessions/[^/]+", "", request.path)  # the id is a secret


def parting(response: web.Response) -> web.Response:
    """The response, after which its connection ends."""
    response.force_close()
    return response


class BoundedServer:
    """A runner of ``application`` whose connections and log lines are bounded (see the module)."""

    def __init__(self, application: web.Application, *, keepalive_timeout: float, shutdown_timeout: float) -> None:
        application.middlewares.insert(0, self._note)
        log = logging.getLogger("afterplay.http")
        if not log.filters:
            log.addFilter(_OncePerWhile())
        self.runner = web.AppRunner(
            application,
            access_log=None,
            logger=log,
            handler_cancellation=True,
            keepalive_timeout=keepalive_timeout,
            shutdown_timeout=shutdown_timeout,
        )
        self._waiting: dict[web.RequestHandler, float] = {}
        self._asked: set[web.RequestHandler] = set()

    @asynccontextmanager
    async def running(self) -> AsyncIterator[web.AppRunner]:
        """Set up inside the block; add sites to it."""
        await self.runner.setup()
        watching = asyncio.create_task(self._watch())
        try:
            yield self.runner
        finally:
            watching.cancel()
            with suppress(asyncio.CancelledError):
                await watching
            await self.runner.cleanup()

    @web.middleware
    async def _note(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        self._asked.add(request.protocol)
        return await handler(request)

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            assert self.runner.server is not None
            for connection in self._late(self.runner.server.connections, time.monotonic()):
                connection.force_close()

    def _late(self, connections: list[web.RequestHandler], now: float) -> list[web.RequestHandler]:
        """Connections to close, oldest first."""
        self._asked &= set(connections)
        self._waiting = {c: self._waiting.get(c, now) for c in connections if c not in self._asked}
        in_order = sorted(self._waiting, key=self._waiting.__getitem__)
        too_many = len(in_order) - WAITING_MAX
        return [c for i, c in enumerate(in_order) if i < too_many or now - self._waiting[c] > SECONDS_MAX]
