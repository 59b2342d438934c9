"""A call of an agent program in the form of no dialect: the conversation, and how a reply may be sampled. Pure.

A dialect adds the messages that it reads to a :class:`MessageList`, which checks and bounds them and gives each a key:
messages that say the same have equal keys, whatever a client added to them on the way and whichever dialect states
them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import orjson

from actors.servers.refusal import Refusal
from actors.tools.parsing.base import stated_call
from pipeline.schema import Message

CHARACTERS_MAX = 1_000_000
"""Text of one request."""
MESSAGES_MAX = 10_000
TOOLS_MAX = 512

Key = tuple[Any, ...]
"""Identity of a message, whatever a client added to it on the way."""


@dataclass(frozen=True, slots=True)
class ProgramCall:
    """One call of a program."""

    messages: tuple[Message, ...] = ()
    """Messages as a chat template takes them: calls of the assistant have their arguments as objects."""
    keys: tuple[Key, ...] = ()
    """Key of each message."""
    token_ids: tuple[int, ...] = ()
    """The prompt where a program states token ids; there are no messages then."""
    tools: tuple[Mapping[str, Any], ...] = ()
    model: str = ""
    n: int = 1
    tokens_max: int | None = None
    stop: tuple[str, ...] = ()
    stream: bool = False
    logprobs: bool = False
    calls_max: int | None = None
    """Tool calls that are returned: 0 where the program forbids tools (what the policy says is text), 1 where it
    forbids parallel calls. The prompt tells the tools in any case, and what was sampled is recorded whole."""
    ignored: tuple[str, ...] = ()
    """Names of parameters and fields without effect."""
    kept: bool = False
    """Later calls may refer to it."""
    stated: Mapping[str, Any] = field(default_factory=dict)
    """Parts of the request that its dialect repeats in the answer."""

    @property
    def whole(self) -> tuple[Any, ...]:
        """The prompt in comparable parts; that of a later call begins with it and the reply."""
        return self.keys or self.token_ids

    @property
    def n_characters(self) -> int:
        """Text of the messages."""
        return sum(len(message.content) for message in self.messages)


def wrong(param: str, expected: str, came: Any) -> Refusal:
    """400: ``param`` is not what it has to be."""
    return Refusal(400, f"{param}: expected {expected}, got {shown(came)}", code="invalid_value", param=param)


def shown(value: Any) -> str:
    """A short form for messages."""
    text = repr(value)
    return text if len(text) <= 120 else text[:120] + "…"


def key_of(role: str, content: str, calls: Sequence[Mapping[str, Any]] = (), answers: str = "") -> Key:
    """``calls`` with their arguments as objects, ``answers`` the id of the call that is answered."""
    functions = [(call["id"], call["function"]) for call in calls]
    stated = tuple((n, f["name"], json.dumps(_same_numbers(f["arguments"]), sort_keys=True)) for n, f in functions)
    return (role, content, stated, answers)


def _same_numbers(arguments: Any) -> Any:
    """A JSON value with 1 for 1.0, as programs in JavaScript state it again; read again, because a policy may write
    lists in lists deeper than functions of Python may call themselves."""
    return json.loads(json.dumps(arguments), parse_float=_same_number)


def _same_number(text: str) -> float:
    value = float(text)
    return int(value) if value.is_integer() else value


def arguments_text(arguments: Mapping[str, Any]) -> str:
    """JSON of a call's arguments: a policy may write whole numbers of any size, so not by orjson."""
    return json.dumps(arguments, ensure_ascii=False)


def tools_key(tools: Sequence[Mapping[str, Any]]) -> bytes:
    """Equal for equal tools."""
    return orjson.dumps(list(tools), option=orjson.OPT_SORT_KEYS)


