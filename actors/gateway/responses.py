"""``/v1/responses`` in OpenAI's form. Pure.

Items of the input that the policy has said (reasoning, a message, function calls) are one message of the assistant. A
response is kept with its session, unless ``store`` is false: ``previous_response_id`` and ``item_reference`` find it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

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
from actors.gateway.dialect import (
    EFFECTLESS,
    Dialect,
    Past,
    ProgramAnswer,
    event,
    stated_calls,
    thought_text,
    token_logprobs,
)
from actors.gateway.reply import ChatReply, Choice
from actors.gateway.requests import DRAW, ParameterRules, Parameters, ReliedOn
from actors.servers.refusal import Refusal, read_object

_LOGPROBS = "message.output_text.logprobs"

_RELIED_ON: ReliedOn = {
    "background": ("a response is answered on its connection", (False,)),
    "conversation": ("give previous_response_id, or the items", ()),
    "prompt": ("there are no stored prompts", ()),
    "truncation": ("the program edits its history", ("disabled",)),
    "context_management": ("the program edits its history", ([],)),
    "top_logprobs": ("only log-probabilities of sampled tokens are known", (0,)),
    "max_tool_calls": ("the program makes the calls", ()),
    "moderation": ("there is none", ()),
}
_ECHOED = ("instructions", "metadata", "previous_response_id", "max_output_tokens", "reasoning", "user")
_UNDERSTOOD = {
    *DRAW, *_RELIED_ON, *_ECHOED, *EFFECTLESS, "input", "tools", "tool_choice", "parallel_tool_calls", "stream",
    "stream_options", "include", "text", "prompt_cache_key", "prompt_cache_retention",
}  # fmt: skip
_READ = {
    "message": {"role", "content"},
    "reasoning": {"content", "summary"},
    "function_call": {"call_id", "name", "arguments"},
    "function_call_output": {"call_id", "name", "output"},
}
"""Fields of an item that reach the prompt, by its type."""


def read_response(
    data: bytes, sampling: Sampling, rules: ParameterRules, past: Past = lambda number: None
) -> ProgramCall:
    """Raises :class:`Refusal`."""
    body = read_object(data)
    reader = Parameters(body, rules)
    reader.draw(sampling)
    reader.relied_on(_RELIED_ON)
    dropped: set[str] = set()
    tools = reader.tools(lambda raw: _tool(raw, dropped))
    reader.unsupported("tool_choice", "the policy chooses itself", "auto", "none")
    text, reasoning = object_of(body, "text"), object_of(body, "reasoning")
    if text.get("format") not in (None, {"type": "text"}):
        reader.refuse_or_ignore("text.format", rules.unsupported, "text.format: replies cannot be forced into a form")
    dropped |= without_effect(text, {"format"}, "text") | without_effect(reasoning, set(), "reasoning")
    include = list_of(body.get("include"), "include", 64)
    dropped |= {"include"} if any(name != _LOGPROBS for name in include) else set()
    found = MessageList()
    instructions = text_of(body.get("instructions"), "instructions")
    if instructions:
        found.add("system", instructions)
    if body.get("previous_response_id") is not None:
        _continue(found, body["previous_response_id"], past)
    _Items(found, past, dropped).read(body.get("input"))
    messages, keys = found.taken()
    reader.unknown(_UNDERSTOOD)
    reader.leave_out(dropped)
    parallel = reader.flag("parallel_tool_calls", True)
    return ProgramCall(
        messages,
        keys,
        tools=tools,
        model=reader.model(),
        tokens_max=reader.whole("max_output_tokens", 1, 2**31),
        stream=reader.flag("stream"),
        logprobs=_LOGPROBS in include,
        calls_max=0 if body.get("tool_choice") == "none" else None if parallel else 1,
        ignored=tuple(reader.ignored),
        kept=reader.flag("store", True),
        stated={
            **{name: body.get(name) for name in _ECHOED},
            "tools": body.get("tools") or [],
            "tool_choice": body.get("tool_choice") or "auto",
            "parallel_tool_calls": parallel,
        },
    )


def _tool(raw: Any, dropped: set[str]) -> dict[str, Any]:
    if not isinstance(raw, dict) or raw.get("type") != "function":
        raise wrong("tools", "tools of the form {type: function, name, parameters}", raw)
    dropped |= without_effect(raw, {"type", "name", "description", "parameters"}, "tools")
    return read_tool(raw.get("name"), raw.get("description"), raw.get("parameters"))


def _continue(found: MessageList, number: Any, past: Past) -> None:
    """The conversation up to an earlier response, without its instructions."""
    answer = past(number.removeprefix("resp_")) if isinstance(number, str) else None
    if answer is None or not answer.call.kept:
        raise Refusal(
            400,
            f"previous_response_id: expected a response of this session that was stored, got {number!r}",
            code="previous_response_not_found",
            param="previous_response_id",
        )
    first = 1 if text_of(answer.call.stated["instructions"], "instructions") else 0
    reply = answer.choices[0].reply
    found.extend((*answer.call.messages[first:], reply.message), (*answer.call.keys[first:], reply.key))


@dataclass(slots=True)
class _Items:
    """Reads the items of an input into ``found``."""

    found: MessageList
    past: Past
    dropped: set[str]
    thought: str = ""
    texts: list[str] = field(default_factory=list)
    calls: list[dict[str, Any]] = field(default_factory=list)
    """Parts of the assistant's message that is being read."""

    def read(self, value: Any) -> None:
        """All items. Raises :class:`Refusal`."""
        if isinstance(value, str):
            value = [{"role": "user", "content": value}]
        for index, raw in enumerate(list_of(value, "input", MESSAGES_MAX)):
            self._add(raw, f"input[{index}]")
        self._end_message()

    def _add(self, raw: Any, where: str) -> None:
        kind = raw.get("type") or "message" if isinstance(raw, dict) else None
        if kind == "item_reference":
            raw = self._referred(raw.get("id"), where)
            kind = raw["type"]
        if not isinstance(kind, str) or kind not in _READ:
            raise wrong(f"{where}.type", f"one of {', '.join(_READ)}, item_reference", kind)
        self.dropped |= without_effect(raw, {"type", "id", "status", *_READ[kind]}, "input")
        if kind == "reasoning":
            self._end_message()
            parts = raw.get("content") or raw.get("summary")
            number = str(raw.get("id") or "").removeprefix("rs_")
            self.thought = thought_text(text_of(parts, f"{where}.content"), number, self.past) if parts else ""
        elif kind == "function_call":
            self.calls.append(read_call(raw.get("call_id"), raw.get("name"), raw.get("arguments"), where))
        elif kind == "function_call_output":
            self._end_message()
            number = raw.get("call_id")
            if not isinstance(number, str):
                raise wrong(f"{where}.call_id", "the id of a call", number)
            self.found.add("tool", text_of(raw.get("output"), f"{where}.output"), answers=number, name=raw.get("name"))
        else:
            role, content = raw.get("role"), text_of(raw.get("content"), f"{where}.content")
            if role not in ("user", "assistant", "system", "developer"):
                raise wrong(f"{where}.role", "user, assistant, system or developer", role)
            if role == "assistant":
                if self.texts or self.calls:
                    self._end_message()
                self.texts.append(content)
            else:
                self._end_message()
                self.found.add("system" if role == "developer" else role, content)

    def _referred(self, number: Any, where: str) -> Mapping[str, Any]:
        """The item that an ``item_reference`` names."""
        answer = self.past(str(number).split("_")[1] if "_" in str(number) else "")
        items = response(answer)["output"] if answer is not None and answer.call.kept else []
        found = next((item for item in items if item["id"] == number), None)
        if found is None:
            raise wrong(f"{where}.id", "an item of a stored response of this session", number)
        return found  # type: ignore[no-any-return]

    def _end_message(self) -> None:
        if self.thought or self.texts or self.calls:
            self.found.add("assistant", self.thought + "".join(self.texts), self.calls)
        self.thought, self.texts, self.calls = "", [], []


