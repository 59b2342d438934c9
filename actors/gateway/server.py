"""The HTTP side of the gateway: routes to sessions, offers to programs that run elsewhere.

Listens on loopback unless a token is given. A session is found by its path (``/sessions/ID/v1/chat/completions``), by
the header ``X-Session-ID``, or by the API key (``Authorization: Bearer ID``, ``X-API-Key: ID``).
"""

from __future__ import annotations

import hmac
import logging
import socket
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import anyio
from aiohttp import web

from actors.gateway.anthropic import MESSAGES, read_count
from actors.gateway.chat import CHAT
from actors.gateway.dialect import Dialect
from actors.gateway.generate import GENERATE
from actors.gateway.repeats import sent
from actors.gateway.reply import Choice
from actors.gateway.requests import read_report
from actors.gateway.responses import RESPONSES
from actors.gateway.session import Exchange, Session, Start
from actors.servers.connections import BoundedServer, Handler, as_refusal, errors_as_json, json_answer
from actors.servers.refusal import Refusal, read_object
from pipeline.config.explain import bracketed
from pipeline.errors import ConfigurationError

log = logging.getLogger(__name__)
OFFER_SECONDS_MAX = 60.0
"""Longest wait of ``POST /sessions`` for a task."""
TRANSFER_SECONDS_MAX = 60.0
"""Longest time for the body of a request to arrive, and for a stream to be taken."""
BACKLOG = 1024
IGNORED = "X-Afterplay-Ignored"
"""Header of answers: parameters of the request that were left out."""
REPEATED = "X-Afterplay-Repeated"
"""Header of answers: the request was taken for a repeat, and has the reply of the first."""
DIALECTS = (CHAT, MESSAGES, RESPONSES, GENERATE)
OF_SESSION = "/sessions/{session}"
COUNTED = {dialect.path: dialect.name for dialect in DIALECTS} | {
    f"{MESSAGES.path}/count_tokens": "count", "/v1/models": "models", "/sessions": "lease", "/finish": "finish",
}  # fmt: skip
"""Names of the routes in metrics, by their paths without that of a session."""


