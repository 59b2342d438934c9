"""A real engine that is stopped, as by SIGSTOP: its requests are made again elsewhere within seconds, and it is used
again when it goes on."""

from __future__ import annotations

import os
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AsyncExitStack, contextmanager
from pathlib import Path

import aiohttp
import anyio
import pytest

from actors.engine.base import Sampling
from actors.engine.client import EngineClient
from actors.engine.pool import EnginePool
from actors.metrics import ActorMetrics
from actors.rollout.sampling import Policy
from pipeline.runtime.metrics import CollectorRegistry
from pipeline.runtime.progress import SILENCE_SECONDS_MAX
from pipeline.schema import Order, Task
from tests.support.routing import in_flight, sessions_by_engine
from tests.support.running_engine import RunningEngine, start_engine, tiny_engine

SECONDS_MAX = 240
"""A guard against hanging."""


@contextmanager
def stopped(engine: RunningEngine) -> Iterator[None]:
    """The server and all its processes, until the end."""
    pids = [engine.process.pid]
    for pid in pids:
        for task in Path(f"/proc/{pid}/task").iterdir():
            pids += map(int, (task / "children").read_text().split())
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        for pid in reversed(pids):
            os.kill(pid, signal.SIGCONT)


@pytest.mark.slow
async def test_requests_of_a_stopped_engine_are_made_again_elsewhere_and_it_is_used_again(tmp_path: Path) -> None:
    config = tiny_engine(tmp_path, max_length=512)
    metrics, turns, playing = ActorMetrics(CollectorRegistry()), Counter[str](), True

    async def converse(pool: EnginePool, number: int) -> None:
        order = Order(f"o{number}", "g", Task("task", "toy", number), 0, 0, 3, 600.0)
        policy = Policy(order, pool, Sampling(64), metrics, model="m", backend="embedded", context_max=512, retries=3)
        while playing:
            completion = await policy.complete([5, 6, 7], 64)
            assert completion.generation.version_spans[0].policy_version == 3
            turns[completion.engine] += 1

    async def until(holds: Callable[[], object], seconds: float = SECONDS_MAX) -> float:
        began = time.monotonic()
        with anyio.fail_after(seconds):
            while not holds():
                await anyio.sleep(0.05)
        return time.monotonic() - began

    async with AsyncExitStack() as stack:
        engines = [await stack.enter_async_context(start_engine(config)) for _ in range(2)]
        clients = [await stack.enter_async_context(EngineClient(engine.url)) for engine in engines]
        async with aiohttp.ClientSession() as session:
            for engine in engines:
                body = {"new_version": "3"}
                async with session.post(f"{engine.url}/update_weight_version", json=body) as response:
                    assert response.status == 200
        pool = EnginePool(clients, wait_seconds_max=SECONDS_MAX, metrics=metrics)
        hung = pool.router.engines[engines[0].url]
        other = engines[1].url
        async with anyio.create_task_group() as watching:
            watching.start_soon(pool.watch)
            await until(lambda: all(state.alive for state in pool.router.members))
            async with anyio.create_task_group() as conversations:
                for number in range(16):
                    conversations.start_soon(converse, pool, number)
                await until(lambda: min(turns[engine.url] for engine in engines) >= 16 and hung.in_flight)
                with stopped(engines[0]):
                    seconds = await until(lambda: not hung.alive and not hung.in_flight)
                    assert seconds <= SILENCE_SECONDS_MAX + 5, "not engine.request_seconds_max, 120 s"
                    before = turns[other]
                    await until(lambda: turns[other] >= before + 32)
                    assert set(sessions_by_engine(pool.router).items()) == {(hung.name, 0), (other, 16)}
                before = turns[hung.name]
                await until(lambda: turns[hung.name] > before)
                playing = False
            watching.cancel_scope.cancel()
        assert in_flight(pool.router) == 0
