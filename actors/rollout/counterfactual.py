"""Counterfactual prompts: the contexts that the same sampled ids would have had after another first prompt.

The other prompt has no lessons, or has a hint (``advantage.estimator: cpo`` or ``self_distill``). No engine sees it:
the learner scores the sampled ids in it. It is followed turn by turn, and a context that differs from the real one (in
the first turn, and in a turn that begins a new branch) is recorded.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from actors.rendering.renderer import Conversation, Renderer
from actors.tools.parsing.base import ToolSchema
from pipeline.lessons.store import first_user
from pipeline.schema import Message


@dataclass(slots=True)
class CounterfactualPrompt:
    """``conversation`` is the counterfactual one, as far as the episode has come."""

    conversation: Conversation
    contexts: dict[int, tuple[int, ...]] = field(default_factory=dict)
    """Context ids that differ from the real ones, by turn."""
    longest: int = 0
    """Tokens of its longest branch so far, sampled ones included."""

    @classmethod
    def of(cls, conversation: Conversation) -> CounterfactualPrompt:
        """The counterfactual of an episode's first prompt."""
        return cls(conversation, {0: conversation.prompt_ids})

    def sampled(self, n_tokens: int) -> None:
        """Record that the turn sampled this number of tokens."""
        self.longest = max(self.longest, len(self.conversation.prompt_ids) + n_tokens)

    def follow(
        self,
        advance: Callable[[Conversation], Conversation],
        real: Conversation,
        turn: int,
        completion_ids: Sequence[int],
        forked: bool,
    ) -> None:
        """``real`` is the prompt of ``turn``, in a new branch where ``forked``; ``advance`` makes the next prompt of
        a conversation with what was sampled and answered, as was done for the real one."""
        before = self.conversation
        after = advance(before)
        if forked:
            self.contexts[turn] = after.prompt_ids
            after = replace(after, branch=real.branch)
        elif after.branch != before.branch:
            # the engine's prompt continued where this one would have begun a new branch: the row continues too
            ids = (*before.prompt_ids, *completion_ids, *real.added_ids)
            after = replace(after, prompt_ids=ids, added_ids=real.added_ids, branch=before.branch)
        elif after.added_ids != real.added_ids:
            self.contexts[turn] = after.added_ids
        self.conversation = after

    def first(self, n_turns: int) -> dict[int, tuple[int, ...]]:
        """The contexts of the first turns."""
        return {turn: ids for turn, ids in self.contexts.items() if turn < n_turns}


_PLACEHOLDER = re.compile(r"\{(lessons|hint|prompt)\}")


def with_text(messages: Sequence[Message], user: int, template: str, **values: str) -> list[Message]:
    """``messages`` with ``template`` as the text of message ``user``, whose own text is ``{prompt}``. Braces in the
    values stay as they are."""
    values["prompt"] = messages[user].content
    content = _PLACEHOLDER.sub(lambda match: values.get(match[1], match[0]), template)
    return [*messages[:user], replace(messages[user], content=content), *messages[user + 1 :]]


def counterfactual_of(
    renderer: Renderer, messages: Sequence[Message], hint: str, template: str, tools: Sequence[ToolSchema] = ()
) -> CounterfactualPrompt | None:
    """The conversation with ``hint`` in the first message of the user; None without such a message."""
    user = first_user(tuple(messages))
    if user is None:
        return None
    return CounterfactualPrompt.of(renderer.start(with_text(messages, user, template, hint=hint), tools))
