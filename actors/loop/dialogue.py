"""Loops that only pass on what the environment says: ``multi_turn`` and ``single_turn``."""

from __future__ import annotations

from dataclasses import replace

from actors.environments.base import Reply
from actors.loop.base import AgentEpisode, AgentLoop, Answer, Game


class MultiTurn(AgentLoop):
    """The environment answers every reply until it says done."""

    def begin(self, game: Game) -> AgentEpisode:
        return _Dialogue(game)


class SingleTurn(AgentLoop):
    """One reply, one judgement: the episode is complete after it, whatever the environment would say next."""

    def begin(self, game: Game) -> AgentEpisode:
        return _Single(game)


class _Dialogue(AgentEpisode):
    async def answer(self, reply: Reply) -> Answer:
        return Answer.of(await self.game.step(reply))


class _Single(_Dialogue):
    async def answer(self, reply: Reply) -> Answer:
        return replace(await super().answer(reply), messages=(), done=True)
