"""The client of an OpenAI-compatible chat endpoint (OpenAI, vLLM, llama.cpp, Ollama): messages in, a reply out.

A request that is answered 408, 409, 429 or 5xx, or not at all, is made again up to ``retries`` times, after the wait
that the endpoint asks for or a doubling one. 401, 403 and 404 end the evaluation, because every other request would be
answered the same (:attr:`ChatEndpoint.closed`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any
from urllib.parse import urlsplit, urlunsplit

import orjson

from pipeline.errors import ConfigurationError, EngineError, EngineProtocolError, EngineRefused, EngineUnavailable
from pipeline.runtime.engine_keys import authorization, is_loopback
from pipeline.runtime.http import HttpClient, retried
from pipeline.schema import FinishReason

CONNECT_SECONDS_MAX = 10.0
AGAIN_SECONDS = 1.0
"""Wait before a request is made again: doubled each time."""
_AGAIN = frozenset({408, 409, 425, 429})
_CLOSED = frozenset({401, 403, 404, 405})
_TOO_LONG = ("context_length_exceeded", "exceed_context_size_error", "maximum context length", "context window")
"""Codes and words with which OpenAI, llama.cpp and vLLM refuse a prompt that is too long."""


class PromptTooLong(EngineRefused):
    """The messages are longer than the model's context."""


@dataclass(frozen=True, slots=True)
class ChatAnswer:
    """One reply of the endpoint."""

    text: str
    calls: tuple[tuple[str, str], ...]
    """Tool calls: name and arguments as JSON text, which nobody has checked."""
    reasoning: str
    """Thoughts that the endpoint gives apart from the text."""
    finish_reason: FinishReason
    prompt_tokens: int
    """0 where the endpoint does not say."""
    sampled_tokens: int


def base_url(url: str) -> str:
    """The address in the form of ``OPENAI_BASE_URL``. Raises :class:`ConfigurationError`.

    >>> base_url("http://127.0.0.1:8000"), base_url("https://api.openai.com/v1/chat/completions")
    ('http://127.0.0.1:8000/v1', 'https://api.openai.com/v1')
    """
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.query:
        raise ConfigurationError(f"--url: expected an address such as http://127.0.0.1:8000/v1, got {url!r}")
    path = parts.path.rstrip("/").removesuffix("/chat/completions") or "/v1"
    return urlunsplit((parts.scheme, parts.netloc, path, "", ""))


class ChatEndpoint(HttpClient):
    """One model at one endpoint; use it as an async context manager."""

    def __init__(
        self, url: str, model: str = "", key: str | None = None, *, retries: int = 6, request_seconds_max: float = 600.0
    ) -> None:
        """``key``: sent as ``Authorization: Bearer``."""
        self.url = base_url(url)
        self.model = model
        self.closed: str | None = None
        """Answer that every further request would get too; None: none came."""
        self._retries = retries
        self._seconds_max = request_seconds_max
        self._limit_name = "max_tokens"
        super().__init__(authorization(key), proxies=not is_loopback(urlsplit(self.url).hostname or ""))

    async def models(self) -> list[str]:
        """Names of the models that it lists; empty where it lists none. Raises :class:`ConfigurationError` when nobody
        answers, or not to this key."""
        try:
            status, answer = await self._request("GET", "/models", None)
        except EngineError as error:
            raise ConfigurationError(f"{error}; is it running, and is --url right?") from error
        if status in (401, 403):
            raise ConfigurationError(f"{self.url} does not accept the key (HTTP {status}): set --key")
        listed = answer.get("data") if status == 200 and isinstance(answer, dict) else None
        return [str(m["id"]) for m in listed or () if isinstance(m, dict) and "id" in m]

    async def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]],
        more: Mapping[str, Any],
        failed: Callable[[EngineError], None] = lambda error: None,
    ) -> ChatAnswer:
        """The reply to ``messages``. ``more``: other fields of the request. ``failed`` gets the error of each try but
        the last. Raises :class:`EngineError`: :class:`PromptTooLong` and :class:`EngineRefused` at once, others when
        all tries failed."""
        return await retried(partial(self._chat, messages, tools, more), self._retries + 1, AGAIN_SECONDS, failed)

    async def _chat(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]], more: Mapping[str, Any]
    ) -> ChatAnswer:
        body: dict[str, Any] = {"model": self.model, "messages": messages, **more}
        if tools:
            body["tools"] = tools
        if "max_tokens" in body:
            body[self._limit_name] = body.pop("max_tokens")
        status, answer = await self._request("POST", "/chat/completions", body)
        if status == 400 and self._limit_name == "max_tokens" and "max_completion_tokens" in _words(answer):
            self._limit_name = "max_completion_tokens"  # OpenAI's newer models refuse the older name
            return await self._chat(messages, tools, more)
        if status == 200:
            return self._answer(answer)
        words = f"{self.url} answered HTTP {status}: {_words(answer)}"
        if status in _CLOSED or "insufficient_quota" in _words(answer):
            self.closed = words
            raise EngineRefused(words)
        if any(mark in _words(answer) for mark in _TOO_LONG):
            raise PromptTooLong(words)
        if tools and status < 500 and "tool" in _words(answer):
            words += (
                " (start the server with its tool parser, for vLLM --enable-auto-tool-choice --tool-call-parser NAME, "
                "or give --tools text)"
            )
        raise EngineRefused(words)

    async def _request(self, method: str, path: str, body: dict[str, Any] | None) -> tuple[int, Any]:
        """Status and answer. Raises :class:`EngineUnavailable` for what may be better the next time."""
        data = None if body is None else orjson.dumps(body, option=orjson.OPT_NON_STR_KEYS)
        came = await self.request(
            method, self.url, path, data=data, seconds=self._seconds_max, connect_seconds=CONNECT_SECONDS_MAX
        )
        status = came.status
        try:
            answer = came.json()
        except EngineProtocolError:
            answer = came.text
        if (status in _AGAIN or status >= 500) and "insufficient_quota" not in _words(answer):
            raise EngineUnavailable(f"{self.url} answered HTTP {status}: {_words(answer)}", came.seconds)
        return status, answer

    def _answer(self, answer: Any) -> ChatAnswer:
        try:
            choice = answer["choices"][0]
            message = choice["message"]
            usage = answer.get("usage") or {}
            calls = [call["function"] for call in message.get("tool_calls") or ()]
            return ChatAnswer(
                text=str(message.get("content") or ""),
                calls=tuple((str(call["name"]), _arguments(call.get("arguments"))) for call in calls),
                reasoning=str(message.get("reasoning_content") or message.get("reasoning") or ""),
                finish_reason=FinishReason.LENGTH if choice.get("finish_reason") == "length" else FinishReason.STOP,
                prompt_tokens=int(usage.get("prompt_tokens") or 0),
                sampled_tokens=int(usage.get("completion_tokens") or 0),
            )
        except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
            raise EngineProtocolError(
                f"{self.url}: expected a chat.completion with one choice, got {str(answer)[:300]!r}"
            ) from error


def _arguments(value: Any) -> str:
    """JSON text, also where the endpoint gives an object (Ollama did)."""
    return value if isinstance(value, str) else orjson.dumps(value or {}).decode()


def _words(answer: Any) -> str:
    """The text of an error: OpenAI's object, or what came."""
    error = answer.get("error", answer) if isinstance(answer, dict) else answer
    if isinstance(error, dict):
        parts = [error.get("message"), error.get("code"), error.get("type")]
        return " ".join(str(part) for part in parts if isinstance(part, str))[:1000] or str(error)[:300]
    return str(error)[:1000]
