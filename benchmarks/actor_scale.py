"""One actor process with 10, 100, 1,000 and 5,000 episodes at once: CPU of a turn, lag of the event loop, memory.

::

    python -m benchmarks.actor_scale                                # the whole table, 8 minutes
    python -m benchmarks.actor_scale --loops tool_agent --peer verl # verl's tool agent beside it

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

``--peer verl`` runs the same turns with the same texts and latency in verl's own ``ToolAgentLoop``, in a process of
its own (:mod:`benchmarks.actor_scale_verl` says what is measured there), and prints its rows below. verl wants other
versions of torch's and transformers' packages than Afterplay has, so ``AFTERPLAY_VERL_PYTHON`` may name the interpreter
that has it; without verl the rows are omitted and a line reports it. verl has no loop in which an environment answers
every reply.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, nullcontext
from pathlib import Path
from typing import Any

import anyio

from actors.engine.pool import EnginePool
from actors.environments import Environment, Episode, Reply, Step
from actors.environments.host import EnvironmentHost
from actors.metrics import ActorMetrics
from actors.process.role import gc_policy
from actors.rendering.renderer import Renderer
from actors.rendering.tool_messages import with_system_text
from actors.rollout.rollout import Rollout
from actors.rollout.services import Services
from actors.tools.base import schema_of_tool
from actors.tools.calculator import Calculator
from benchmarks.actor_turns import tokenizer
from benchmarks.episode_load import Load, Play, measure, settle
from pipeline.config import RunConfig
from pipeline.runtime.metrics import CollectorRegistry
from pipeline.schema import Message, Order, Task, TrajectoryStatus
from pipeline.schema.codec import encode_trajectory
from tests.support.stub_engine import StubEngine

LOOPS = ("multi_turn", "tool_agent")
CONCURRENCY = (10, 100, 1000, 5000)
TURNS_PER_EPISODE = 6
QUESTION = "What is 3 + 4? Reply with only the number."
AGAIN = "That is not right. Try again. Reply with only the number."
CALL = '<tool_call>\n{"name": "calculator", "arguments": {"expression": "12345 * 678"}}\n</tool_call>'
PEER_PYTHON = "AFTERPLAY_VERL_PYTHON"
PEER_SECONDS_MAX = 600
NOT_IMPORTABLE = 3
"""Exit code of the peer's process where verl cannot be imported."""


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
        self.messages = (Message("user", QUESTION),)
        self.left = turns

    def step(self, reply: Reply) -> Step:
        self.left -= 1
        return Step((Message("user", AGAIN),), 0.5, self.left <= 0)


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
    host = EnvironmentHost("talk", config.environments["talk"], environment=Talk(turns))
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


async def ours(renderer: Renderer, loop: str, options: argparse.Namespace) -> None:
    """Afterplay's rows of one loop."""
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


def verls(renderer: Renderer, options: argparse.Namespace) -> None:
    """verl's rows, or why there are none."""
    schema = schema_of_tool(Calculator(), "the benchmark")
    opening = with_system_text([Message("user", QUESTION)], [schema])
    said = {"call": CALL, "answer": "7 " * options.tokens, "result": str(12345 * 678)}
    rows = [(n, options.each * n, latency_of(n, options)) for n in options.episodes]
    python = os.environ.get(PEER_PYTHON, sys.executable)
    with tempfile.TemporaryDirectory() as folder:
        renderer.tokenizer.save_pretrained(folder)
        asked = {"tokenizer": folder, "schema": schema, "turns": TURNS_PER_EPISODE, "rows": rows, **said}
        asked["messages"] = [message.as_template_input() for message in opening]
        asked["plain_gc"] = options.plain_gc
        command = [python, "-m", "benchmarks.actor_scale_verl"]
        done = subprocess.run(
            command,
            input=json.dumps(asked),
            stdout=subprocess.PIPE,
            text=True,
            timeout=options.peer_seconds_max,
            cwd=Path(__file__).parent.parent,
        )
    if done.returncode == NOT_IMPORTABLE:
        print(f"verl: not measured, it cannot be imported by {python} (set {PEER_PYTHON}): {done.stdout.strip()}")
        return
    done.check_returncode()
    for line in done.stdout.splitlines():
        if line.startswith("{"):
            print_row("verl tool_agent", Load(**json.loads(line)))


async def main(options: argparse.Namespace) -> None:
    renderer = Renderer(tokenizer())
    print(
        f"{TURNS_PER_EPISODE} turns an episode, {options.each} episodes at each place, {options.tokens} tokens a reply"
    )
    print_heads()
    for loop in options.loops:
        await ours(renderer, loop, options)
    if options.peer == "verl":
        verls(renderer, options)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--loops", choices=LOOPS, nargs="+", default=LOOPS)
    parser.add_argument("--episodes", type=int, nargs="+", default=CONCURRENCY)
    parser.add_argument("--latency", type=float, default=2.0, help="seconds that the stub engine takes")
    parser.add_argument("--rate", type=float, default=500.0, help="turns/s asked for at most; 0: no limit")
    parser.add_argument("--each", type=int, default=2, help="episodes that each place plays, one after another")
    parser.add_argument("--tokens", type=int, default=4)
    parser.add_argument("--peer", choices=("verl",), help="another project's loop beside it")
    parser.add_argument("--peer-seconds-max", type=float, default=PEER_SECONDS_MAX)
    parser.add_argument("--plain-gc", action="store_true", help="collect garbage as Python does by itself")
    anyio.run(main, parser.parse_args(), backend_options={"use_uvloop": True})
