"""``POST /v1/chat/completions`` of the embedded engine: for people who talk to the policy of a run. Actors send token
ids instead (:mod:`actors.embedded.requests`)."""

from __future__ import annotations

import time
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import orjson

from actors.embedded.generator import GeneratedTokens
from actors.embedded.requests import EngineRequest, Refused
from actors.rendering.renderer import Renderer
from actors.rendering.tokenizer import load_tokenizer
from pipeline.errors import PlugInError
from pipeline.schema import Message

_SAMPLING = {"max_tokens": "max_tokens", "max_completion_tokens": "max_tokens", "temperature": "temperature"}
_NEUTRAL: Mapping[str, tuple[Any, ...]] = {"n": (1, None), "stream": (False, None), "top_p": (1, None)}
_IGNORED = frozenset({"model", "messages", "user", "metadata", "store"})


class Chat:
    """Messages to a generate request, and its tokens back to a message. ``folder`` is the model's."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    @cached_property
    def _renderer(self) -> Renderer:
        return Renderer(*load_tokenizer(self._folder))

    def generate_body(self, body: Mapping[str, Any]) -> bytes:
        """The same request to ``/inference/v1/generate``. Raises :class:`Refused` (400)."""
        for name, value in body.items():
            if name not in _SAMPLING and name not in _IGNORED and value not in _NEUTRAL.get(name, (None,)):
                raise Refused(400, f"{name}: the embedded engine answers messages with text, without this option")
        messages = body.get("messages")
        if not isinstance(messages, list) or not messages:
            raise Refused(400, "expected messages to be a list of at least one message")
        try:
            prompt = self._renderer.start([_message(message) for message in messages]).prompt_ids
        except PlugInError as error:
            raise Refused(400, f"the chat template refused the messages: {error.message}") from error
        sampling = {_SAMPLING[name]: value for name, value in body.items() if name in _SAMPLING and value is not None}
        limit = {"max_tokens": 2**31, "stop_token_ids": list(self._renderer.end_ids)}
        request = {"model": body.get("model"), "token_ids": list(prompt), "sampling_params": {**limit, **sampling}}
        return orjson.dumps(request)

    def answer(self, model: str, request: EngineRequest, completion: GeneratedTokens) -> dict[str, Any]:
        """Body of the answer."""
        message = {"role": "assistant", "content": self._renderer.completed(completion.token_ids).text}
        prompt, sampled = len(request.token_ids), len(completion.token_ids)
        return {
            "id": f"chatcmpl-{request.request_id}",
            "object": "chat.completion",
            "created": int(time.time()),
            "model": model,
            "choices": [{"index": 0, "message": message, "finish_reason": completion.finish_reason, "logprobs": None}],
            "usage": {"prompt_tokens": prompt, "completion_tokens": sampled, "total_tokens": prompt + sampled},
        }


def _message(value: Any) -> Message:
    role, content = (value.get("role"), value.get("content")) if isinstance(value, Mapping) else (None, None)
    if role not in ("system", "user", "assistant", "tool") or not isinstance(content, str):
        raise Refused(400, f"messages: expected a role and a text as content, got {value!r}")
    return Message(role, content)
