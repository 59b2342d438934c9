"""Between the loop and the scorer: trajectories wait here for their reward (bounded by what admission lets in)."""

from __future__ import annotations

from collections import deque
from collections.abc import Awaitable, Callable
from functools import partial

import anyio
import anyio.to_thread

from pipeline.codec import decode_trajectory
from pipeline.replay.journal import Score
from pipeline.replay.records import TrajectoryRecord
from pipeline.replay.store import ReplayStore
from pipeline.scorer.scorer import Scorer
from pipeline.scorer.verdict import Verdict
from pipeline.transport.base import Limits

Deliver = Callable[[TrajectoryRecord, Verdict], Awaitable[None]]


class Scoring:
    """*consumes* :class:`Score` effects; *produces* verdicts through ``deliver``; ``concurrency`` at once."""

    def __init__(self, scorer: Scorer, store: ReplayStore, limits: Limits, concurrency: int, deliver: Deliver) -> None:
        self._scorer, self._store, self._limits, self._deliver = scorer, store, limits, deliver
        self._places = anyio.CapacityLimiter(concurrency)
        self._queue: deque[Score] = deque()
        self._wake = anyio.Event()

    def put(self, effect: Score) -> None:
        self._queue.append(effect)
        self._wake.set()

    async def run(self) -> None:
        """Until cancelled; what is not scored then is scored by the next process."""
        async with anyio.create_task_group() as group:
            while True:
                if not self._queue:
                    self._wake = anyio.Event()
                    await self._wake.wait()
                effect = self._queue.popleft()
                await self._places.acquire_on_behalf_of(effect.record.seq)
                group.start_soon(self._one, effect)

    async def _one(self, effect: Score) -> None:
        try:
            trajectory = effect.trajectory
            if trajectory is None:
                frames = await anyio.to_thread.run_sync(partial(self._store.payloads, [effect.record.seq]))
                if effect.record.seq not in frames:
                    return
                trajectory = decode_trajectory(frames[effect.record.seq], self._limits)
            verdict = await self._scorer.score(trajectory)
        finally:
            self._places.release_on_behalf_of(effect.record.seq)
        await self._deliver(effect.record, verdict)
