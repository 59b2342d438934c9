"""The interface of a dialect, which reads requests into a :class:`ProgramCall` and writes the answer back.

Sessions, branches, limits and repeats know no dialect. A reply that begins with a closed thought (``<think>``) is
returned as a part of its own where a dialect has such a part. The program gives it back with the reply, and
:func:`thought_text` makes the sampled text of both.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import orjson

from actors.engine.base import Sampling
from actors.gateway.conversation import ProgramCall, arguments_text
from actors.gateway.reply import ChatReply, Choice
from actors.gateway.requests import ParameterRules
from actors.rendering.renderer import Renderer
from actors.servers.refusal import Refusal

EFFECTLESS = frozenset({"model", "user", "metadata", "store", "safety_identifier", "service_tier"})


@dataclass(slots=True, eq=False)
class ProgramAnswer:
    """The replies to a call, in no dialect yet. While they are sampled it has none."""

    number: str
    """24 hexadecimal digits, part of the ids in the answer."""
    created: int
    """Unix seconds."""
    model: str
    call: ProgramCall
    choices: tuple[Choice, ...]
    n_prompt: int
    """Tokens of the prompt."""
    renderer: Renderer

    @property
    def n_sampled(self) -> int:
        """Tokens, of all choices together."""
        return sum(len(choice.generation.token_ids) for choice in self.choices)

    @property
    def usage(self) -> dict[str, int]:
        """These counts in the form of OpenAI's completions."""
        prompt, sampled = self.n_prompt, self.n_sampled
        return {"prompt_tokens": prompt, "completion_tokens": sampled, "total_tokens": prompt + sampled}


Past = Callable[[str], ProgramAnswer | None]
"""An earlier answer of the session, by its number."""


class EventWriter(Protocol):
    """Writes one streamed answer as server-sent events. Together they say what the whole answer says."""

    apart: bool
    """True where a closed thought is a part of its own."""

    def more(self, choices: Sequence[Choice]) -> Iterator[bytes]:
        """Events of what is new in the replies so far; none where nothing can be shown yet."""
        ...

    def end(self, answer: ProgramAnswer) -> Iterator[bytes]:
        """The remaining events. The replies begin with those of :meth:`more`."""
        ...

    def error(self, refusal: Refusal) -> Iterator[bytes]:
        """The end of an answer that was begun, and that fails."""
        ...


@dataclass(frozen=True, slots=True)
class Dialect:
    """One form of requests and answers."""

    name: str
    """Route of its calls in metrics."""
    path: str
    read: Callable[[bytes, Sampling, ParameterRules, Past], ProgramCall]
    """Raises :class:`Refusal`."""
    body: Callable[[ProgramAnswer], dict[str, Any]]
    """The whole answer."""
    events: Callable[[ProgramAnswer], EventWriter]
    """Writes the answer as server-sent events; it gets the answer before its replies are there."""
    error: Callable[[Refusal], dict[str, Any]] = Refusal.body


def thought_text(thought: str, number: str, past: Past) -> str:
    """The text before the rest of a reply that was returned with its thought apart: as it was sampled in the answer
    ``number``, or between the usual marks."""
    answer = past(number)
    for choice in answer.choices if answer is not None else ():
        if choice.reply.thought == thought:
            return choice.reply.content[: choice.reply.thought_end]
    return f"<think>{thought}</think>"


def stated_calls(reply: ChatReply) -> list[tuple[str, str, str]]:
    """(id, name, arguments as JSON text) of the tool calls."""
    functions = [(call["id"], call["function"]) for call in reply.tool_calls]
    return [(number, function["name"], arguments_text(function["arguments"])) for number, function in functions]


def token_logprobs(choice: Choice, renderer: Renderer, start: int = 0) -> list[dict[str, Any]]:
    """Each sampled token from ``start`` on with its text, bytes and log-probability, in OpenAI's form."""
    content = []
    generation = choice.generation
    for token_id, logprob in zip(
        generation.token_ids[start:].tolist(), generation.logprobs[start:].tolist(), strict=True
    ):
        raw = renderer.token_bytes(token_id)
        token = raw.decode("utf-8", "replace")
        content.append({"token": token, "logprob": logprob, "bytes": list(raw), "top_logprobs": []})
    return content


def event(value: dict[str, Any], name: str = "") -> bytes:
    """One server-sent event."""
    head = f"event: {name}\n".encode() if name else b""
    return head + b"data: " + orjson.dumps(value) + b"\n\n"
