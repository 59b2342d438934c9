"""Clock of the learner's loop: the time between two updates, by stage.

Each second between the lines of two updates belongs to exactly one stage. Those of the trainer
(:class:`learner.observability.report.Stopwatch`) run in one thread, one after another; those of the loop lie around
them. What is in none is ``other``: counting, messages, the event loop.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

LoopStage = Literal["wait", "publish", "save"]


@dataclass(frozen=True, slots=True)
class StepTimes:
    """Seconds around the trainer's own stages."""

    wait: float
    """Idle for lack of groups: the only stage that data can lengthen."""
    publish: float
    """Blocked by publication: copying the weights and waiting for the version before; with ``engine.colocate: sleep``
    also for the engines to give the device."""
    total: float
    """Since the line of the update before (of the first one: from the begin of the loop)."""
    save: float = 0.0
    """Blocked by the checkpoint after the update before: copying it and waiting for the one before."""

    def by_stage(self, trained: Mapping[str, float]) -> dict[str, float]:
        """All stages, the trainer's (``trained``) among them; they add up to ``total``."""
        stages = {"wait": self.wait, **trained, "publish": self.publish, "save": self.save}
        return {**stages, "other": max(0.0, self.total - sum(stages.values()))}


class LoopClock:
    """Measures the stages of the loop. ``now``: monotonic seconds."""

    def __init__(self, now: Callable[[], float] = time.perf_counter) -> None:
        self._now = now
        self._since = now()
        self._seconds: dict[LoopStage, float] = {"wait": 0.0, "publish": 0.0, "save": 0.0}

    @contextmanager
    def stage(self, name: LoopStage) -> Iterator[None]:
        start = self._now()
        try:
            yield
        finally:
            self._seconds[name] += self._now() - start

    def lap(self) -> StepTimes:
        """Seconds by stage since the last call; the next lap begins."""
        now, seconds = self._now(), self._seconds
        times = StepTimes(seconds["wait"], seconds["publish"], now - self._since, seconds["save"])
        self._since, self._seconds = now, dict.fromkeys(seconds, 0.0)
        return times
