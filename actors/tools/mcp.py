"""``mcp``: the tools of a Model Context Protocol server, over stdio or HTTP.

One connection for each actor, owned by :meth:`MCP.serve`: opened when the actor starts, pinged, and opened again (the
process started again) when it breaks or three calls in a row get no answer. A call that was under way then fails
with that message; it is never repeated. Works with mcp 1.x and 2.x.
"""

from __future__ import annotations

import logging
import math
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import anyio
from pydantic import Field, model_validator
from pydantic.dataclasses import dataclass

from actors.environments.base import STRICT_OPTIONS
from actors.tools.base import NAME_PATTERN, Tool, ToolError, ToolResult, Toolset
from pipeline.errors import ConfigurationError, described

log = logging.getLogger(__name__)

TIMEOUTS_MAX = 3
"""Calls in a row without an answer before the server is started again."""
PAGES_MAX = 100
CONNECTION_CLOSED = -32000
"""JSON-RPC error code of mcp's client for a connection that is gone."""


@dataclass(config=STRICT_OPTIONS)
class MCP(Toolset):
    """Every tool of one server. Needs the extra ``tools``."""

    command: tuple[str, ...] = ()
    """Program and arguments of a server over stdio."""
    env: dict[str, str] = Field(default_factory=dict)
    """More environment variables for it; it does not inherit ours, but for a few such as PATH."""
    url: str | None = None
    """Address of a server over streamable HTTP, for example ``http://127.0.0.1:8000/mcp``."""
    headers: dict[str, str] = Field(default_factory=dict)
    allow: tuple[str, ...] = ()
    """Names of the tools to take; empty: all."""
    prefix: str = ""
    """Prefix of their names, where two servers have tools of one name."""
    connect_seconds_max: float = Field(default=30.0, gt=0, le=600)
    ping_seconds: float = Field(default=10.0, gt=0, le=600)
    """Between two questions whether it is still there."""
    backoff_seconds: float = Field(default=0.5, gt=0, le=60)
    """Before the first new try; doubles up to ``backoff_seconds_max``."""
    backoff_seconds_max: float = Field(default=30.0, gt=0, le=600)

    @model_validator(mode="after")
    def _one_way(self) -> MCP:
        if bool(self.command) == (self.url is not None):
            raise ValueError("expected either command (a server over stdio) or url (over HTTP)")
        return self

    def __post_init__(self) -> None:
        try:
            import mcp  # noqa: F401
        except ImportError as error:
            raise ConfigurationError("the tool mcp needs the package mcp: pip install '.[tools]'") from error
        self.where = self.url or " ".join(self.command)
        """The server, for messages."""
        self.connections = 0
        """Times it was connected."""
        self._session: Any = None
        self._tools: tuple[Tool, ...] = ()
        self._ready = anyio.Event()
        self._broken = anyio.Event()
        self._timeouts = 0

    async def tools(self) -> Sequence[Tool]:
        """Waits until the server was connected once."""
        if not self._tools:
            await self._connected()
        return self._tools

    async def serve(self) -> None:
        wait = self.backoff_seconds
        while True:
            connections = self.connections
            try:
                await self._one_connection()
            except Exception as error:
                log.warning("MCP server %s: %s", self.where, described(error))
            finally:
                self._lost()
            wait = self.backoff_seconds if self.connections > connections else min(2 * wait, self.backoff_seconds_max)
            await anyio.sleep(wait)

    async def call(self, name: str, arguments: Mapping[str, Any]) -> ToolResult:
        """One call of the server's tool ``name``. Raises :class:`ToolError` for what the server says is wrong."""
        session = await self._connected()
        until = anyio.current_effective_deadline()
        try:
            result = await session.call_tool(name, dict(arguments))
        except anyio.get_cancelled_exc_class():
            self._timeouts += anyio.current_time() >= until  # else its episode was given up
            if self._timeouts >= TIMEOUTS_MAX and session is self._session:
                self._lost()
            raise
        except Exception as error:
            code = getattr(getattr(error, "error", None), "code", None)
            if code is not None and code != CONNECTION_CLOSED:
                raise ToolError(str(error)) from error
            # arguments or an answer that mcp refuses say nothing about the connection, which other episodes use
            if session is self._session and not isinstance(error, ValueError | RuntimeError):
                self._lost()
            raise
        self._timeouts = 0
        text = _text(result)
        if _either(result, "is_error", "isError"):
            raise ToolError(text)
        return ToolResult(text)

    async def _connected(self) -> Any:
        while self._session is None:
            await self._ready.wait()
        return self._session

    def _lost(self) -> None:
        """Nobody may use the connection any more; :meth:`serve` makes another."""
        self._session = None
        if self._ready.is_set():  # else somebody waits for it
            self._ready = anyio.Event()
        self._broken.set()

    async def _one_connection(self) -> None:
        """Connect, and stay until it breaks."""
        with anyio.CancelScope(deadline=anyio.current_time() + self.connect_seconds_max) as scope:
            async with self._open() as session:
                await session.initialize()
                if not self._tools:
                    self._tools = await self._listed(session)
                scope.deadline = math.inf
                self._timeouts = 0
                self._broken = anyio.Event()
                self._session = session
                self.connections += 1
                self._ready.set()
                while not self._broken.is_set():
                    with anyio.move_on_after(self.ping_seconds):
                        await self._broken.wait()
                    if not self._broken.is_set():
                        with anyio.fail_after(self.ping_seconds):
                            await session.send_ping()
        if scope.cancelled_caught:
            raise TimeoutError(f"not connected within {self.connect_seconds_max:g} s (connect_seconds_max)")
        raise ConnectionError("the connection broke or calls got no answer")

    @asynccontextmanager
    async def _open(self) -> AsyncIterator[Any]:
        from mcp import ClientSession, StdioServerParameters, stdio_client

        async with AsyncExitStack() as stack:
            if self.url is None:
                parameters = StdioServerParameters(command=self.command[0], args=list(self.command[1:]), env=self.env)
                streams: Any = await stack.enter_async_context(stdio_client(parameters))
            else:
                streams = await stack.enter_async_context(_http(self.url, self.headers))
            yield await stack.enter_async_context(ClientSession(streams[0], streams[1]))

    async def _listed(self, session: Any) -> tuple[Tool, ...]:
        from mcp.types import PaginatedRequestParams

        found: list[Any] = []
        more: dict[str, Any] = {}
        for _ in range(PAGES_MAX):
            page = await session.list_tools(**more)
            found += page.tools
            cursor = _either(page, "next_cursor", "nextCursor")
            if not cursor:
                break
            more = {"params": PaginatedRequestParams(cursor=cursor)}
        missing = sorted(set(self.allow) - {tool.name for tool in found})
        if missing:
            raise ConfigurationError(
                f"MCP server {self.where} has no tools {missing}; it has {[t.name for t in found]}"
            )
        taken = tuple(_Remote(self, tool) for tool in found if not self.allow or tool.name in self.allow)
        if not taken:
            raise ConfigurationError(f"MCP server {self.where} has no tools")
        return taken


