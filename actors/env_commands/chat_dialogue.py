"""A policy behind an endpoint that takes messages: completions for one order, as :class:`Policy` gives them.

The endpoint's tool calls become text in the form of Hermes, which every agent loop reads, and are stated apart again
when the conversation goes back to the endpoint. Token limits are those of the endpoint's own counts.
"""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile
from typing import Any

import numpy as np

from actors.engine.base import Completion, Generation, Heard
from actors.engine.chat_endpoint import ChatAnswer, ChatEndpoint, PromptTooLong
from actors.rendering.renderer import RENDERER, Completed, Conversation
from actors.rendering.tool_messages import with_answers_of_the_user, with_calls_in_text, with_system_text
from actors.rollout.agent_loop import Limit
from actors.rollout.sampling import Policy
from actors.rollout.services import Services
from actors.tools.parsing.base import ToolSchema, stated_call
from actors.tools.parsing.registry import FORMATS
from pipeline.errors import EngineError, EpisodeLimit, PlugInError
from pipeline.schema import Message, Order, VersionSpan

CONTEXT_MAX = 2**30
"""Messages of a prompt: the endpoint itself says when one is too long."""
FIRST = 2**30
"""Numbers of replies begin here: token ids of a real tokenizer, which a program may send, are smaller."""
CHARACTERS_PER_TOKEN = 4
"""For limits on the length of a text in tokens."""
_PARSE = FORMATS["qwen"].parse


