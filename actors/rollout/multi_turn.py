"""``multi_turn`` and ``single_turn``: only the environment answers the policy."""

from __future__ import annotations

import time
from dataclasses import replace

from actors.environments.base import Episode, Reply, Step
from actors.environments.host import EnvironmentHost
from actors.rollout.agent_loop import AgentEpisode, AgentLoop, Answer, Game
from pipeline.metrics.actor import ActorMetrics
from pipeline.runtime.plugin_guard import TaskOwner
from pipeline.schema import Task


class MultiTurn(AgentLoop):
    """The environment answers every reply until it is done."""

    def begin(self, game: Game) -> AgentEpisode:
        return _Dialogue(game)


class SingleTurn(AgentLoop):
    """The episode is complete after one reply, whatever the environment would answer next."""

    def begin(self, game: Game) -> AgentEpisode:
        return _Single(game)


class _Dialogue(AgentEpisode):
    async def answer(self, reply: Reply) -> Answer:
        return Answer.of(await self.game.step(reply))


class _Single(_Dialogue):
    async def answer(self, reply: Reply) -> Answer:
        return replace(await super().answer(reply), messages=(), done=True)


class HostedGame:
    """:class:`actors.rollout.agent_loop.Game` over one section's host."""

    def __init__(
        self,
        key: str,
        task: Task,
        host: EnvironmentHost,
        episode: Episode,
        metrics: ActorMetrics,
        started: TaskOwner,
    ) -> None:
        self.key = key
        self.task = task
        self.episode = episode
        self._host = host
        self._metrics = metrics
        self._started = started

    async def step(self, reply: Reply) -> Step:
        """Raises :class:`PlugInError`."""
        started = time.perf_counter()
        with self._started.owning():
            step = await self._host.step(self.episode, reply)
        seconds = time.perf_counter() - started
        self._metrics.env_step_duration_seconds.labels(env=self._host.section).observe(seconds)
        return step

    async def close(self) -> None:
        """Close the environment's episode."""
        with self._started.owning():
            await self._host.close(self.episode)
