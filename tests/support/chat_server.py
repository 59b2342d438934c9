"""An OpenAI-compatible chat endpoint on a free loopback port, in a thread: answers what a script says."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any

from aiohttp import web

from tests.support.http_server import in_thread, serving

Script = Callable[[dict[str, Any]], Any]
"""From the body of a request to the reply: its text, a message, or (status, body, headers) of a refusal."""


class ChatServer:
    """``script`` may be changed at any time."""

    def __init__(self, script: Script, models: tuple[str, ...] = ("stand-in",)) -> None:
        self.script = script
        self.models = models
        self.url = ""
        self.requests: list[dict[str, Any]] = []
        self.keys: list[str | None] = []

    async def _chat(self, request: web.Request) -> web.Response:
        body = await request.json()
        self.requests.append(body)
        self.keys.append(request.headers.get("Authorization"))
        said = self.script(body)
        if isinstance(said, tuple):
            status, answer, headers = said
            return web.json_response(answer, status=status, headers=headers)
        message = said if isinstance(said, dict) else {"content": said}
        reason = "tool_calls" if message.get("tool_calls") else "stop"
        choice = {"index": 0, "message": {"role": "assistant", "content": None, **message}, "finish_reason": reason}
        usage = {"prompt_tokens": 10 * len(body["messages"]), "completion_tokens": 5}
        return web.json_response({"object": "chat.completion", "choices": [choice], "usage": usage})

    async def _models(self, request: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [{"id": name} for name in self.models]})

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[ChatServer]:
        app = web.Application()
        app.router.add_post("/v1/chat/completions", self._chat)
        app.router.add_get("/v1/models", self._models)
        async with serving(app) as url:
            self.url = f"{url}/v1"
            yield self


@contextmanager
def chat_server(script: Script, models: tuple[str, ...] = ("stand-in",)) -> Iterator[ChatServer]:
    with in_thread(ChatServer(script, models).serving()) as server:
        yield server
