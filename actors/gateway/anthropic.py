"""``/v1/messages`` in Anthropic's form. Pure.

With ``thinking`` a closed thought at the beginning of a reply is a block of its own, whose signature is the number of
the answer; without it the thought stays in the text.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import orjson

from actors.engine.base import Sampling
from actors.gateway.conversation import (
    MESSAGES_MAX,
    MessageList,
    ProgramCall,
    list_of,
    object_of,
    read_call,
    read_tool,
    text_of,
    without_effect,
    wrong,
)
from actors.gateway.dialect import EFFECTLESS, Dialect, Past, ProgramAnswer, event, stated_calls, thought_text
from actors.gateway.reply import ChatReply, Choice
from actors.gateway.requests import DRAW, ParameterRules, Parameters, ReliedOn
from actors.servers.refusal import Refusal, read_object

_STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
_KINDS = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
}

_RELIED_ON: ReliedOn = {
    "container": ("the policy has no tools of its own", ()),
    "mcp_servers": ("the policy has no tools of its own", ([],)),
    "context_management": ("the program edits its history", ()),
    "fallbacks": ("there is one policy", ([],)),
}
_UNDERSTOOD = {
    *DRAW, *_RELIED_ON, *EFFECTLESS, "messages", "system", "tools", "tool_choice", "max_tokens", "stop_sequences",
    "stream", "thinking", "output_config", "cache_control",
}  # fmt: skip
_BLOCKS = {"text": {"text"}, "thinking": {"thinking", "signature"}, "tool_use": {"id", "name", "input"},
           "tool_result": {"tool_use_id", "content"}}  # fmt: skip
"""Fields of a block that reach the prompt, by its type."""


def read_messages(
    data: bytes, sampling: Sampling, rules: ParameterRules, past: Past = lambda number: None
) -> ProgramCall:
    """Raises :class:`Refusal`."""
    call = read_count(data, sampling, rules, past)
    if call.tokens_max is None:
        raise wrong("max_tokens", "a whole number", None)
    return call


def read_count(data: bytes, sampling: Sampling, rules: ParameterRules, past: Past = lambda number: None) -> ProgramCall:
    """A request of ``/v1/messages/count_tokens``, which has no ``max_tokens``. Raises :class:`Refusal`."""
    body = read_object(data)
    reader = Parameters(body, rules)
    reader.draw(sampling)
    reader.relied_on(_RELIED_ON)
    dropped: set[str] = set()
    tools = reader.tools(lambda raw: _tool(raw, dropped))
    choice, thinking, output = (object_of(body, name) for name in ("tool_choice", "thinking", "output_config"))
    if choice.get("type") not in (None, "auto", "none"):
        words = f"tool_choice={choice['type']}: the policy chooses itself"
        reader.refuse_or_ignore("tool_choice", rules.unsupported, words)
    if output.get("format"):
        reader.refuse_or_ignore("output_config.format", rules.unsupported, "replies cannot be forced into a form")
    dropped |= without_effect(output, {"format"}, "output_config") | without_effect(thinking, {"type"}, "thinking")
    found = MessageList()
    if body.get("system"):
        found.add("system", text_of(body["system"], "system"))
        _note(body["system"], dropped)
    for index, raw in enumerate(list_of(body.get("messages"), "messages", MESSAGES_MAX)):
        _add(found, raw, f"messages[{index}]", past, dropped)
    messages, keys = found.taken()
    if messages[-1].role == "assistant":
        reader.refuse_or_ignore("messages", rules.unsupported, "messages: a reply cannot be begun for the policy")
    reader.unknown(_UNDERSTOOD)
    reader.leave_out(dropped)
    one = choice.get("disable_parallel_tool_use") is True
    return ProgramCall(
        messages,
        keys,
        tools=tools,
        model=reader.model(),
        tokens_max=reader.whole("max_tokens", 1, 2**31),
        stop=reader.stops("stop_sequences"),
        stream=reader.flag("stream"),
        calls_max=0 if choice.get("type") == "none" else 1 if one else None,
        ignored=tuple(reader.ignored),
        stated={"thinking": thinking.get("type") not in (None, "disabled")},
    )


def _tool(raw: Any, dropped: set[str]) -> dict[str, Any]:
    if not isinstance(raw, dict) or raw.get("type", "custom") not in (None, "custom"):
        raise wrong("tools", "tools of the form {name, description, input_schema}", raw)
    dropped |= without_effect(raw, {"type", "name", "description", "input_schema", "cache_control"}, "tools")
    return read_tool(raw.get("name"), raw.get("description"), raw.get("input_schema"))


def _note(content: Any, dropped: set[str]) -> None:
    """Note the fields of blocks that have no effect."""
    for block in content if isinstance(content, list) else ():
        if isinstance(block, dict):
            read = {"type", "cache_control"} | _BLOCKS.get(str(block.get("type")), set())
            dropped |= without_effect(block, read, "messages")
            _note(block.get("content"), dropped)


def _add(found: MessageList, raw: Any, where: str, past: Past, dropped: set[str]) -> None:
    """One message: its tool results are messages of their own, before or behind its text as they stand in it."""
    role = raw.get("role") if isinstance(raw, dict) else None
    if role not in ("system", "user", "assistant"):
        raise wrong(f"{where}.role", "user, assistant or system", role)
    content = raw.get("content")
    dropped |= without_effect(raw, {"role", "content"}, "messages")
    _note(content, dropped)
    blocks = content if isinstance(content, list) else [{"type": "text", "text": content}]
    texts: list[str] = []
    thought, calls = "", []
    for block in blocks:
        kind = block.get("type") if isinstance(block, dict) else None
        if kind == "tool_result" and role == "user":
            if texts:
                found.add(role, "\n".join(texts))
                texts = []
            answers = block.get("tool_use_id")
            if not isinstance(answers, str):
                raise wrong(f"{where}.content.tool_use_id", "the id of a call", answers)
            found.add("tool", text_of(block.get("content"), f"{where}.content"), answers=answers)
        elif kind == "tool_use" and role == "assistant":
            calls.append(read_call(block.get("id"), block.get("name"), block.get("input"), f"{where}.content"))
        elif kind == "thinking" and role == "assistant":
            text = text_of(block.get("thinking"), f"{where}.content")
            thought += thought_text(text, str(block.get("signature") or ""), past)
        elif kind == "text":
            texts.append(text_of([block], f"{where}.content") if block.get("text") is not None else "")
        else:
            raise wrong(f"{where}.content", f"blocks that a policy of text reads: {', '.join(_BLOCKS)}", kind)
    if texts or calls or thought or not blocks:
        found.add(role, thought + "\n".join(texts), calls)


def message(answer: ProgramAnswer) -> dict[str, Any]:
    """The object ``message``."""
    reply = answer.choices[0].reply
    content = _said_blocks(reply, answer)
    if not (content or reply.tool_calls):
        content.append({"type": "text", "text": ""})
    for number, name, arguments in stated_calls(reply):
        content.append({"type": "tool_use", "id": number, "name": name, "input": orjson.Fragment(arguments)})
    stopped = bool(reply.stop) and reply.finish_reason == "stop"
    return {
        **_head(answer),
        "content": content,
        "stop_reason": "stop_sequence" if stopped else _STOP_REASONS[reply.finish_reason],
        "stop_sequence": reply.stop if stopped else None,
        "usage": {"input_tokens": answer.n_prompt, "output_tokens": answer.n_sampled},
    }


def _head(answer: ProgramAnswer) -> dict[str, Any]:
    model = answer.call.model or answer.model
    return {"id": f"msg_{answer.number}", "type": "message", "role": "assistant", "model": model}


def _said_blocks(reply: ChatReply, answer: ProgramAnswer) -> list[dict[str, Any]]:
    """The blocks of what the policy thinks and says."""
    apart: bool = answer.call.stated["thinking"]
    blocks: list[dict[str, Any]] = []
    if apart and reply.thought_end:
        blocks.append({"type": "thinking", "thinking": reply.thought, "signature": answer.number})
    if text := reply.said if apart else reply.content:
        blocks.append({"type": "text", "text": text})
    return blocks


_EMPTY: dict[str, Any] = {"thinking": "", "signature": "", "text": "", "input": {}}
"""Fields of a block at its start."""


class MessageEvents:
    """Writes the events of a streamed message."""

    def __init__(self, answer: ProgramAnswer) -> None:
        self.apart = answer.call.stated["thinking"]
        self._answer = answer
        self._n_blocks = 0
        """Blocks that are written whole."""
        self._n_written: int | None = None
        """Characters of the block of text, where it is open."""
        self._begun = False

    def more(self, choices: Sequence[Choice]) -> Iterator[bytes]:
        for choice in choices:
            if choice.reply.content:
                yield from self._blocks(_said_blocks(choice.reply, self._answer), open_end=True)

    def end(self, answer: ProgramAnswer) -> Iterator[bytes]:
        whole = message(answer)
        yield from self._blocks(whole["content"])
        ended = {"stop_reason": whole["stop_reason"], "stop_sequence": whole["stop_sequence"]}
        yield _sent("message_delta", delta=ended, usage=whole["usage"])
        yield _sent("message_stop")

    def error(self, refusal: Refusal) -> Iterator[bytes]:
        yield event(error(refusal), "error")

    def _blocks(self, blocks: Sequence[dict[str, Any]], *, open_end: bool = False) -> Iterator[bytes]:
        """Events of the news in ``blocks``. ``open_end``: a text at their end may grow."""
        if not self._begun:
            self._begun = True
            usage = {"input_tokens": self._answer.n_prompt, "output_tokens": 0}
            head = {**_head(self._answer), "content": [], "stop_reason": None, "stop_sequence": None, "usage": usage}
            yield _sent("message_start", message=head)
        for index, block in enumerate(blocks[self._n_blocks :], self._n_blocks):
            if self._n_written is None:
                empty = {name: value for name, value in _EMPTY.items() if name in block}
                yield _sent("content_block_start", index=index, content_block={**block, **empty})
            for delta in self._deltas(block):
                yield _sent("content_block_delta", index=index, delta=delta)
            if not (open_end and block["type"] == "text"):
                yield _sent("content_block_stop", index=index)
                self._n_blocks, self._n_written = index + 1, None

    def _deltas(self, block: dict[str, Any]) -> Iterator[dict[str, Any]]:
        if block["type"] == "tool_use":
            yield {"type": "input_json_delta", "partial_json": orjson.dumps(block["input"]).decode()}
        elif block["type"] == "thinking":
            yield {"type": "thinking_delta", "thinking": block["thinking"]}
            yield {"type": "signature_delta", "signature": block["signature"]}
        else:
            text = block["text"][self._n_written or 0 :]
            if text or self._n_written is None:
                yield {"type": "text_delta", "text": text}
            self._n_written = len(block["text"])


def _sent(kind: str, **more: Any) -> bytes:
    return event({"type": kind, **more}, kind)


def error(refusal: Refusal) -> dict[str, Any]:
    """Anthropic's error object. Clients look for ``prompt is too long`` before they shorten their history."""
    kind = _KINDS.get(refusal.status, "api_error" if refusal.status >= 500 else "invalid_request_error")
    long = "prompt is too long: " if refusal.code == "context_length_exceeded" else ""
    return {"type": "error", "error": {"type": kind, "message": long + refusal.message}}


MESSAGES = Dialect("messages", "/v1/messages", read_messages, message, MessageEvents, error)
