"""Written conversations as the token ids that a policy would have been given, and would have had to sample."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

from actors.rendering.renderer import Completed, Renderer, load_tokenizer
from pipeline.errors import SchemaError
from pipeline.schema import Message


def render(renderer: Renderer, messages: Sequence[Message]) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """(context ids, completion ids) of each assistant message; completions end with the template's end-of-turn token.

    Raises :class:`SchemaError` for a conversation that does not alternate as a policy would see it: it begins with
    another role, ends with the assistant, and there are never two assistant messages in a row.
    """
    roles = [message.role for message in messages]
    twice = any(a == b == "assistant" for a, b in pairwise(roles))
    if not roles or roles[0] == "assistant" or roles[-1] != "assistant" or twice:
        raise SchemaError(
            "expected messages that begin with another role, end with the assistant and never have it twice in a row, "
            f"got {roles}"
        )
    ends = [i for i, role in enumerate(roles) if role == "assistant"]
    conversation = renderer.start(messages[: ends[0]])
    turns = []
    for at, end in enumerate(ends):
        text = messages[end].content
        completion = renderer.completion_ids(text)
        turns.append((conversation.added_ids, completion))
        if at + 1 < len(ends):
            new = messages[end + 1 : ends[at + 1]]
            after = renderer.extend(conversation, completion, Completed(text, completion[-1]), new)
            if after.branch != conversation.branch:
                raise SchemaError(
                    "the chat template changes earlier turns when the conversation goes on: give token ids instead"
                )
            conversation = after
    return turns


class Demonstrator:
    """Renders with the tokenizer of a prepared model folder, loaded when it is first needed.

    Raises :class:`ConfigurationError` when there is none.
    """

    def __init__(self, folder: Path, chat_template: str | None, trust_remote_code: bool) -> None:
        self._arguments = (folder, chat_template, trust_remote_code)
        self._renderer: Renderer | None = None

    def __call__(self, messages: Sequence[Message]) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
        if self._renderer is None:
            self._renderer = Renderer(*load_tokenizer(*self._arguments))
        return render(self._renderer, messages)
