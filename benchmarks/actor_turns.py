"""CPU time of one turn in an actor, with the engine stubbed, at 1, 100 and 2,000 concurrent episodes.

::

    python -m benchmarks.actor_turns           # engine in this process: loop, routing, rendering, records
    python -m benchmarks.actor_turns --http    # the HTTP client too, against a stub server in another process

A turn is everything an actor does for it: render, route, request, check the answer, step the environment, record; and,
once per episode, encode the trajectory for the wire. The stub's latency is episodes / ``--rate`` (at least 20 ms), so
about ``--rate`` turns a second are asked of the actor at any concurrency, and the lag shown is that of a busy actor and
not of an overloaded one. CPU time is that of this process alone. Event-loop lag is how late a 10 ms timer fires. Uses
SmolLM2's tokenizer where its package is installed.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from typing import Any

import anyio
import numpy as np
from transformers import AutoTokenizer

from actors.engine.base import Engine
from actors.engine.client import EngineClient
from actors.engine.pool import EnginePool
from actors.environments import Environment, Episode, Reply, Step
from actors.environments.host import EnvironmentHost
from actors.metrics import ActorMetrics
from actors.rendering.renderer import Renderer
from actors.rollout.rollout import Rollout
from actors.rollout.services import Services
from learner.models.tiny import build_tokenizer
from pipeline.config import RunConfig
from pipeline.runtime.metrics import CollectorRegistry
from pipeline.schema import Message, Order, Task, TrajectoryStatus
from pipeline.schema.codec import encode_trajectory
from tests.support.smollm2 import tokenizer_folder
from tests.support.stub_engine import StubEngine, StubServer, cycling, good_answer

TURNS_PER_EPISODE = 4
CONCURRENCY = (1, 100, 2000)


class Talk(Environment):
    """Answers every reply with one sentence; done after ``turns`` of them."""

    def __init__(self, turns: int) -> None:
        self.turns = turns

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


def tokenizer() -> Any:
    """SmolLM2's, or the tiny model's word tokenizer."""
    folder = tokenizer_folder()
    if folder is None:
        return build_tokenizer(64)
    return AutoTokenizer.from_pretrained(str(folder))


def services(renderer: Renderer, engine: Engine) -> Services:
    config = RunConfig.model_validate({"sampling": {"max_tokens": 16}, "model": {"max_length": 4096}})
    metrics = ActorMetrics(CollectorRegistry(), environments=("arithmetic",))
    pool = EnginePool([engine], wait_seconds_max=30, metrics=metrics)
    section = config.environments["arithmetic"]
    host = EnvironmentHost("arithmetic", section, environment=Talk(TURNS_PER_EPISODE))
    return Services.of(config, "actor-0", renderer, pool, {"arithmetic": host}, metrics)


async def measure(
    renderer: Renderer, engine: Engine, concurrency: int, turns: int, latency: float
) -> tuple[float, float, float, float]:
    """CPU microseconds a turn, wall seconds, median and 99th percentile of the loop's lag in milliseconds."""
    shared = services(renderer, engine)
    episodes = max(concurrency, turns // TURNS_PER_EPISODE)
    left = iter(range(episodes))
    lags: list[float] = []

    async def worker(delay_seconds: float) -> None:
        await anyio.sleep(delay_seconds)
        for number in left:
            task = Task(f"t/{number}", "arithmetic", number)
            trajectory = await Rollout(Order(f"o{number}", "g", task, 0, 0, 0, 600.0), shared).run()
            assert trajectory.status is TrajectoryStatus.COMPLETE, trajectory.failure
            encode_trajectory(trajectory)

    async def lag() -> None:
        while True:
            due = time.perf_counter() + 0.01
            await anyio.sleep(0.01)
            lags.append(time.perf_counter() - due)

    async with anyio.create_task_group() as background:
        background.start_soon(shared.pool.watch)
        background.start_soon(lag)
        wall, cpu = time.perf_counter(), time.process_time()
        async with anyio.create_task_group() as group:
            for i in range(concurrency):
                group.start_soon(worker, latency * i / concurrency)
        cpu, wall = time.process_time() - cpu, time.perf_counter() - wall
        background.cancel_scope.cancel()
    median, high = np.percentile(lags, [50, 99]) * 1e3
    return cpu / (episodes * TURNS_PER_EPISODE) * 1e6, wall, float(median), float(high)


async def serve(latency_seconds: float, tokens: int) -> None:
    """The stub server as a process of its own: prints its URL, ends with its standard input."""

    async def answer(body: dict[str, Any]) -> Any:
        await anyio.sleep(latency_seconds)
        body["sampling_params"]["max_tokens"] = tokens
        return good_answer(body)

    async with StubServer(answer, keep_bodies=False) as server:
        print(server.url, flush=True)
        await anyio.to_thread.run_sync(sys.stdin.read, abandon_on_cancel=True)


async def main(arguments: argparse.Namespace) -> None:
    renderer = Renderer(tokenizer())
    print(
        f"{TURNS_PER_EPISODE} turns an episode, {arguments.tokens} tokens a turn, {arguments.rate:g} turns/s asked for,"
    )
    print("engine over HTTP in another process" if arguments.http else "engine in this process")
    print(
        f"{'engine s':>9} {'episodes at once':>17} {'CPU us/turn':>12} {'turns/s':>9} "
        f"{'lag p50 ms':>11} {'lag p99 ms':>11}"
    )
    for concurrency in CONCURRENCY:
        latency = max(0.02, concurrency / arguments.rate)
        turns = min(arguments.turns, 200) if concurrency == 1 else max(arguments.turns, concurrency * TURNS_PER_EPISODE)
        server = None
        if arguments.http:
            command = [sys.executable, "-m", "benchmarks.actor_turns", "--serve"]
            command += ["--latency-seconds", str(latency), "--tokens", str(arguments.tokens)]
            server = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
            assert server.stdout is not None
            engine: Any = EngineClient(server.stdout.readline().strip())
        else:
            engine = StubEngine(script=cycling(1000, arguments.tokens, None), latency_seconds=latency)
            engine.keep_requests = False
        try:
            cpu, wall, median, high = await measure(renderer, engine, concurrency, turns, latency)
        finally:
            await engine.close()
            if server is not None:
                assert server.stdin is not None and server.stdout is not None
                server.stdin.close()
                server.wait(10)
                server.stdout.close()
        print(
            f"{latency:>9.2f} {concurrency:>17} {cpu:>12.0f} {turns / wall:>9.0f} {median:>11.2f} {high:>11.2f}",
            flush=True,
        )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=4000)
    parser.add_argument("--tokens", type=int, default=8)
    parser.add_argument("--rate", type=float, default=400.0, help="turns/s asked of the actor")
    parser.add_argument("--latency-seconds", type=float, default=0.02, help=argparse.SUPPRESS)
    parser.add_argument("--http", action="store_true")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        anyio.run(serve, options.latency_seconds, options.tokens, backend_options={"use_uvloop": True})
    else:
        anyio.run(main, options, backend_options={"use_uvloop": True})
