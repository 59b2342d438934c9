"""Cost of one start and one step of each environment adapter in an actor.

    python -m benchmarks.environment_steps

Episodes run one after the other through :class:`EnvironmentHost`, as in the agent loop, with the replies of the expert
where there is one and a fixed reply elsewhere. Wall time is the median of all steps, in ms; CPU time is that of this
process over all steps, in ms a step (the Java process of TextWorldExpress and its wait are in the wall time only).
Adapters whose package is missing are left out and named."""

from __future__ import annotations

import json
import statistics
import time
from contextlib import asynccontextmanager

import anyio

from actors.adapters.catalogue import ADAPTERS
from actors.env_commands.describe import end_environment
from actors.environments import Reply
from actors.environments.host import EnvironmentHost
from pipeline.config.rollouts import EnvironmentConfig
from pipeline.schema import Task

EPISODES = 20
STEPS_MAX = 60
CASES = (
    ("babyai", {}, "forward"),
    ("babyai", {"level": "BabyAI-BossLevel-v0"}, "forward"),
    ("bfcl", {}, "Done."),
    ("bfcl", {"category": "long_context"}, "Done."),
    ("gymnasium", {"id": "FrozenLake-v1", "actions": ["left", "down", "right", "up"]}, "left"),
    ("openenv", {"observation": "text"}, "again"),
    ("reasoning_gym", {}, "<answer>1</answer>"),
    ("reasoning_gym", {"dataset": "sudoku"}, "<answer>1</answer>"),
    ("textarena", {}, "[7]"),
    ("textarena", {"game": "FrozenLake-v0-random"}, "[up]"),
    ("textworld_express", {}, "look around"),
    ("textworld_express", {"game": "cookingworld"}, "look around"),
)


async def measure(name: str, options: dict, reply: str) -> dict[str, float]:
    host = EnvironmentHost(name, EnvironmentConfig(name=name, options=options))
    starts, steps, cpu = [], [], 0.0
    try:
        for seed in range(EPISODES + 2):
            task = Task(f"{name}/{seed}", name, seed)
            expert = getattr(host.environment, "expert", None)
            replies = expert(task)[:STEPS_MAX] if callable(expert) else [reply] * STEPS_MAX
            started = time.perf_counter()
            episode = await host.start(task)
            started_seconds = time.perf_counter() - started
            done = False
            for text in replies:
                before, before_cpu = time.perf_counter(), time.process_time()
                done = (await host.step(episode, Reply(text))).done
                if seed >= 2:
                    steps.append(time.perf_counter() - before)
                    cpu += time.process_time() - before_cpu
                if done:
                    break
            await host.close(episode)
            if seed >= 2:
                starts.append(started_seconds)
    finally:
        end_environment(host)
    return {
        "start": statistics.median(starts) * 1e3,
        "step": statistics.median(steps) * 1e3,
        "step_cpu": cpu / len(steps) * 1e3,
        "steps": len(steps),
    }


@asynccontextmanager
async def server():
    """An OpenEnv server in this process that answers at once."""
    from websockets.asyncio.server import serve

    async def answer(socket):
        async for raw in socket:
            if json.loads(raw)["type"] == "close":
                return
            data = {"observation": {"text": "Go on."}, "reward": 0.0, "done": False}
            await socket.send(json.dumps({"type": "observation", "data": data}))

    async with serve(answer, "127.0.0.1", 0) as listener:
        yield f"ws://127.0.0.1:{listener.sockets[0].getsockname()[1]}"


async def main() -> None:
    print(f"{'environment':<58} {'start ms':>9} {'step ms':>8} {'CPU ms':>7} {'steps':>6}")
    for name, options, reply in CASES:
        missing = ADAPTERS[name].missing
        label = f"{name} {json.dumps(options) if options else ''}"[:58]
        if missing is not None:
            print(f"{label:<58} left out: {missing}")
        elif name == "openenv":
            async with server() as url:
                show(label, await measure(name, {**options, "urls": [url]}, reply))
        else:
            show(label, await measure(name, options, reply))


def show(label: str, found: dict[str, float]) -> None:
    print(
        f"{label:<58} {found['start']:>9.2f} {found['step']:>8.3f} {found['step_cpu']:>7.3f} {found['steps']:>6}",
        flush=True,
    )


if __name__ == "__main__":
    anyio.run(main)
