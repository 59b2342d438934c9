"""The environment's side of one play, as an agent loop sees it."""

from __future__ import annotations

import time

from actors.environments.base import Episode, Reply, Step
from actors.environments.host import EnvironmentHost
from pipeline.metrics.actor import ActorMetrics
from pipeline.owned import StartedTasks
from pipeline.schema import Task


class HostedGame:
    """:class:`actors.loop.base.Game` over one section's host."""

    def __init__(
        self,
        key: str,
        task: Task,
        host: EnvironmentHost,
        episode: Episode,
        metrics: ActorMetrics,
        started: StartedTasks,
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
