"""One actor process with 10, 100, 1,000 and 5,000 episodes at once: CPU of a turn, lag of the event loop, memory.

::

    python -m benchmarks.actor_scale  # the whole table, 8 minutes

Two agent loops: ``multi_turn``, where the environment answers every reply, and ``tool_agent``, where every reply but
the last calls the calculator. The engine is a stub in this process that answers after a fixed latency, the same for
any number of episodes, so that the load is what an actor with that many episodes really has: episodes / latency turns
a second, up to what one core can do. Beyond that turns queue, and the lag is that of an overloaded loop: ``--rate``
lets the latency grow with the episodes so that never more than so many turns a second are asked for, which shows what
holding many episodes costs by itself. The default asks for 500, which 1,000 episodes at 2 s do.

A turn is everything that an actor does for it: render, route, request, check, parse, run the tool, step the
environment, record; and once an episode encode the trajectory for the wire. CPU is that of the process, less what the
same process spends in the same time without episodes (the probe, the watching of engines), which is shown apart as
``idle``. Lag is how late a 10 ms timer fires. ``gc max`` is the longest collection of cyclic garbage, which holds all
episodes: the actor keeps it short (:mod:`actors.process.role`), and so does this process; ``--plain-gc`` leaves it as
Python has it. The goal is below 1 ms of CPU a turn and below 50 ms of lag at 1,000 episodes.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import anyio
import numpy as np
import psutil

from actors.engine.pool import EnginePool
from actors.environments.host import EnvironmentHost
from actors.metrics import ActorMetrics
from actors.rendering.renderer import Renderer
from actors.rollout.rollout import Rollout
from actors.rollout.services import Services
from actors.tools.calculator import Calculator
from benchmarks.actor_turns import Talk, tokenizer
from pipeline.config import RunConfig
from pipeline.runtime.garbage_collection import gc_policy
from pipeline.runtime.metrics import CollectorRegistry
from pipeline.schema import Order, Task, TrajectoryStatus
from pipeline.schema.codec import encode_trajectory
from tests.support.stub_engine import StubEngine

LOOPS = ("multi_turn", "tool_agent")
CONCURRENCY = (10, 100, 1000, 5000)
TURNS_PER_EPISODE = 6
CALL = '<tool_call>\n{"name": "calculator", "arguments": {"expression": "12345 * 678"}}\n</tool_call>'
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


class TalkWithTools(Talk):
    def tools(self) -> tuple[Any, ...]:
        return (Calculator(),)


def script(renderer: Renderer, loop: str, tokens: int) -> Any:
    """A policy that says a number, and with tools calls the calculator in every turn but the last."""
    calling, said = renderer.completion_ids(CALL), renderer.completion_ids("7 " * tokens)
    end = said[-1]
    ends_before = 2  # of the system's and the user's message
    ends_with_answers = ends_before + 2 * (TURNS_PER_EPISODE - 1)

    def policy(ids: Any, sampling: Any) -> tuple[int, ...]:
        return calling if loop == "tool_agent" and ids.count(end) < ends_with_answers else said

    return policy


def services(renderer: Renderer, loop: str, latency: float, tokens: int) -> Services:
    """An actor's parts around the stub."""
    section = {"loop": {"name": loop}, "max_turns": 100, "max_tokens": 100_000, "max_seconds": 3600.0}
    config = RunConfig.model_validate(
        {"sampling": {"max_tokens": 64}, "model": {"max_length": 8192}, "environments": {"talk": section}}
    )
    metrics = ActorMetrics(CollectorRegistry(), environments=("talk",))
    engine = StubEngine(script=script(renderer, loop, tokens), latency_seconds=latency)
    engine.keep_requests = False
    pool = EnginePool([engine], wait_seconds_max=60, metrics=metrics)
    turns = 1 if loop == "tool_agent" else TURNS_PER_EPISODE
    host = EnvironmentHost("talk", config.environments["talk"], environment=TalkWithTools(turns))
    return Services.of(config, "actor-0", renderer, pool, {"talk": host}, metrics)


def player(shared: Services) -> Play:
    """Plays an episode from its order to the bytes of its trajectory."""

    async def play(number: int) -> tuple[int, int]:
        order = Order(f"o{number}", "g", Task(f"t/{number}", "talk", number), 0, 0, 0, 3600.0)
        played = await Rollout(order, shared).run()
        assert played.status is TrajectoryStatus.COMPLETE, played.failure
        assert len(played.turns) == TURNS_PER_EPISODE, f"{len(played.turns)} turns"
        encode_trajectory(played)
        return len(played.turns), played.n_tokens

    return play


def print_heads() -> None:
    heads = ("episodes", "latency s", "CPU ms/turn", "idle ms/s", "turns/s", "lag p50", "lag p99", "lag max ms")
    print(f"{'':>14} " + " ".join(f"{head:>11}" for head in (*heads, "gc max ms", "KiB each", "tokens")))


def print_row(name: str, load: Load) -> None:
    p50, p99, worst = load.lag_ms
    numbers = [f"{load.episodes}", f"{load.latency_seconds:.2f}", f"{load.cpu_ms:.3f}", f"{load.idle_ms:.1f}"]
    numbers += [f"{load.turns_per_second:.0f}", f"{p50:.2f}", f"{p99:.2f}", f"{worst:.1f}"]
    numbers += [f"{load.collection_ms:.1f}", f"{load.kib:.1f}", f"{load.tokens:.0f}"]
    print(f"{name:>14} " + " ".join(f"{number:>11}" for number in numbers), flush=True)


async def rows(renderer: Renderer, loop: str, options: argparse.Namespace) -> None:
    """The rows of one loop."""
    for concurrency in options.episodes:
        latency = latency_of(concurrency, options)
        async with playing(renderer, loop, 0.0, options.tokens) as play:
            await settle(play)
        async with playing(renderer, loop, latency, options.tokens) as play:
            with nullcontext() if options.plain_gc else gc_policy():
                load = await measure(play, concurrency, options.each * concurrency, latency)
        print_row(loop, load)


@asynccontextmanager
async def playing(renderer: Renderer, loop: str, latency: float, tokens: int) -> AsyncIterator[Play]:
    """An actor's parts at work."""
    shared = services(renderer, loop, latency, tokens)
    async with anyio.create_task_group() as background:
        background.start_soon(shared.pool.watch)
        yield player(shared)
        background.cancel_scope.cancel()


def latency_of(concurrency: int, options: argparse.Namespace) -> float:
    """Seconds, so that not more than ``--rate`` turns a second are asked for."""
    return max(options.latency, concurrency / options.rate) if options.rate else float(options.latency)


async def main(options: argparse.Namespace) -> None:
    renderer = Renderer(tokenizer())
    print(
        f"{TURNS_PER_EPISODE} turns an episode, {options.each} episodes at each place, {options.tokens} tokens a reply"
    )
    print_heads()
    for loop in options.loops:
        await rows(renderer, loop, options)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--loops", choices=LOOPS, nargs="+", default=LOOPS)
    parser.add_argument("--episodes", type=int, nargs="+", default=CONCURRENCY)
    parser.add_argument("--latency", type=float, default=2.0, help="seconds that the stub engine takes")
    parser.add_argument("--rate", type=float, default=500.0, help="turns/s asked for at most; 0: no limit")
    parser.add_argument("--each", type=int, default=2, help="episodes that each place plays, one after another")
    parser.add_argument("--tokens", type=int, default=4)
    parser.add_argument("--plain-gc", action="store_true", help="collect garbage as Python does by itself")
    anyio.run(main, parser.parse_args(), backend_options={"use_uvloop": True})
