"""Trajectories/s and MB/s through actor → replay stage → learner, against bare ZeroMQ moving the same bytes in the
same run.

::

    python -m benchmarks.pipeline_throughput --trajectories 8192 --tokens 2000 --turns 8

Three real processes: an actor whose episodes are ready-made (each is encoded on its own, as an actor does), the real
replay stage with its durable SQLite store, and a learner's end that decodes every trajectory, assembles every group
and answers CONSUMED. The bare side is one PUSH and one PULL socket in two processes that move the same number of
messages of the same size, once (Afterplay moves each trajectory twice, and makes it durable in between).
"""

from __future__ import annotations

import argparse
import itertools
import multiprocessing
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import anyio
import numpy as np
import zmq

from learner.process.session import GroupAssembler
from pipeline.config import RunConfig
from pipeline.config.explain import resolve
from pipeline.config.load import dump, loads
from pipeline.config.rollouts import OUTBOX_BYTES_MAX
from pipeline.schema import SCHEMA_VERSION, FinishReason, Message, Task, TokenSpan, Trajectory, TrajectoryStatus, Turn
from pipeline.schema.codec import decode_trajectory, encode_trajectory
from pipeline.schema.orders import GroupPlan, Order, decode_request
from pipeline.transport.messages import EventKind, Kind, WireMessage
from pipeline.transport.outbox import Outbox
from pipeline.transport.zeromq import open_link

GROUPS, ROLLOUTS, SLOTS = 32, 8, 1024


def ready_made(tokens: int, turns: int) -> Trajectory:
    """An episode of ``turns`` turns and ``tokens`` tokens, a third of them sampled."""
    per_turn = tokens // turns
    sampled = per_turn // 3
    generator = np.random.default_rng(0)
    return Trajectory(
        trajectory_id="template",
        group_id="template",
        task=Task("bench/0", "bench", 0),
        turns=tuple(
            Turn(
                context=TokenSpan.context(generator.integers(0, 50_000, per_turn - sampled)),
                completion=TokenSpan.sampled(generator.integers(0, 50_000, sampled), -generator.random(sampled), 0),
                context_messages=(Message("user", "x" * 200),),
                completion_message=Message("assistant", "y" * 100),
                finish_reason=FinishReason.STOP,
                temperature=1.0,
            )
            for _ in range(turns)
        ),
        status=TrajectoryStatus.COMPLETE,
        rewards={"environment": 1.0},
    )


async def act(config: RunConfig, tokens: int, turns: int) -> None:
    """An actor whose episodes take no time."""
    template = ready_made(tokens, turns)
    outbox: Outbox[str, WireMessage] = Outbox(OUTBOX_BYTES_MAX)
    async with open_link(config, "actor-0") as link:
        link.describe(
            {"role": "actor", "name": "actor-0", "schema_version": SCHEMA_VERSION, "slots": SLOTS, "holding": []}
        )
        while True:
            event = await link.receive()
            message = event.message
            if event.kind is EventKind.CONNECTED and message is not None:
                outbox.grant(message.header["credit_bytes"])
            elif event.kind is EventKind.MESSAGE and message is not None and message.kind is Kind.ORDER:
                order = decode_request(Order, message.header)
                played = replace(template, trajectory_id=order.order_id, group_id=order.group_id, task=order.task)
                answer = WireMessage(Kind.TRAJECTORY, {"trajectory_id": order.order_id}, encode_trajectory(played))
                outbox.add(order.order_id, answer, answer.n_bytes)
            elif event.kind is EventKind.MESSAGE and message is not None and message.kind is Kind.ACK:
                for name in message.header["trajectory_ids"]:
                    outbox.forget(name)
            while (item := outbox.take()) is not None:
                await link.send(item[1])