def response(answer: ProgramAnswer) -> dict[str, Any]:
    """The object ``response``."""
    choice = answer.choices[0]
    cut = choice.reply.finish_reason == "length"
    status = "incomplete" if cut else "completed"
    scores = token_logprobs(choice, answer.renderer) if answer.call.logprobs else []
    output = _said_items(choice.reply, answer.number, scores, status)
    if not (output or choice.reply.tool_calls):
        output.append(_message_item("", answer.number, scores, status))
    for index, (call_id, name, arguments) in enumerate(stated_calls(choice.reply)):
        item = {"type": "function_call", "call_id": call_id, "name": name, "arguments": arguments}
        output.append({"id": f"fc_{answer.number}_{index}", **item, "status": "completed"})
    usage = {
        "input_tokens": answer.n_prompt,
        "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
        "output_tokens": answer.n_sampled,
        "output_tokens_details": {"reasoning_tokens": len(answer.renderer.encode_text(choice.reply.thought))},
        "total_tokens": answer.n_prompt + answer.n_sampled,
    }
    details = {"reason": "max_output_tokens"} if cut else None
    return {**_head(answer), "status": status, "incomplete_details": details, "output": output, "usage": usage}


def _head(answer: ProgramAnswer) -> dict[str, Any]:
    """The response while it is sampled."""
    return {
        "id": f"resp_{answer.number}",
        "object": "response",
        "created_at": answer.created,
        "status": "in_progress",
        "error": None,
        "incomplete_details": None,
        "model": answer.call.model or answer.model,
        "output": [],
        "store": answer.call.kept,
        "truncation": "disabled",
        "text": {"format": {"type": "text"}},
        "usage": None,
        **answer.call.stated,
    }


