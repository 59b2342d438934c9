"""A conversation that was not played: what the engine would have seen around the very same sampled ids.

It begins with another first prompt (without the lessons, or with a hint) and is followed turn by turn; where its
context differs from the played one (in the first turn, and in a turn that begins a new branch) the context is kept.

The first prompt with a hint in it: never played, only scored by the learner (``advantage.estimator: cpo``).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from actors.rendering.renderer import Conversation, Renderer
from actors.rendering.tool_messages import ToolSchema
from pipeline.experience.memory import first_user
from pipeline.schema import Message


@dataclass(slots=True)
class CounterfactualPrompt:
    """``conversation`` is the one that was not played, as far as the episode has come."""

    conversation: Conversation
    contexts: dict[int, tuple[int, ...]] = field(default_factory=dict)
    """By turn, the context ids that differ from the played ones."""
    longest: int = 0
    """Tokens of its longest branch so far, sampled ones included."""

    @classmethod
    def of(cls, conversation: Conversation) -> CounterfactualPrompt:
        """Of an episode's first prompt."""
        return cls(conversation, {0: conversation.prompt_ids})

    def sampled(self, n_tokens: int) -> None:
        """The turn sampled so many tokens."""
        self.longest = max(self.longest, len(self.conversation.prompt_ids) + n_tokens)

    def follow(
        self,
        advance: Callable[[Conversation], Conversation],
        played: Conversation,
        turn: int,
        completion_ids: Sequence[int],
        forked: bool,
    ) -> None:
        """``played`` is the prompt of ``turn``, in a new branch where ``forked``; ``advance`` makes the next prompt of
        a conversation with what was sampled and answered, as was done for the played one."""
        before = self.conversation
        after = advance(before)
        if forked:
            self.contexts[turn] = after.prompt_ids
            after = replace(after, branch=played.branch)
        elif after.branch != before.branch:
            # the engine's prompt went on where this one would have begun anew: the row goes on too
            ids = (*before.prompt_ids, *completion_ids, *played.added_ids)
            after = replace(after, prompt_ids=ids, added_ids=played.added_ids, branch=before.branch)
        elif after.added_ids != played.added_ids:
            self.contexts[turn] = after.added_ids
        self.conversation = after

    def first(self, n_turns: int) -> dict[int, tuple[int, ...]]:
        """The contexts of the first turns."""
        return {turn: ids for turn, ids in self.contexts.items() if turn < n_turns}


_PLACE = re.compile(r"\{(hint|prompt)\}")


def counterfactual_of(
    renderer: Renderer, messages: Sequence[Message], hint: str, template: str, tools: Sequence[ToolSchema] = ()
) -> CounterfactualPrompt | None:
    """The conversation with ``hint`` in the first message of the user; None without such a message.

    Nothing in the hint is read as a special token; braces in hint and prompt stay as they are.
    """
    user = first_user(tuple(messages))
    if user is None:
        return None
    values = {"hint": renderer.without_special(hint), "prompt": messages[user].content}
    content = _PLACE.sub(lambda match: values[match[1]], template)
    changed = [*messages[:user], replace(messages[user], content=content), *messages[user + 1 :]]
    return CounterfactualPrompt.of(renderer.start(changed, tools))