async def learn(config: RunConfig) -> tuple[float, int]:
    """The learner's end: seconds from the first to the last trained update, and the bytes of the trajectories in
    between."""
    assembler = GroupAssembler(config.groups.groups_per_step)
    steps, n_bytes, started = config.run.total_steps, 0, 0.0
    async with open_link(config, "learner") as link:
        hello = {
            "role": "learner",
            "name": "learner",
            "schema_version": SCHEMA_VERSION,
            "session": "bench",
            "updates": 0,
        }
        hello |= {
            "durable_updates": 0,
            "credit_groups": 4 * GROUPS,
            "holding": [],
            "consumed": [],
        }
        link.describe(hello)
        update, numbers = 0, itertools.count(1)

        async def tell(kind: Kind, header: dict[str, Any]) -> None:
            await link.send(WireMessage(kind, {**header, "number": next(numbers)}))

        while update < steps:
            event = await link.receive()
            message = event.message
            if event.kind is EventKind.CONNECTED:
                await tell(Kind.VERSION, {"policy_version": 0, "updates": 0})
                started = time.perf_counter()
            if event.kind is not EventKind.MESSAGE or message is None:
                continue
            if message.kind is Kind.PLAN:
                assembler.plan(decode_request(GroupPlan, message.header), message.header["update"])
            elif message.kind is Kind.DELIVERY:
                h = message.header
                n_bytes += message.n_bytes
                trajectory = decode_trajectory(message.frames)
                assembler.deliver(h["group_id"], h["index"], trajectory, h["reward"], h["rewards"])
            while update < steps and assembler.ready(update):
                groups = assembler.take(update)
                names = [g.group_id for g in groups]
                await tell(Kind.CONSUMED, {"update": update, "group_ids": names})
                assembler.consumed(update)
                update += 1
                await tell(Kind.VERSION, {"policy_version": update, "updates": update})
                await tell(Kind.CHECKPOINTED, {"updates": update})
        seconds = time.perf_counter() - started
        await link.send(WireMessage(Kind.BYE, {"reason": "finished"}))
    return seconds, n_bytes


def run_actor(config: RunConfig, tokens: int, turns: int) -> None:
    anyio.run(act, config, tokens, turns, backend_options={"use_uvloop": True})


def through_afterplay(trajectories: int, tokens: int, turns: int) -> tuple[float, int]:
    """Seconds and bytes for ``trajectories`` (rounded to whole updates), and how many there were."""
    steps = max(1, trajectories // (GROUPS * ROLLOUTS))
    with tempfile.TemporaryDirectory() as folder:
        overrides = [
            f"run.directory={folder}",
            f"run.total_steps={steps}",
            f"groups.groups_per_step={GROUPS}",
            f"groups.n_rollout={ROLLOUTS}",
            f"actor.concurrency={SLOTS}",
            "staleness.max=3",
            "environments={bench: {name: arithmetic}}",
        ]
        config = resolve(loads("", overrides=overrides))
        file = Path(folder) / "config.yaml"
        file.write_text(dump(config))
        stage = subprocess.Popen(
            [sys.executable, "-m", "pipeline.cli.app", "replay", str(file)], stderr=subprocess.DEVNULL
        )
        actor = multiprocessing.get_context("spawn").Process(
            target=run_actor, args=(config, tokens, turns), daemon=True
        )
        actor.start()
        try:
            seconds, n_bytes = anyio.run(learn, config, backend_options={"use_uvloop": True})
        finally:
            actor.kill()
            stage.terminate()
            stage.wait(20)
    return seconds / (steps * GROUPS * ROLLOUTS), n_bytes // (steps * GROUPS * ROLLOUTS)


def push(address: str, size: int, count: int) -> None:
    socket = zmq.Context.instance().socket(zmq.PUSH)
    socket.connect(address)
    body = bytes(size)
    for _ in range(count):
        socket.send(body, copy=False)
    socket.close(linger=10_000)
    zmq.Context.instance().term()


def through_zeromq(size: int, count: int) -> float:
    """Seconds per message of ``size`` bytes through one PUSH and one PULL socket."""
    socket = zmq.Context.instance().socket(zmq.PULL)
    port = socket.bind_to_random_port("tcp://127.0.0.1")
    sender = multiprocessing.get_context("spawn").Process(target=push, args=(f"tcp://127.0.0.1:{port}", size, count))
    sender.start()
    socket.recv(copy=False)
    started = time.perf_counter()
    for _ in range(count - 1):
        socket.recv(copy=False)
    seconds = time.perf_counter() - started
    sender.join(20)
    socket.close(linger=0)
    return seconds / (count - 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--trajectories", type=int, default=8192)
    parser.add_argument("--tokens", type=int, default=2000)
    parser.add_argument("--turns", type=int, default=8)
    arguments = parser.parse_args()
    ours, size = through_afterplay(arguments.trajectories, arguments.tokens, arguments.turns)
    bare = through_zeromq(size, arguments.trajectories)
    print(f"trajectories of {arguments.tokens} tokens, {arguments.turns} turns, {size} bytes")
    for name, seconds in (("bare ZeroMQ, one hop", bare), ("actor → replay (durable) → learner", ours)):
        print(
            f"{name:36}{1 / seconds:10.0f} trajectories/s{size / seconds / 1e6:10.1f} MB/s{1e6 * seconds:9.1f} µs each"
        )
    print(f"share of bare ZeroMQ's rate: {bare / ours:.3f}")


if __name__ == "__main__":
    main()
