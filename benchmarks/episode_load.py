"""Load of a process with many concurrent episodes: CPU of a turn, lag of its event loop, memory.

Standard library, numpy and psutil only, so that another project's interpreter can run the same measurement.
"""

from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import numpy as np
import psutil

IDLE_SECONDS = 2.0
PROBE_SECONDS = 0.01
SETTLE_EPISODES = 5
SETTLE_FROM = 10**9
"""Their numbers, so that no two episodes have the same."""


@dataclass(frozen=True)
class Load:
    """One row of the table."""

    episodes: int
    """At once."""
    latency_seconds: float
    cpu_ms: float
    """A turn, without what the same process spends in the same time without episodes."""
    idle_ms: float
    """Spent without episodes, in ms of CPU a second: the lag probe, the watching of engines."""
    turns_per_second: float
    lag_ms: tuple[float, float, float]
    """50th and 99th percentile and the longest."""
    collection_ms: float
    """The longest single collection of cyclic garbage, in wall time; nothing else runs meanwhile."""
    kib: float
    """Growth of the resident set while all episodes were in progress, for each of them."""
    turns: int
    tokens: float
    """All tokens of an episode."""


Play = Callable[[int], Awaitable[tuple[int, int]]]
"""Runs one episode by its number: (turns, tokens of the whole conversation)."""


async def settle(play: Play) -> None:
    """Do now what happens once a process, before anything is measured."""
    for number in range(SETTLE_EPISODES):
        await play(SETTLE_FROM + number)


async def measure(play: Play, concurrency: int, episodes: int, latency_seconds: float) -> Load:
    """Play ``episodes``, ``concurrency`` at once, begun evenly over one latency of the engine."""
    probe = _Probe(concurrency)
    watching = asyncio.create_task(probe.watch())
    try:
        idle = await _cpu_share(IDLE_SECONDS)
        probe.begin()
        left, turns, tokens = iter(range(episodes)), 0, 0

        async def worker(delay_seconds: float) -> None:
            nonlocal turns, tokens
            await asyncio.sleep(delay_seconds)
            for number in left:
                played, said = await play(number)
                turns, tokens = turns + played, tokens + said

        wall, cpu = time.perf_counter(), time.process_time()
        async with asyncio.TaskGroup() as group:
            for i in range(concurrency):
                group.create_task(worker(latency_seconds * i / concurrency))
        cpu, wall = time.process_time() - cpu, time.perf_counter() - wall
    finally:
        watching.cancel()
        probe.close()
    return Load(
        episodes=concurrency,
        latency_seconds=latency_seconds,
        cpu_ms=(cpu - idle * wall) / turns * 1e3,
        idle_ms=idle * 1e3,
        turns_per_second=turns / wall,
        lag_ms=probe.lag_ms(),
        collection_ms=probe.collection_seconds_max * 1e3,
        kib=probe.grown_kib(),
        turns=turns,
        tokens=tokens / episodes,
    )


async def _cpu_share(seconds: float) -> float:
    """CPU seconds a second of a process that only waits."""
    wall, cpu = time.perf_counter(), time.process_time()
    await asyncio.sleep(seconds)
    return (time.process_time() - cpu) / (time.perf_counter() - wall)


class _Probe:
    """Measures lateness of a 10 ms timer, duration of collections and growth of the resident set."""

    def __init__(self, concurrency: int) -> None:
        self._concurrency = concurrency
        self._process = psutil.Process()
        self._lags: list[float] = []
        self._before = self._highest = 0
        self._collecting_since = 0.0
        self.collection_seconds_max = 0.0
        gc.callbacks.append(self._collected)

    def begin(self) -> None:
        """Forget what was seen so far."""
        gc.collect()
        self._lags.clear()
        self.collection_seconds_max = 0.0
        self._before = self._highest = self._process.memory_info().rss

    async def watch(self) -> None:
        while True:
            due = time.perf_counter() + PROBE_SECONDS
            await asyncio.sleep(PROBE_SECONDS)
            self._lags.append(time.perf_counter() - due)
            if len(self._lags) % 50 == 0:
                self._highest = max(self._highest, self._process.memory_info().rss)

    def lag_ms(self) -> tuple[float, float, float]:
        median, high, worst = np.percentile(self._lags, [50, 99, 100]) * 1e3
        return float(median), float(high), float(worst)

    def grown_kib(self) -> float:
        highest = max(self._highest, self._process.memory_info().rss)
        return max(0, highest - self._before) / self._concurrency / 1024

    def close(self) -> None:
        gc.callbacks.remove(self._collected)

    def _collected(self, phase: str, information: dict[str, int]) -> None:
        if phase == "start":
            self._collecting_since = time.perf_counter()
        else:
            seconds = time.perf_counter() - self._collecting_since
            self.collection_seconds_max = max(self.collection_seconds_max, seconds)
