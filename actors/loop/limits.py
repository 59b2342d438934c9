"""The limits of one episode. Pure arithmetic."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Limit(StrEnum):
    """Which limit ended an episode."""

    TURNS = "max_turns"
    TOKENS = "max_tokens"
    CONTEXT = "model.max_length"
    SECONDS = "max_seconds"
    ASSISTANT_TURNS = "loop.options.max_assistant_turns"
    USER_TURNS = "loop.options.max_user_turns"


@dataclass(slots=True)
class Budget:
    """``tokens_max`` counts every stored token (context and sampled); ``context_max`` what the engine sees at once."""

    turns_max: int
    tokens_max: int
    context_max: int
    turn_tokens_max: int
    turns: int = 0
    tokens: int = 0

    def room(self, prompt_tokens: int, added_tokens: int) -> int | Limit:
        """Tokens that the next turn may sample after a prompt of ``prompt_tokens``, ``added_tokens`` of them new; or
        the limit that leaves no room for a single one."""
        if self.turns >= self.turns_max:
            return Limit.TURNS
        if prompt_tokens >= self.context_max:
            return Limit.CONTEXT
        left = self.tokens_max - self.tokens - added_tokens
        if left < 1:
            return Limit.TOKENS
        return min(self.turn_tokens_max, self.context_max - prompt_tokens, left)

    def spend(self, added_tokens: int, sampled_tokens: int) -> None:
        """One turn was played."""
        self.turns += 1
        self.tokens += added_tokens + sampled_tokens

    def give_back(self, tokens: int, *, turn: bool = False) -> None:
        """Less was used than was spent; with ``turn`` the turn was not played at all."""
        self.turns -= turn
        self.tokens -= tokens
