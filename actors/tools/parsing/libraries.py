"""Parsers of other libraries behind our interface: transformers' response templates and vLLM's tool parsers.

Both are third-party code on untrusted text: any error that they raise becomes a :class:`CallError`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

from actors.tools.parsing.base import CallError, Parsed, Thinking, ToolCall, ToolSchema, Unreadable, call
from pipeline.errors import ConfigurationError

log = logging.getLogger(__name__)
Parse = Callable[[str, Sequence[ToolSchema], Thinking], Parsed]


def transformers_parser(tokenizer: Any, where: str = "parser") -> Parse:
    """``tokenizer.parse_response`` with the tokenizer's own ``response_template``.

    Raises :class:`ConfigurationError` for a tokenizer without one."""
    if not callable(getattr(tokenizer, "parse_response", None)) or not getattr(tokenizer, "response_template", None):
        raise ConfigurationError(
            f"{where}: transformers needs a tokenizer with a response_template (transformers 5.13 or newer); "
            "this one has none: name the form that the model writes, such as hermes"
        )

    def read(reply: str, tools: list[dict[str, Any]] | None) -> tuple[Any, Sequence[Any]]:
        message = tokenizer.parse_response(reply, prefix="", tools=tools)
        return message.get("content"), message.get("tool_calls") or ()

    return _safe(read)


def vllm_parser(name: str, tokenizer: Any, where: str = "parser") -> Parse:
    """vLLM's parser ``name``. Importing vLLM costs an actor seconds and hundreds of MB.

    Raises :class:`ConfigurationError` where vLLM is not installed or knows no such parser."""
    try:
        from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
        from vllm.tool_parsers import ToolParserManager
    except ImportError as error:
        raise ConfigurationError(f"{where}: vllm:{name} needs vLLM in the actor's environment: {error}") from error
    try:
        parser_class = ToolParserManager.get_tool_parser(name)
    except KeyError as error:
        raise ConfigurationError(f"{where}: vLLM has no tool parser {name!r}: {error}") from error
    try:
        parser_class(tokenizer, None)
    except Exception as error:
        raise ConfigurationError(f"{where}: vLLM's tool parser {name} does not fit the tokenizer: {error}") from error

    def read(reply: str, tools: list[dict[str, Any]] | None) -> tuple[Any, Sequence[Any]]:
        request = ChatCompletionRequest(messages=[], model="policy", tools=tools)
        found = parser_class(tokenizer, request.tools).extract_tool_calls(reply, request)
        return found.content, [one.model_dump() for one in found.tool_calls] if found.tools_called else ()

    return _safe(read)


def _safe(read: Callable[[str, list[dict[str, Any]] | None], tuple[Any, Sequence[Any]]]) -> Parse:
    """``read`` gives the content and the calls of a reply without its thoughts."""

    def parse(text: str, tools: Sequence[ToolSchema], thinking: Thinking) -> Parsed:
        thought, reply = _thought_and_reply(text, thinking)
        try:
            content, found = read(reply, [dict(tool) for tool in tools] or None)
        except Exception as error:
            return Parsed("", (CallError(f"The reply could not be read: {type(error).__name__}."),))
        if not found:
            return Parsed(text)
        return Parsed(thought + (content if isinstance(content, str) else ""), tuple(map(_call, found)))

    return parse


def _thought_and_reply(text: str, thinking: Thinking) -> tuple[str, str]:
    """(thoughts with which the text begins, the rest)."""
    at = thinking.first_end(text)
    while (thought := thinking.next_thought(text, at))[0] < len(text) and not text[at : thought[0]].strip():
        at = thought[1]
    return text[:at], text[at:]


def _call(one: Any) -> ToolCall | CallError:
    try:
        function = one.get("function", one)
        return call(str(function["name"]), function["arguments"])
    except Unreadable as error:
        return CallError.of(error)
    except (AttributeError, KeyError, TypeError) as error:
        return CallError.of(type(error).__name__)