class ChatRenderer:
    """In place of :class:`Renderer` where the chat template is on the other side. A prompt has an id for each message
    (the first one, perhaps, for the tools), which is 0; a reply has one, which is the number of its answer."""

    template = "<tool_call>"
    """Tool calls are read in the forms of Hermes and Qwen."""
    tokenizer = None
    name = ""
    end_ids = ()

    def __init__(self) -> None:
        self.answers: dict[int, ChatAnswer] = {}
        """Answers of the endpoint by the number of the reply."""
        self._numbers = itertools.count(FIRST)

    def start(
        self,
        messages: Sequence[Message],
        tools: Sequence[ToolSchema] = (),
        sampled: Sequence[Completed] = (),
        instead: Sequence[Message] | None = None,
    ) -> Conversation:
        """The first prompt."""
        ids = (0,) * (bool(tools) + len(messages))
        return Conversation(tuple(messages), "", ids, ids, 0, tuple(tools))

    def restart(self, conversation: Conversation, messages: Sequence[Message]) -> Conversation:
        """The next branch, which begins with a rewritten history."""
        return replace(self.start(messages, conversation.tools), branch=conversation.branch + 1)

    def extend(
        self,
        conversation: Conversation,
        completion_ids: Sequence[int],
        completed: Completed,
        new: Sequence[Message],
        *,
        parsed_reply: Message | None = None,
        append: bool = False,
    ) -> Conversation:
        """The next prompt: the one before, the reply as it came, and ``new``."""
        added = (0,) * len(new)
        messages = (*conversation.messages, Message("assistant", completed.text), *new)
        ids = (*conversation.prompt_ids, *completion_ids, *added)
        return replace(conversation, messages=messages, prompt_ids=ids, added_ids=added)

    def answered(self, answer: ChatAnswer) -> int:
        """A new number for a reply."""
        number = next(self._numbers)
        self.answers[number] = answer
        return number

    def completed(self, completion_ids: Sequence[int]) -> Completed:
        """The reply with this number."""
        return Completed(reply_text(self.answers[completion_ids[0]]), None)

    def token_bytes(self, number: int) -> bytes:
        """The text of a reply."""
        return self.completed([number]).text.encode("utf-8", "replace")

    def encode_text(self, text: str) -> tuple[int, ...]:
        """A text alone, in pieces of about a token, for measuring and cutting."""
        pieces = (text[at : at + CHARACTERS_PER_TOKEN] for at in range(0, len(text), CHARACTERS_PER_TOKEN))
        return tuple(int.from_bytes(b"\1" + piece.encode("utf-32-be", "surrogatepass")) for piece in pieces)

    def decode_ids(self, ids: Sequence[int]) -> str:
        """The text of these pieces. Raises :class:`PlugInError` for token ids."""
        if any(number < 2**32 for number in ids):
            raise PlugInError(RENDERER, "TokenIds", "the program sends token ids, and the endpoint takes messages")
        pieces = (number.to_bytes((number.bit_length() + 7) // 8)[1:] for number in ids)
        return "".join(piece.decode("utf-32-be", "surrogatepass") for piece in pieces)


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatServices(Services):
    """Services whose policies ask an endpoint instead of the engines of a run."""

    endpoint: ChatEndpoint
    replies: ChatRenderer
    """The renderer."""
    more: Mapping[str, Any]
    """Other fields of every request."""
    tools_as_text: bool
    """The tools stand in the system message, for endpoints and models that take none."""

    def policy(self, order: Order) -> Policy:
        return ChatPolicy(self, self.environments[order.task.environment].config.max_tokens)


class ChatPolicy(Policy):
    """:class:`Policy` of one order. ``tokens_max``: of the episode, prompt and replies."""

    def __init__(self, services: ChatServices, tokens_max: int) -> None:
        self.sampling, self.model, self.context_max = services.sampling, services.model, CONTEXT_MAX
        self.differs = True
        self.engines, self.seconds, self.requests, self.asking = [], 0.0, [], False
        self._services, self._tokens_max = services, tokens_max
        self._spent, self._reason, self._began = 0, "", time.perf_counter()

    def reason(self) -> str:
        """The failure after which the request of now is made again; empty where none came."""
        return self._reason

    async def complete(
        self,
        prompt_ids: Sequence[int],
        tokens_max: int,
        stop: Sequence[str] = (),
        conversation: Conversation | None = None,
        n_added: int | None = None,
        heard: Heard | None = None,
    ) -> Completion:
        """The endpoint answers whole: nothing is heard before. Raises :class:`EpisodeLimit` where the episode or the
        model's context has no room left."""
        services, endpoint = self._services, self._services.endpoint
        assert conversation is not None
        if self._spent >= self._tokens_max:
            raise EpisodeLimit(Limit.TOKENS)
        more = dict(services.more) | {"max_tokens": min(tokens_max, self._tokens_max - self._spent)}
        if stops := (*self.sampling.stop, *stop):
            more["stop"] = stops
        sent = request_messages(conversation.messages, conversation.tools, services.tools_as_text)
        tools = () if services.tools_as_text else conversation.tools
        self.asking, self._reason = True, ""
        started = time.perf_counter()
        try:
            answer = await endpoint.chat(sent, tools, more, self._failed)
        except PromptTooLong as error:
            raise EpisodeLimit(Limit.CONTEXT) from error
        self.asking = False
        seconds = time.perf_counter() - started
        self.seconds += seconds
        self.requests.append((round(started - self._began, 3), round(seconds, 3)))
        self.engines = [endpoint.url]
        self._spent = max(self._spent, answer.prompt_tokens + answer.sampled_tokens)
        ids, logprobs = np.asarray([services.replies.answered(answer)], np.int32), np.zeros(1, np.float32)
        return Completion(
            Generation(ids, logprobs, (VersionSpan(0, 1, 0),), answer.finish_reason), endpoint.url, seconds
        )

    def _failed(self, error: EngineError) -> None:
        self._reason = f"an answer: {error}"


def reply_text(answer: ChatAnswer) -> str:
    """The reply as a policy would have written it, with its calls in the form of Hermes."""
    blocks = [answer.text] if answer.text else []
    for name, arguments in answer.calls:
        try:
            call = _call_text(name, json.loads(arguments) if arguments.strip() else {})
        except (ValueError, RecursionError):
            call = _call_text(name, arguments)  # the loop tells the policy that these are no arguments
        blocks.append(f"<tool_call>\n{call}\n</tool_call>")
    return "\n".join(blocks)


def _call_text(name: str, arguments: Any) -> str:
    """A call as JSON. Raises :class:`ValueError` where that is no valid Unicode."""
    return json.dumps({"name": name, "arguments": arguments}, ensure_ascii=False).encode().decode()


def request_messages(
    messages: Sequence[Message], tools: Sequence[ToolSchema] = (), tools_as_text: bool = False
) -> list[dict[str, Any]]:
    """``messages`` in OpenAI's form. Calls in the text of a reply that tools answered are stated apart, with the ids of
    the answers; answers to calls that nobody can find are the user's."""
    if tools_as_text:
        shown = list(map(with_calls_in_text, messages))
        shown = with_answers_of_the_user(with_system_text(shown, tools) if tools else shown)
        return [{"role": message.role, "content": message.content} for message in shown]
    sent: list[dict[str, Any]] = []
    at = 0
    while at < len(messages):
        message = messages[at]
        at += 1
        answers = list(takewhile(lambda m: m.role == "tool", messages[at:])) if message.role == "assistant" else []
        calls, content = _calls_of(message, answers, at)
        if not calls:
            shown = with_answers_of_the_user([replace(message, content=content)])
            sent += [{"role": m.role, "content": m.content} for m in shown]
            continue
        sent.append({"role": "assistant", "content": content or None, "tool_calls": calls})
        for call, answer in zip(calls, answers, strict=False):
            sent.append({"role": "tool", "tool_call_id": call["id"], "content": answer.content})
        at += min(len(calls), len(answers))
    return sent


def _as_json(arguments: Any) -> str:
    """Arguments as JSON text, which is how written calls may state them already."""
    return arguments if isinstance(arguments, str) else json.dumps(dict(arguments), ensure_ascii=False)


def _calls_of(message: Message, answers: Sequence[Message], at: int) -> tuple[list[dict[str, Any]], str]:
    """(calls in OpenAI's form, text beside them) of a reply; no calls where none were made or answered."""
    stated = [call.get("function", call) for call in message.extra.get("tool_calls") or ()]
    content = message.content
    if not answers:
        return [], with_calls_in_text(message).content
    if not stated:
        parsed = _PARSE(message.content, ())
        content = parsed.content
        stated = [
            {"name": call.name or "unknown", "arguments": getattr(call, "arguments", {})} for call in parsed.calls
        ]
    ids = [str(answer.extra.get("tool_call_id") or f"call_{at}_{i}") for i, answer in enumerate(answers)]
    calls = [
        stated_call(number, call["name"], _as_json(call.get("arguments") or {}))
        for number, call in zip(ids, stated, strict=False)
    ]
    return calls, content if calls else message.content
