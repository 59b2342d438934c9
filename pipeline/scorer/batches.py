"""Trajectories wait here for others, so that one call scores many."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field

import anyio

from pipeline.schema import Trajectory
from pipeline.scorer.calls import Outcome
from pipeline.scorer.verdict import ScoreFailure

Many = Callable[[Sequence[Trajectory]], Awaitable[list[Outcome]]]


@dataclass(slots=True)
class _Batch:
    members: list[Trajectory] = field(default_factory=list)
    outcomes: list[Outcome] = field(default_factory=list)
    full: anyio.Event = field(default_factory=anyio.Event)
    done: anyio.Event = field(default_factory=anyio.Event)


class Batches:
    """*consumes* trajectories; *produces* outcomes, from calls of ``many`` with at most ``size_max`` of them; the first
    of a batch waits ``wait_seconds`` for others and then makes the call for all. The order of calls is that of arrival,
    and there may be several at once."""

    def __init__(self, name: str, many: Many, size_max: int, wait_seconds: float) -> None:
        self._name, self._many, self._size_max, self._wait_seconds = name, many, size_max, wait_seconds
        self._open: _Batch | None = None

    async def one(self, trajectory: Trajectory) -> Outcome:
        """The outcome of this trajectory. Never raises for what ``many`` says."""
        batch = self._open
        leads = batch is None
        if batch is None:
            batch = self._open = _Batch()
        position = len(batch.members)
        batch.members.append(trajectory)
        if len(batch.members) >= self._size_max:
            self._open = None
            batch.full.set()
        if leads:
            await self._lead(batch)
        else:
            await batch.done.wait()
        return batch.outcomes[position]

    async def _lead(self, batch: _Batch) -> None:
        given_up = ScoreFailure(self._name, "crashed", "the call that it was part of was given up")
        try:
            with anyio.move_on_after(self._wait_seconds):
                await batch.full.wait()
            self._close(batch)
            batch.outcomes = await self._many(batch.members)
        finally:
            self._close(batch)
            batch.outcomes += [given_up] * (len(batch.members) - len(batch.outcomes))
            batch.done.set()

    def _close(self, batch: _Batch) -> None:
        if self._open is batch:
            self._open = None