class MessageList:
    """The messages of one request, in their order. Methods raise :class:`Refusal`."""

    def __init__(self) -> None:
        self.messages: list[Message] = []
        self.keys: list[Key] = []
        self._names: dict[str, str] = {}
        self._n_characters = 0

    def add(
        self,
        role: str,
        content: str,
        calls: Sequence[Mapping[str, Any]] = (),
        answers: str | None = None,
        name: Any = "",
    ) -> None:
        """``calls`` of the assistant have objects as arguments. ``answers`` and ``name``: id and tool of the call that
        a message of the role ``tool`` answers."""
        self._n_characters += len(content)
        if self._n_characters > CHARACTERS_MAX or len(self.messages) >= MESSAGES_MAX:
            raise Refusal(
                400,
                f"expected at most {MESSAGES_MAX} messages and {CHARACTERS_MAX} characters in all, got more",
                code="context_length_exceeded",
                param="messages",
            )
        self._names |= {call["id"]: call["function"]["name"] for call in calls}
        extra: dict[str, Any] = {"tool_calls": list(calls)} if calls else {}
        if role == "tool":
            name = name or self._names.get(answers or "")
            if isinstance(name, str):
                extra["name"] = name
            if answers is not None:
                extra["tool_call_id"] = answers
        self.messages.append(Message(role, content, extra))
        self.keys.append(key_of(role, content, calls, answers or ""))

    def extend(self, messages: Sequence[Message], keys: Sequence[Key]) -> None:
        """Messages of an earlier call of the session."""
        for message, key in zip(messages, keys, strict=True):
            self.add(message.role, message.content, message.extra.get("tool_calls", ()), key[3] or None)
            self.messages[-1], self.keys[-1] = message, key

    def taken(self) -> tuple[tuple[Message, ...], tuple[Key, ...]]:
        """All of them, at least one."""
        if not self.messages:
            raise wrong("messages", "at least one message", [])
        return tuple(self.messages), tuple(self.keys)


def text_of(value: Any, where: str) -> str:
    """Text, also where it is given in parts. Raises :class:`Refusal`."""
    if value is None:
        return ""
    if isinstance(value, str):
        return _encodable(value, where)
    if not isinstance(value, list):
        raise wrong(where, "text, or parts of type text", value)
    texts = []
    for part in value:
        text = part.get("text", part.get("refusal")) if isinstance(part, dict) else None
        if not isinstance(text, str):
            kind = part.get("type") if isinstance(part, dict) else part
            raise wrong(where, "parts of type text: the policy reads nothing else", kind)
        texts.append(text)
    return _encodable("\n".join(texts), where)


def _encodable(text: str, where: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError:
        raise wrong(where, "text that is valid Unicode", "a lone surrogate") from None
    return text


def read_call(number: Any, name: Any, arguments: Any, where: str) -> dict[str, Any]:
    """A tool call of the assistant; ``arguments`` as an object or as its JSON text. Raises :class:`Refusal`."""
    if not isinstance(name, str):
        raise wrong(where, "a call with the name of a tool", name)
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments) if arguments.strip() else {}
        except (ValueError, RecursionError):
            raise wrong(where, "arguments that are a JSON object in text", arguments) from None
    if not isinstance(arguments, dict):
        raise wrong(where, "arguments that are a JSON object", arguments)
    return stated_call(number if isinstance(number, str) else "", name, arguments)


def read_tool(name: Any, description: Any, parameters: Any) -> dict[str, Any]:
    """A tool as chat templates take it; ``parameters`` is its JSON schema. Raises :class:`Refusal`."""
    if not isinstance(name, str):
        raise wrong("tools", "functions with a name", name)
    parameters = parameters or {"type": "object", "properties": {}}
    if not isinstance(parameters, dict):
        raise wrong("tools", "parameters that are a JSON schema", parameters)
    schema = {"name": name, "description": str(description or ""), "parameters": parameters}
    return {"type": "function", "function": schema}


def list_of(value: Any, name: str, n_max: int) -> list[Any]:
    """A list, empty for none. Raises :class:`Refusal`."""
    if value is None:
        return []
    if not isinstance(value, list) or len(value) > n_max:
        raise wrong(name, f"a list of at most {n_max} {name}", value)
    return value


def object_of(body: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """An object, empty for none. Raises :class:`Refusal`."""
    value = body.get(name)
    if value is not None and not isinstance(value, dict):
        raise wrong(name, "an object", value)
    return value or {}


def without_effect(stated: Mapping[str, Any], read: set[str], prefix: str) -> set[str]:
    """Names of fields that say something and are not in ``read``."""
    return {f"{prefix}.{name}" for name, value in stated.items() if name not in read and value}
