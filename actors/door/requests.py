"""What a program asks, read and checked. Pure; believes nothing.

``/v1/chat/completions`` in OpenAI's form and ``/inference/v1/generate`` in vLLM's. What the door cannot do as asked is
a :class:`Refusal` with the status, type and code that OpenAI's clients understand, or it is left out and named in
``ignored``, as the run file says."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import orjson

from actors.engine.base import Sampling
from pipeline.schema import Message

CHARACTERS_MAX = 1_000_000
"""Text of one request: what is longer would hold the actor's loop for seconds while it is tokenised."""
MESSAGES_MAX = 10_000
TOOLS_MAX = 512
CHOICES_MAX = 16
STOPS_MAX = 16
ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}

Key = tuple[Any, ...]
"""What makes two messages the same, whatever a client added to them on the way."""


class Refusal(Exception):
    """An answer other than 200, in OpenAI's form."""

    def __init__(self, status: int, message: str, *, code: str | None = None, param: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.code = code
        self.param = param

    def body(self) -> dict[str, Any]:
        """OpenAI's error object."""
        kind = _KINDS.get(self.status, "server_error" if self.status >= 500 else "invalid_request_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}


_DRAW = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "seed",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
)
_CHAT = frozenset(_DRAW) | {
    *("messages", "tools", "tool_choice", "model", "n", "max_tokens", "max_completion_tokens", "stop", "stream"),
    *("stream_options", "logprobs", "top_logprobs", "logit_bias", "response_format", "functions", "modalities"),
    *("continue_final_message", "add_generation_prompt", "user", "metadata", "store", "safety_identifier"),
}
"""What is understood, and what changes nothing."""
_GENERATE = frozenset(_DRAW) | {
    *("n", "stop", "max_tokens", "logprobs", "prompt_logprobs", "stop_token_ids", "detokenize", "skip_special_tokens"),
}
_KINDS = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}


@dataclass(frozen=True, slots=True)
class Rules:
    """What is done with parameters that are not those of the run."""

    sampling: Literal["ignore", "refuse"] = "ignore"
    """Of how tokens are drawn: they would make the run's policy another one."""
    unsupported: Literal["ignore", "refuse"] = "refuse"
    """Of what a program may rely on in the answer."""


@dataclass(frozen=True, slots=True)
class ChatRequest:
    """One call of ``/v1/chat/completions``."""

    messages: tuple[Message, ...]
    """As a chat template takes them: calls of the assistant have their arguments as objects."""
    keys: tuple[Key, ...]
    """Of each message."""
    tools: tuple[Mapping[str, Any], ...] = ()
    model: str = ""
    n: int = 1
    tokens_max: int | None = None
    stop: tuple[str, ...] = ()
    stream: bool = False
    stream_usage: bool = False
    logprobs: bool = False
    ignored: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class GenerateRequest:
    """One call of ``/inference/v1/generate``."""

    token_ids: tuple[int, ...]
    tokens_max: int | None = None
    logprobs: bool = True
    request_id: str = ""
    ignored: tuple[str, ...] = ()


@dataclass(slots=True)
class _Reader:
    """The parameters of one request, and what was left out of them."""

    body: Mapping[str, Any]
    rules: Rules
    ignored: list[str] = field(default_factory=list)

    def sampling(self, name: str, *same: Any) -> None:
        """A parameter of the draw: only these values (and none) are what happens anyway."""
        value = self.body.get(name)
        if value is None or any(value == known for known in same):
            return
        self._left_out(
            name,
            self.rules.sampling,
            f"{name}={_short(value)} would change how the policy is sampled, which the run file decides; leave it "
            "out, or set sampling_parameters: ignore",
        )

    def unsupported(self, name: str, why: str, *same: Any) -> None:
        """A parameter that the door does not have."""
        value = self.body.get(name)
        if value is None or any(value == known for known in same):
            return
        self._left_out(
            name, self.rules.unsupported, f"{name}={_short(value)}: {why}; leave it out, or set unsupported: ignore"
        )

    def _left_out(self, name: str, rule: str, message: str) -> None:
        if rule == "refuse":
            raise Refusal(400, message, code="unsupported_parameter", param=name)
        self.ignored.append(name)

    def unknown(self, known: frozenset[str]) -> None:
        """Parameters that nobody knows are left out, and named where a header can hold the name."""
        names = sorted(name for name in self.body.keys() - known if self.body[name] is not None)
        self.ignored += [name for name in names if name.isascii() and name.isidentifier() and len(name) <= 64][:32]

    def whole(self, name: str, low: int, high: int) -> int | None:
        value = self.body.get(name)
        if value is None:
            return None
        if type(value) is not int or not low <= value <= high:
            raise _wrong(name, f"a whole number in {low}..{high}", value)
        return value

    def flag(self, name: str) -> bool:
        value = self.body.get(name)
        if value is None or isinstance(value, bool):
            return bool(value)
        raise _wrong(name, "true or false", value)