def _said_items(reply: ChatReply, number: str, scores: list[Any], status: str) -> list[dict[str, Any]]:
    """The items of what the policy thinks and says."""
    items: list[dict[str, Any]] = []
    if reply.thought_end:
        thought = [{"type": "reasoning_text", "text": reply.thought}]
        items.append({"id": f"rs_{number}", "type": "reasoning", "summary": [], "content": thought})
    if reply.said:
        items.append(_message_item(reply.said, number, scores, status))
    return items


def _message_item(text: str, number: str, scores: list[Any], status: str) -> dict[str, Any]:
    part = {"type": "output_text", "text": text, "annotations": [], "logprobs": scores}
    return {"id": f"msg_{number}", "type": "message", "role": "assistant", "status": status, "content": [part]}


class ResponseEvents:
    """Writes the events of a streamed response."""

    apart = True

    def __init__(self, answer: ProgramAnswer) -> None:
        self._answer = answer
        self._n_events = 0
        self._n_items = 0
        """Items that are written whole."""
        self._n_written: int | None = None
        """Characters of the message, where it is open."""
        self._scores: list[Any] = []
        """Log-probabilities of the tokens so far."""
        self._n_scored = 0
        """Number of these that were written."""

    def more(self, choices: Sequence[Choice]) -> Iterator[bytes]:
        for choice in choices:
            if choice.reply.content:
                if self._answer.call.logprobs:
                    self._scores += token_logprobs(choice, self._answer.renderer, len(self._scores))
                items = _said_items(choice.reply, self._answer.number, self._scores, "in_progress")
                yield from self._items(items, open_end=True)

    def end(self, answer: ProgramAnswer) -> Iterator[bytes]:
        whole = response(answer)
        yield from self._items(whole["output"])
        yield self._sent(whole["status"], response=whole)

    def error(self, refusal: Refusal) -> Iterator[bytes]:
        error = refusal.body()["error"]
        stated = {name: error.get(name) for name in ("code", "message", "param")}
        yield event({"type": "error", "sequence_number": self._n_events, **stated, "error": error}, "error")

    def _sent(self, kind: str, **more: Any) -> bytes:
        self._n_events += 1
        return event({"type": f"response.{kind}", "sequence_number": self._n_events - 1, **more}, f"response.{kind}")

    def _items(self, items: Sequence[dict[str, Any]], *, open_end: bool = False) -> Iterator[bytes]:
        """Events of the news in ``items``. ``open_end``: a message at their end may grow."""
        if not self._n_events:
            yield self._sent("created", response=_head(self._answer))
            yield self._sent("in_progress", response=_head(self._answer))
        for index, item in enumerate(items[self._n_items :], self._n_items):
            if self._n_written is None:
                empty: dict[str, Any] = {"arguments": ""} if item["type"] == "function_call" else {"content": []}
                yield self._sent(
                    "output_item.added", output_index=index, item={**item, **empty, "status": "in_progress"}
                )
            open_message = open_end and item["type"] == "message"
            yield from self._inside(item, {"item_id": item["id"], "output_index": index}, open_message)
            if not open_message:
                yield self._sent("output_item.done", output_index=index, item=item)
                self._n_items, self._n_written = index + 1, None

    def _inside(self, item: dict[str, Any], place: dict[str, Any], is_open: bool) -> Iterator[bytes]:
        """Events of the news in one item."""
        if item["type"] == "function_call":
            yield self._sent("function_call_arguments.delta", **place, delta=item["arguments"])
            yield self._sent("function_call_arguments.done", **place, name=item["name"], arguments=item["arguments"])
            return
        (part,) = item["content"]
        place |= {"content_index": 0}
        kind, text = part["type"], part["text"][self._n_written or 0 :]
        logprobs = {"logprobs": part["logprobs"]} if "logprobs" in part else {}
        new = {name: scores[self._n_scored :] for name, scores in logprobs.items()}
        if self._n_written is None:
            empty = {"text": "", **{name: [] for name in logprobs}}
            yield self._sent("content_part.added", **place, part={**part, **empty})
        if text or self._n_written is None or any(new.values()):
            yield self._sent(f"{kind}.delta", **place, delta=text, **new)
        self._n_written, self._n_scored = len(part["text"]), len(part.get("logprobs", ()))
        if not is_open:
            yield self._sent(f"{kind}.done", **place, text=part["text"], **logprobs)
            yield self._sent("content_part.done", **place, part=part)


RESPONSES = Dialect("responses", "/v1/responses", read_response, response, ResponseEvents)