class Gateway:
    """One server. Early connections wait. Raises :class:`ConfigurationError` if the address is in use."""

    def __init__(
        self,
        host: str,
        port: int,
        token: str | None,
        body_bytes_max: int,
        where: str,
        count: Callable[[str, str], None],
    ) -> None:
        """``where``: the key of the run file, for messages. ``count`` is called with the route and the
        outcome of each call, as :attr:`ActorMetrics.door_calls_total` names them."""
        self._count = count
        self._token = token
        self._body_bytes_max = body_bytes_max
        self._sessions: dict[str, Session] = {}
        self._offers: deque[Session] = deque()
        self._offered = anyio.Event()
        self.listening = anyio.Event()
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._socket = socket.socket(family, socket.SOCK_STREAM)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            self._socket.bind((host, port))
            self._socket.listen(BACKLOG)
        except OSError as error:
            self._socket.close()
            raise ConfigurationError(
                f"{where}: cannot listen on {host}:{port}: {error}; set port to a free one, or to 0"
            ) from error
        name = bracketed(host)
        self.url = f"http://{name}:{self._socket.getsockname()[1]}"

    def add(self, session: Session) -> None:
        """Its calls are taken from here on."""
        self._sessions[session.id] = session

    def offer(self, session: Session) -> None:
        """Give it to the next program that asks for a task."""
        self._offers.append(session)
        self._offered.set()
        self._offered = anyio.Event()

    def remove(self, session: Session) -> None:
        """End a session. Idempotent."""
        session.end()
        self._sessions.pop(session.id, None)
        if session in self._offers:
            self._offers.remove(session)

    def url_of(self, session: Session) -> str:
        return f"{self.url}/sessions/{session.id}"

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[None]:
        """Listen inside the block."""
        async with anyio.create_task_group() as calls:
            application = self._application(calls.start_soon)
            async with BoundedServer(application, keepalive_timeout=75, shutdown_timeout=0.5).running() as runner:
                await web.SockSite(runner, self._socket, backlog=BACKLOG).start()
                self.listening.set()
                yield
            calls.cancel_scope.cancel()

    def close(self) -> None:
        self._socket.close()

    def _application(self, start: Start) -> web.Application:
        app = web.Application(
            middlewares=[errors_as_json(_error), self._accounts], client_max_size=self._body_bytes_max
        )
        for prefix in ("", OF_SESSION):
            for dialect in DIALECTS:
                app.router.add_post(f"{prefix}{dialect.path}", partial(self._ask, dialect=dialect, start=start))
            app.router.add_post(f"{prefix}{MESSAGES.path}/count_tokens", self._count_tokens)
            app.router.add_get(f"{prefix}/v1/models", self._models)
        app.router.add_post("/sessions", self._lease)
        app.router.add_get(OF_SESSION, self._show)
        app.router.add_post(f"{OF_SESSION}/finish", self._finish)
        app.router.add_get("/health", self._health)
        return app

    @web.middleware
    async def _accounts(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Counts calls by their outcome, and tells a session which of its calls were not answered; those of routes that
        do not exist among them."""
        outcome, refusal = "hung_up", None
        try:
            response = await handler(request)
            outcome = "repeated" if REPEATED in response.headers else "ok"
            refusal = response.broken if isinstance(response, _Stream) else None
            return response
        except (Refusal, web.HTTPException) as error:
            refusal = as_refusal(request, error)
            raise
        except ConnectionError:
            raise
        except Exception:
            outcome = "refused"
            raise
        finally:
            resource = request.match_info.route.resource
            if resource is not None and (name := COUNTED.get(resource.canonical.removeprefix(OF_SESSION))) is not None:
                self._count(name, outcome if refusal is None else _outcome(refusal))
            if refusal is not None:
                self._refused(request, refusal)

    def _refused(self, request: web.Request, refusal: Refusal) -> None:
        session = self._session_of(request)
        if session is not None and request.method == "POST" and not request.path.endswith("/finish"):
            session.refused(refusal)

    async def _ask(self, request: web.Request, *, dialect: Dialect, start: Start) -> web.StreamResponse:
        session, body = self._session(request), await _body(request)
        read = partial(dialect.read, body, session.policy.sampling, session.rules)
        async with session.asking(sent(dialect.name, request.headers, body), read, start) as (exchange, repeated):
            headers = {IGNORED: ", ".join(exchange.call.ignored)} if exchange.call.ignored else {}
            headers |= {REPEATED: "true"} if repeated else {}
            if exchange.call.stream:
                return await _stream(request, dialect, session, exchange, headers)
            response = json_answer(dialect.body(await session.answer(exchange)), headers=headers)
            with anyio.fail_after(TRANSFER_SECONDS_MAX):
                await response.prepare(request)
                await response.write_eof()
                _deliver(request, exchange)
            return response

    async def _count_tokens(self, request: web.Request) -> web.Response:
        session, body = self._session(request), await _body(request)
        n_tokens = await session.count(partial(read_count, body, session.policy.sampling, session.rules))
        return json_answer({"input_tokens": n_tokens})

    async def _models(self, request: web.Request) -> web.Response:
        session = self._session(request)
        card = {"id": session.policy.model, "object": "model", "created": 0, "owned_by": "afterplay"}
        return json_answer({"object": "list", "data": [{**card, "max_model_len": session.policy.context_max}]})

    async def _finish(self, request: web.Request) -> web.Response:
        session = self._session(request)
        session.finish(read_report(read_object(await _body(request) or b"{}")))
        return json_answer({"finished": True})

    async def _show(self, request: web.Request) -> web.Response:
        return json_answer(self._view(self._session(request)))

    async def _lease(self, request: web.Request) -> web.Response:
        given = _bearer(request).encode(errors="surrogateescape")
        if self._token is not None and not hmac.compare_digest(given, self._token.encode()):
            raise Refusal(401, "expected the gateway's token as Authorization: Bearer TOKEN", code="invalid_api_key")
        body = read_object(await _body(request) or b"{}")
        seconds = body.get("wait_seconds", 0)
        if not isinstance(seconds, int | float) or not 0 <= seconds <= OFFER_SECONDS_MAX:
            raise Refusal(400, f"wait_seconds: expected 0 to {OFFER_SECONDS_MAX:g}, got {seconds!r}")
        with anyio.move_on_after(seconds):
            while not self._offers:
                await self._offered.wait()
        if not self._offers:
            return web.Response(status=204)
        session = self._offers.popleft()
        session.leased.set()
        return json_answer(self._view(session))

    async def _health(self, request: web.Request) -> web.Response:
        return json_answer({"sessions": len(self._sessions), "offered": len(self._offers)})

    def _view(self, session: Session) -> dict[str, Any]:
        url = self.url_of(session)
        return {
            "session": session.id,
            "url": url,
            "base_url": f"{url}/v1",
            "api_key": session.id,
            "model": session.policy.model,
            "task": session.task,
        }

    def _session_of(self, request: web.Request) -> Session | None:
        """The path decides where it names one: clients have session headers of their own."""
        _, first, *rest = request.path.split("/")
        headers = (request.headers.get("X-Session-ID", ""), _bearer(request), request.headers.get("X-API-Key", ""))
        named = rest[:1] if first == "sessions" else headers
        return next((self._sessions[number] for number in named if number in self._sessions), None)

    def _session(self, request: web.Request) -> Session:
        session = self._session_of(request)
        if session is None:
            raise Refusal(
                404,
                "no such session, or it has ended: call under OPENAI_BASE_URL, or send the header X-Session-ID",
                code="session_not_found",
            )
        session.require_open()
        return session


def _error(request: web.Request, refusal: Refusal) -> Any:
    """The error in the form of the route's dialect; OpenAI's where it has none."""
    dialect = next((dialect for dialect in DIALECTS if f"{dialect.path}/" in f"{request.path}/"), CHAT)
    return dialect.error(refusal)


class _Stream(web.StreamResponse):
    """Server-sent events."""

    broken: Refusal | None = None
    """The error that is the last event."""


def _outcome(refusal: Refusal) -> str:
    if refusal.code in ("episode_limit", "context_length_exceeded"):
        return "limit"
    return {429: "too_many", 503: "engine"}.get(refusal.status, "refused")


async def _stream(
    request: web.Request, dialect: Dialect, session: Session, exchange: Exchange, headers: dict[str, str]
) -> web.StreamResponse:
    """Write events while the replies are sampled, as soon as there is something to show. An error before that has its
    status; one after it is the last event, and the refusal of the request."""
    headers |= {"Content-Type": "text/event-stream; charset=utf-8", "Cache-Control": "no-cache"}
    response, writer = _Stream(headers=headers), None
    shown: list[Choice] = []

    async def write(events: Iterator[bytes]) -> None:
        with anyio.move_on_after(TRANSFER_SECONDS_MAX) as scope:
            for event in events:
                if not response.prepared:
                    await response.prepare(request)
                await response.write(event)
        if scope.cancelled_caught:
            raise ConnectionResetError(f"the client did not take its stream within {TRANSFER_SECONDS_MAX:g} s")

    try:
        while not exchange.done.is_set():
            news = exchange.news
            if exchange.begun is not None:
                writer = writer or dialect.events(exchange.begun)
                shown = exchange.choices(writer.apart)
                await write(writer.more(shown))
            await news.wait()
        answer = await session.answer(exchange)
        pairs = zip(shown, answer.choices, strict=False)
        if not all(whole.reply.content.startswith(part.reply.content) for part, whole in pairs):
            raise Refusal(500, "the reply does not begin with what was streamed of it", code="unreadable_reply")
        await write((writer or dialect.events(answer)).end(answer))
        _deliver(request, exchange)
    except Exception as error:
        if isinstance(error, ConnectionError) or writer is None or not response.prepared:
            raise
        refusal = error if isinstance(error, Refusal) else Refusal(500, f"{type(error).__name__}: {error}")
        response.broken = refusal
        await write(writer.error(refusal))
    await response.write_eof()
    return response


def _deliver(request: web.Request, exchange: Exchange) -> None:
    """The last byte is written: the answer is delivered if the connection is up."""
    if request.transport is not None and not request.transport.is_closing():
        exchange.deliver()


async def _body(request: web.Request) -> bytes:
    """Raises :class:`Refusal` where the client does not send what it announced."""
    with anyio.move_on_after(TRANSFER_SECONDS_MAX):
        return await request.read()
    raise Refusal(408, f"the body did not arrive within {TRANSFER_SECONDS_MAX:g} s", code="request_timeout")


def _bearer(request: web.Request) -> str:
    scheme, _, value = request.headers.get("Authorization", "").partition(" ")
    return value.strip() if scheme.lower() == "bearer" else ""