def read_chat(data: bytes, sampling: Sampling, rules: Rules) -> ChatRequest:
    """Raises :class:`Refusal`."""
    body = read_object(data)
    reader = _Reader(body, rules)
    _check_draw(reader, sampling)
    reader.unsupported("logit_bias", "log-probabilities would not be the policy's", {})
    reader.unsupported("response_format", "replies cannot be forced into a form", {"type": "text"})
    reader.unsupported("top_logprobs", "only log-probabilities of sampled tokens are known", 0)
    reader.unsupported("functions", "give tools instead", [])
    reader.unsupported("modalities", "the policy writes text", ["text"])
    reader.unsupported("continue_final_message", "a reply cannot be begun for the policy", False)
    reader.unsupported("add_generation_prompt", "each call asks for a new reply", True)
    tools = _tools(body.get("tools"))
    choice = body.get("tool_choice")
    if choice == "none":
        tools = ()
    else:
        reader.unsupported("tool_choice", "the policy chooses itself", "auto")
    n = reader.whole("n", 1, CHOICES_MAX) or 1
    options = body.get("stream_options")
    reader.unknown(_CHAT)
    messages, keys = _messages(body.get("messages"))
    tokens_max = reader.whole("max_completion_tokens", 1, 2**31)
    return ChatRequest(
        messages,
        keys,
        tools,
        str(body.get("model") or "")[:256],
        n,
        tokens_max if tokens_max is not None else reader.whole("max_tokens", 1, 2**31),
        _stops(body.get("stop")),
        reader.flag("stream"),
        isinstance(options, dict) and options.get("include_usage") is True,
        reader.flag("logprobs"),
        tuple(reader.ignored),
    )


def read_generate(data: bytes, sampling: Sampling, rules: Rules) -> GenerateRequest:
    """Raises :class:`Refusal`."""
    body = read_object(data)
    ids = body.get("token_ids")
    if not isinstance(ids, list) or not ids or not all(type(i) is int and 0 <= i < 2**31 for i in ids):
        raise _wrong("token_ids", "a list of token ids, at least one", ids)
    parameters = body.get("sampling_params")
    if parameters is None:
        parameters = {}
    if not isinstance(parameters, dict):
        raise _wrong("sampling_params", "an object", parameters)
    reader = _Reader(parameters, rules)
    _check_draw(reader, sampling)
    reader.unsupported("n", "one completion a call", 1)
    reader.unsupported("stop", "completions are token ids; stop_token_ids are the model's own", [], "")
    reader.unsupported("prompt_logprobs", "only log-probabilities of sampled tokens are known")
    tokens_max = reader.whole("max_tokens", 1, 2**31)
    reader.unknown(_GENERATE)
    _Reader(body, rules).unsupported("stream", "completions come whole", False)
    return GenerateRequest(
        tuple(ids),
        tokens_max,
        parameters.get("logprobs") is not None,
        str(body.get("request_id") or "")[:256],
        tuple(reader.ignored),
    )


def read_object(data: bytes) -> dict[str, Any]:
    """A JSON object. Raises :class:`Refusal`."""
    try:
        body = orjson.loads(data)
    except orjson.JSONDecodeError as error:
        raise Refusal(400, f"expected a body of JSON, got what is none: {error}", code="invalid_json") from None
    if not isinstance(body, dict):
        raise Refusal(400, f"expected a JSON object, got {type(body).__name__}", code="invalid_json")
    return body


def key_of(role: str, content: str, calls: Sequence[Mapping[str, Any]] = (), answers: str = "") -> Key:
    """``calls`` with their arguments as objects, ``answers`` the id of the call that is answered."""
    stated = tuple(
        (c["id"], c["function"]["name"], orjson.dumps(c["function"]["arguments"], option=orjson.OPT_SORT_KEYS))
        for c in calls
    )
    return (role, content, stated, answers)


def tools_key(tools: Sequence[Mapping[str, Any]]) -> bytes:
    """Equal for equal tools."""
    return orjson.dumps(list(tools), option=orjson.OPT_SORT_KEYS)


def _check_draw(reader: _Reader, sampling: Sampling) -> None:
    reader.sampling("temperature", sampling.temperature)
    reader.sampling("top_p", sampling.top_p)
    reader.sampling("top_k", sampling.top_k, *((0,) if sampling.top_k == -1 else ()))
    reader.sampling("min_p", 0)
    reader.sampling("seed")
    reader.sampling("presence_penalty", 0)
    reader.sampling("frequency_penalty", 0)
    reader.sampling("repetition_penalty", 1)


