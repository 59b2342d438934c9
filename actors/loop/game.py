"""The environment's side of one play, as an agent loop sees it."""

from __future__ import annotations

import logging
import time

from actors.environments.base import Episode, Reply, Step
from actors.environments.host import EnvironmentHost
from actors.loop.leaks import StartedTasks
from pipeline.metrics.actor import ActorMetrics
from pipeline.schema import Task

logger = logging.getLogger(__name__)


class HostedGame:
    """:class:`actors.loop.base.Game` over one section's host."""

    def __init__(self, key: str, task: Task, host: EnvironmentHost, episode: Episode, metrics: ActorMetrics) -> None:
        self.key = key
        self.task = task
        self.episode = episode
        self._host = host
        self._metrics = metrics
        self._started = StartedTasks()

    async def step(self, reply: Reply) -> Step:
        """Raises :class:`PlugInError`."""
        started = time.perf_counter()
        with self._started.owning():
            step = await self._host.step(self.episode, reply)
        seconds = time.perf_counter() - started
        self._metrics.env_step_duration_seconds.labels(env=self._host.section).observe(seconds)
        return step

    async def close(self) -> None:
        """Close the episode, and end the tasks that its steps left running."""
        await self._host.close(self.episode)
        leaked = self._started.cancel()
        if leaked:
            self._metrics.leaked_tasks_total.labels(env=self._host.section).inc(leaked)
            logger.warning(
                "environment %s: an episode left %d tasks running; they were cancelled", self._host.section, leaked
            )