class _Remote(Tool):
    """One tool of a server."""

    def __init__(self, server: MCP, tool: Any) -> None:
        self.name = f"{server.prefix}{tool.name}"
        if NAME_PATTERN.fullmatch(self.name) is None:
            raise ConfigurationError(
                f"MCP server {server.where}: a tool is called {self.name!r}; exclude it with allow"
            )
        self.description = tool.description or ""
        self.parameters = _either(tool, "input_schema", "inputSchema") or {"type": "object"}
        self._server = server
        self._remote_name = tool.name

    async def execute(self, episode_key: str, arguments: Mapping[str, Any]) -> ToolResult:
        return await self._server.call(self._remote_name, arguments)


def _http(url: str, headers: Mapping[str, str]) -> Any:
    """The transport: ``streamable_http_client`` of 2.x (with a client of its own for headers), or that of 1.x."""
    from mcp.client import streamable_http

    opener: Any = getattr(streamable_http, "streamable_http_client", None)
    if opener is None:
        old: Any = streamable_http
        return old.streamablehttp_client(url, headers=dict(headers) or None)
    if not headers:
        return opener(url)
    from mcp.shared._httpx_utils import create_mcp_http_client

    return opener(url, http_client=create_mcp_http_client(headers=dict(headers)))


def _text(result: Any) -> str:
    """The texts of an answer, those of embedded files too; of other parts their kinds."""
    texts = ((part.type, getattr(getattr(part, "resource", part), "text", None)) for part in result.content)
    return "\n".join(f"[{kind}]" if text is None else text for kind, text in texts)


def _either(value: Any, new: str, old: str) -> Any:
    return getattr(value, new) if hasattr(value, new) else getattr(value, old, None)
