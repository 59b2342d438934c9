"""One actor process with 10, 100, 1,000 and 5,000 episodes at once: CPU of a turn, lag of the event loop, memory.

::

    python -m benchmarks.actor_scale                     # multi-turn dialogue
    python -m benchmarks.actor_scale --loop tool_agent   # every other turn calls the calculator

The engine is a stub in this process that answers after a fixed latency, the same at every concurrency, so that the load
is what an actor with that many episodes really has: episodes / latency turns a second are asked of it. With ``--rate``
the latency grows with the episodes and the load stays the same, which shows what holding many episodes costs by itself.
Lag is how late a 10 ms timer fires. Memory is the growth of the resident set while all episodes are in progress,
divided by their number. The goal is below 1 ms of CPU a turn and below 50 ms of lag at 1,000 episodes.
"""

from __future__ import annotations

import argparse
import gc
import time
from typing import Any

import anyio
import numpy as np

from actors.engine.pool import EnginePool
from actors.engine.stub import StubEngine
from actors.environments import Environment, Episode, Reply, Step
from actors.environments.host import EnvironmentHost
from actors.loop import Rollout, Services
from actors.rendering import Renderer
from actors.tools.calculator import Calculator
from benchmarks.actor_turns import tokenizer
from pipeline.codec import encode_trajectory
from pipeline.config import RunConfig
from pipeline.metrics.actor import ActorMetrics
from pipeline.metrics.base import CollectorRegistry
from pipeline.schema import Message, Order, Task, TrajectoryStatus

CONCURRENCY = (10, 100, 1000, 5000)
TURNS_PER_EPISODE = 6
CALL = '<tool_call>\n{"name": "calculator", "arguments": {"expression": "12345 * 678"}}\n</tool_call>'


class Talk(Environment):
    """Answers every reply with one sentence; done after ``turns`` of them."""

    def __init__(self, turns: int) -> None:
        self.turns = turns

    def tools(self) -> tuple[Any, ...]:
        return (Calculator(),)

    def start(self, task: Task) -> Episode:
        return TalkEpisode(self.turns)


class TalkEpisode(Episode):
    def __init__(self, turns: int) -> None:
        self.messages = (Message("user", "What is 3 + 4? Reply with only the number."),)
        self.left = turns

    def step(self, reply: Reply) -> Step:
        self.left -= 1
        again = (Message("user", "That is not right. Try again. Reply with only the number."),)
        return Step(again, 0.5, self.left <= 0)


def services(renderer: Renderer, loop: str, latency: float, tokens: int) -> Services:
    """An actor's parts around a stub that says a number, and with tools a call every other time."""
    section = {"loop": {"name": loop}, "max_turns": 100, "max_tokens": 100_000, "max_seconds": 3600.0}
    config = RunConfig.model_validate(
        {"sampling": {"max_tokens": 64}, "model": {"max_length": 8192}, "environments": {"talk": section}}
    )
    metrics = ActorMetrics(CollectorRegistry(), environments=("talk",))
    calling, said = renderer.completion_ids(CALL), renderer.completion_ids("7 " * tokens)
    asked = 0

    def script(ids: Any, sampling: Any) -> tuple[int, ...]:
        nonlocal asked
        asked += 1
        return calling if loop == "tool_agent" and asked % 2 else said

    engine = StubEngine(script=script, latency_seconds=latency)
    engine.keep_requests = False
    pool = EnginePool([engine], sessions_max=100_000, wait_seconds_max=60, metrics=metrics)
    turns = TURNS_PER_EPISODE // 2 if loop == "tool_agent" else TURNS_PER_EPISODE
    host = EnvironmentHost("talk", config.environments["talk"], environment=Talk(turns))
    return Services.of(config, "actor-0", renderer, pool, {"talk": host}, metrics)


def resident_bytes() -> int:
    """Of this process."""
    import psutil

    return int(psutil.Process().memory_info().rss)


async def measure(shared: Services, concurrency: int, episodes: int, latency: float) -> tuple[float, ...]:
    """CPU ms a turn, turns a second, lag p50, p99 and max in ms, KiB an episode."""
    left = iter(range(episodes))
    lags: list[float] = []
    turns = 0
    gc.collect()
    before, highest = resident_bytes(), 0

    async def worker(delay_seconds: float) -> None:
        nonlocal turns
        await anyio.sleep(delay_seconds)
        for number in left:
            task = Task(f"t/{number}", "talk", number)
            played = await Rollout(Order(f"o{number}", "g", task, 0, 0, 0, 3600.0), shared).play()
            assert played.status is TrajectoryStatus.COMPLETE, played.failure
            encode_trajectory(played)
            turns += len(played.turns)

    async def watch() -> None:
        nonlocal highest
        while True:
            due = time.perf_counter() + 0.01
            await anyio.sleep(0.01)
            lags.append(time.perf_counter() - due)
            if len(lags) % 50 == 0:
                highest = max(highest, resident_bytes())

    async with anyio.create_task_group() as background:
        background.start_soon(shared.pool.watch)
        background.start_soon(watch)
        wall, cpu = time.perf_counter(), time.process_time()
        async with anyio.create_task_group() as group:
            for i in range(concurrency):
                group.start_soon(worker, latency * i / concurrency)
        cpu, wall = time.process_time() - cpu, time.perf_counter() - wall
        background.cancel_scope.cancel()
    median, high, worst = np.percentile(lags, [50, 99, 100]) * 1e3
    grown = max(0, max(highest, resident_bytes()) - before) / concurrency / 1024
    return cpu / turns * 1e3, turns / wall, float(median), float(high), float(worst), grown


async def main(options: argparse.Namespace) -> None:
    renderer = Renderer(tokenizer())
    print(f"{options.loop}, {TURNS_PER_EPISODE} turns an episode, {options.tokens} tokens a turn")
    heads = ("episodes", "latency s", "CPU ms/turn", "turns/s", "lag p50", "lag p99", "lag max ms", "KiB each")
    print(" ".join(f"{head:>11}" for head in heads))
    for concurrency in options.episodes:
        latency = max(options.latency, concurrency / options.rate) if options.rate else options.latency
        episodes = options.each * concurrency
        shared = services(renderer, options.loop, latency, options.tokens)
        cpu, rate, median, high, worst, kib = await measure(shared, concurrency, episodes, latency)
        numbers = (f"{concurrency}", f"{latency:.2f}", f"{cpu:.3f}", f"{rate:.0f}", f"{median:.2f}")
        numbers += (f"{high:.2f}", f"{worst:.1f}", f"{kib:.1f}")
        print(" ".join(f"{number:>11}" for number in numbers), flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--loop", choices=("multi_turn", "tool_agent"), default="multi_turn")
    parser.add_argument("--episodes", type=int, nargs="+", default=CONCURRENCY)
    parser.add_argument("--latency", type=float, default=2.0, help="seconds that the stub engine takes")
    parser.add_argument("--rate", type=float, default=400.0, help="turns/s asked at most; 0: no limit")
    parser.add_argument("--each", type=int, default=3, help="episodes that each place plays, one after another")
    parser.add_argument("--tokens", type=int, default=4)
    anyio.run(main, parser.parse_args(), backend_options={"use_uvloop": True})