def _messages(value: Any) -> tuple[tuple[Message, ...], tuple[Key, ...]]:
    if not isinstance(value, list) or not value or len(value) > MESSAGES_MAX:
        raise _wrong("messages", f"a list of 1 to {MESSAGES_MAX} messages", value)
    messages, keys, n_characters = [], [], 0
    names: dict[Any, str] = {}
    for index, raw in enumerate(value):
        where = f"messages[{index}]"
        role = raw.get("role") if isinstance(raw, dict) else None
        if not isinstance(role, str) or role not in ROLES:
            raise _wrong(f"{where}.role", f"one of {', '.join(ROLES)}", role)
        role = ROLES[role]
        content = _content(raw.get("content"), f"{where}.content")
        n_characters += len(content)
        if n_characters > CHARACTERS_MAX:
            raise Refusal(
                400,
                f"expected messages of at most {CHARACTERS_MAX} characters in all, got more",
                code="context_length_exceeded",
                param="messages",
            )
        calls = _calls(raw.get("tool_calls"), f"{where}.tool_calls") if role == "assistant" else []
        names |= {call["id"]: call["function"]["name"] for call in calls}
        answers = raw.get("tool_call_id") if role == "tool" else None
        if answers is not None and not isinstance(answers, str):
            raise _wrong(f"{where}.tool_call_id", "text", answers)
        extra: dict[str, Any] = {"tool_calls": calls} if calls else {}
        if role == "tool":
            name = raw.get("name") or names.get(answers)
            if isinstance(name, str):
                extra["name"] = name
            if answers is not None:
                extra["tool_call_id"] = answers
        messages.append(Message(role, content, extra))
        keys.append(key_of(role, content, calls, answers or ""))
    return tuple(messages), tuple(keys)


def _content(value: Any, where: str) -> str:
    """Text, also where it is given in parts."""
    if value is None:
        return ""
    if isinstance(value, str):
        return _encodable(value, where)
    if not isinstance(value, list):
        raise _wrong(where, "text, or parts of type text", value)
    texts = []
    for part in value:
        text = part.get("text", part.get("refusal")) if isinstance(part, dict) else None
        if not isinstance(text, str):
            kind = part.get("type") if isinstance(part, dict) else part
            raise _wrong(where, "parts of type text: the policy reads nothing else", kind)
        texts.append(text)
    return _encodable("\n".join(texts), where)


def _encodable(text: str, where: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError:
        raise _wrong(where, "text that is valid Unicode", "a lone surrogate") from None
    return text


def _calls(value: Any, where: str) -> list[dict[str, Any]]:
    if value is None:
        return []
    if not isinstance(value, list):
        raise _wrong(where, "a list of calls", value)
    calls = []
    for raw in value:
        function = raw.get("function") if isinstance(raw, dict) else None
        name = function.get("name") if isinstance(function, dict) else None
        if not isinstance(name, str) or not isinstance(function, dict):
            raise _wrong(where, "calls of the form {id, type: function, function: {name, arguments}}", raw)
        arguments = function.get("arguments")
        if isinstance(arguments, str):
            try:
                arguments = orjson.loads(arguments) if arguments.strip() else {}
            except orjson.JSONDecodeError:
                raise _wrong(where, "arguments that are a JSON object in text", arguments) from None
        if not isinstance(arguments, dict):
            raise _wrong(where, "arguments that are a JSON object", arguments)
        number = raw.get("id")
        stated = {"name": name, "arguments": arguments}
        calls.append({"id": number if isinstance(number, str) else "", "type": "function", "function": stated})
    return calls


def _tools(value: Any) -> tuple[Mapping[str, Any], ...]:
    if value is None:
        return ()
    if not isinstance(value, list) or len(value) > TOOLS_MAX:
        raise _wrong("tools", f"a list of at most {TOOLS_MAX} tools", value)
    tools = []
    for raw in value:
        function = raw.get("function") if isinstance(raw, dict) and raw.get("type", "function") == "function" else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise _wrong("tools", "tools of the form {type: function, function: {name, parameters}}", raw)
        parameters = function.get("parameters") or {"type": "object", "properties": {}}
        if not isinstance(parameters, dict):
            raise _wrong("tools", "parameters that are a JSON schema", parameters)
        told = {
            "name": function["name"],
            "description": str(function.get("description") or ""),
            "parameters": parameters,
        }
        tools.append({"type": "function", "function": told})
    return tuple(tools)


def _stops(value: Any) -> tuple[str, ...]:
    stops = [value] if isinstance(value, str) else value if value is not None else []
    if not isinstance(stops, list) or len(stops) > STOPS_MAX or not all(isinstance(s, str) and s for s in stops):
        raise _wrong("stop", f"text or a list of at most {STOPS_MAX} texts", value)
    return tuple(stops)


def _wrong(param: str, expected: str, came: Any) -> Refusal:
    return Refusal(400, f"{param}: expected {expected}, got {_short(came)}", code="invalid_value", param=param)


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 120 else text[:120] + "…"
