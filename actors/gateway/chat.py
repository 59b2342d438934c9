"""``/v1/chat/completions`` in OpenAI's form. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from actors.engine.base import Sampling
from actors.gateway.conversation import (
    MESSAGES_MAX,
    MessageList,
    ProgramCall,
    list_of,
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
    token_logprobs,
)
from actors.gateway.reply import Choice
from actors.gateway.requests import DRAW, ParameterRules, Parameters, ReliedOn
from actors.rendering.renderer import Renderer
from actors.servers.refusal import Refusal, read_object
from actors.tools.parsing.base import stated_call

CHOICES_MAX = 16
ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}
_READ = {"assistant": {"role", "content", "tool_calls"}, "tool": {"role", "content", "tool_call_id", "name"}}
"""Fields of a message that reach the prompt, by role; of other roles role and content."""

_RELIED_ON: ReliedOn = {
    "logit_bias": ("log-probabilities would not be the policy's", ({},)),
    "response_format": ("replies cannot be forced into a form", ({"type": "text"},)),
    "top_logprobs": ("only log-probabilities of sampled tokens are known", (0,)),
    "functions": ("give tools instead", ([],)),
    "modalities": ("the policy writes text", (["text"],)),
    "continue_final_message": ("a reply cannot be begun for the policy", (False,)),
    "add_generation_prompt": ("each call asks for a new reply", (True,)),
    "prediction": ("there is no predicted output", ()),
    "web_search_options": ("the policy has no search of its own", ()),
    "chat_template": ("the run file says which template is used", ()),
    "chat_template_kwargs": ("the template is rendered as in the rest of the run", ({},)),
    "documents": ("put them into messages", ([],)),
    **dict.fromkeys(
        ("guided_json", "guided_regex", "guided_choice", "guided_grammar", "structured_outputs"),
        ("replies cannot be forced into a form", ()),
    ),
    "min_tokens": ("a reply ends where the policy ends it", (0,)),
    "ignore_eos": ("a reply ends where the policy ends it", (False,)),
    "stop_token_ids": ("give stop texts instead", ([],)),
    "bad_words": ("log-probabilities would not be the policy's", ([],)),
    "echo": ("the answer is the reply alone", (False,)),
    "prompt_logprobs": ("only log-probabilities of sampled tokens are known", ()),
    "best_of": ("ask for n replies", (1,)),
}
"""Parameters of OpenAI's form and of vLLM's additions."""

_UNDERSTOOD = {
    *DRAW, *_RELIED_ON, *(EFFECTLESS - {"service_tier"}), "messages", "tools", "tool_choice", "n", "max_tokens",
    "max_completion_tokens", "stop", "stream", "stream_options", "logprobs", "parallel_tool_calls",
}  # fmt: skip


def read_chat(data: bytes, sampling: Sampling, rules: ParameterRules, past: Past = lambda number: None) -> ProgramCall:
    """Raises :class:`Refusal`."""
    body = read_object(data)
    reader = Parameters(body, rules)
    reader.draw(sampling)
    reader.relied_on(_RELIED_ON)
    dropped: set[str] = set()
    tools = reader.tools(lambda raw: _tool(raw, dropped))
    reader.unsupported("tool_choice", "the policy chooses itself", "auto", "none")
    n = reader.whole("n", 1, CHOICES_MAX) or 1
    options = body.get("stream_options")
    reader.unknown(_UNDERSTOOD)
    messages, keys = _read_messages(body.get("messages"), dropped).taken()
    if "messages.function_call" in dropped:
        reason = "functions were replaced by tools: give tool_calls instead"
        reader.refuse_or_ignore("messages.function_call", rules.unsupported, f"messages.function_call: {reason}")
    reader.leave_out(dropped)
    tokens_max = reader.whole("max_completion_tokens", 1, 2**31)
    return ProgramCall(
        messages,
        keys,
        tools=tools,
        model=reader.model(),
        n=n,
        tokens_max=tokens_max if tokens_max is not None else reader.whole("max_tokens", 1, 2**31),
        stop=reader.stops("stop"),
        stream=reader.flag("stream"),
        logprobs=reader.flag("logprobs"),
        calls_max=0 if body.get("tool_choice") == "none" else None if reader.flag("parallel_tool_calls", True) else 1,
        ignored=tuple(reader.ignored),
        stated={"usage": isinstance(options, dict) and options.get("include_usage") is True},
    )


def _read_messages(value: Any, dropped: set[str]) -> MessageList:
    found = MessageList()
    for index, raw in enumerate(list_of(value, "messages", MESSAGES_MAX)):
        where = f"messages[{index}]"
        role = raw.get("role") if isinstance(raw, dict) else None
        if not isinstance(role, str) or role not in ROLES:
            raise wrong(f"{where}.role", f"one of {', '.join(ROLES)}", role)
        content = text_of(raw.get("content"), f"{where}.content")
        calls = []
        if role == "assistant":
            stated = list_of(raw.get("tool_calls"), f"{where}.tool_calls", MESSAGES_MAX)
            calls = [_call(call, f"{where}.tool_calls") for call in stated]
        answers = raw.get("tool_call_id") if role == "tool" else None
        if answers is not None and not isinstance(answers, str):
            raise wrong(f"{where}.tool_call_id", "text", answers)
        found.add(ROLES[role], content, calls, answers, raw.get("name") if role == "tool" else "")
        dropped |= without_effect(raw, _READ.get(role, {"role", "content"}), "messages")
    return found


def _call(raw: Any, where: str) -> dict[str, Any]:
    function = raw.get("function") if isinstance(raw, dict) else None
    if not isinstance(function, dict):
        raise wrong(where, "calls of the form {id, type: function, function: {name, arguments}}", raw)
    return read_call(raw.get("id"), function.get("name"), function.get("arguments"), where)


def _tool(raw: Any, dropped: set[str]) -> dict[str, Any]:
    function = raw.get("function") if isinstance(raw, dict) and raw.get("type", "function") == "function" else None
    if not isinstance(function, dict):
        raise wrong("tools", "tools of the form {type: function, function: {name, parameters}}", raw)
    dropped |= without_effect({**raw, **function}, {"type", "function", "name", "description", "parameters"}, "tools")
    return read_tool(function.get("name"), function.get("description"), function.get("parameters"))


def chat_completion(answer: ProgramAnswer) -> dict[str, Any]:
    """The object ``chat.completion``."""
    return {
        **_head(answer),
        "object": "chat.completion",
        "choices": [
            _choice(choice, index, answer.call.logprobs, answer.renderer) for index, choice in enumerate(answer.choices)
        ],
        "usage": answer.usage,
    }


def _head(answer: ProgramAnswer) -> dict[str, Any]:
    number, model = f"chatcmpl-{answer.number}", answer.call.model or answer.model
    return {"id": number, "created": answer.created, "model": model}


def _choice(choice: Choice, index: int, logprobs: bool, renderer: Renderer) -> dict[str, Any]:
    calls = [stated_call(*call) for call in stated_calls(choice.reply)]
    return {
        "index": index,
        "message": {
            "role": "assistant",
            "content": choice.reply.content or (None if calls else ""),
            **({"tool_calls": calls} if calls else {}),
        },
        "logprobs": {"content": token_logprobs(choice, renderer), "refusal": None} if logprobs else None,
        "finish_reason": choice.reply.finish_reason,
    }


class ChatChunks:
    """Writes objects ``chat.completion.chunk``."""

    apart = False

    def __init__(self, answer: ProgramAnswer) -> None:
        self._answer = answer
        self._usage = answer.call.stated["usage"]
        self._head = {**_head(answer), "object": "chat.completion.chunk"}
        self._n_written: dict[int, int] = {}
        """Characters of the choices that have begun."""
        self._n_scored: dict[int, int] = {}
        """Tokens whose log-probabilities were written."""

    def more(self, choices: Sequence[Choice]) -> Iterator[bytes]:
        for index, choice in enumerate(choices):
            if choice.reply.content:
                yield from self._content(index, choice)

    def end(self, answer: ProgramAnswer) -> Iterator[bytes]:
        whole = chat_completion(answer)
        for index, (choice, stated) in enumerate(zip(answer.choices, whole["choices"], strict=True)):
            yield from self._content(index, choice)
            for number, call in enumerate(stated["message"].get("tool_calls", ())):
                yield self._chunk(index, {"tool_calls": [{"index": number, **call}]})
            yield self._chunk(index, {}, choice, stated["finish_reason"])
        if self._usage:
            yield event({**self._head, "choices": [], "usage": whole["usage"]})
        yield _DONE

    def error(self, refusal: Refusal) -> Iterator[bytes]:
        yield event(refusal.body())
        yield _DONE

    def _content(self, index: int, choice: Choice) -> Iterator[bytes]:
        content = choice.reply.content
        if index not in self._n_written:
            yield self._chunk(index, {"role": "assistant", "content": ""})
        if text := content[self._n_written.get(index, 0) :]:
            yield self._chunk(index, {"content": text}, choice)
        self._n_written[index] = len(content)

    def _chunk(self, index: int, delta: Any, choice: Choice | None = None, reason: str | None = None) -> bytes:
        """With the log-probabilities of the tokens of ``choice`` that are new."""
        logprobs = None
        if choice is not None and self._answer.call.logprobs:
            content = token_logprobs(choice, self._answer.renderer, self._n_scored.get(index, 0))
            self._n_scored[index] = len(choice.generation.token_ids)
            logprobs = {"content": content, "refusal": None} if content else None
        stated = {"index": index, "delta": delta, "finish_reason": reason, "logprobs": logprobs}
        return event({**self._head, "choices": [stated], **({"usage": None} if self._usage else {})})


_DONE = b"data: [DONE]\n\n"
CHAT = Dialect("chat", "/v1/chat/completions", read_chat, chat_completion, ChatChunks)
