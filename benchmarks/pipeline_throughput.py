"""Trajectories/s and MB/s through actor → replay stage → learner, against bare ZeroMQ moving the same bytes in the
same run.

::

    python -m benchmarks.pipeline_throughput --trajectories 8192 --tokens 2000 --turns 8

Three real processes: an actor whose episodes are ready-made (each is encoded on its own, as an actor does), the real
replay stage with its durable SQLite store, and a learner's session that decodes every trajectory, assembles every group
and answers CONSUMED, and makes no rows. The bare side is one PUSH and one PULL socket in two processes that move the
same number of messages of the same size, once (Afterplay moves each trajectory twice, and makes it durable in between).
CPU time is that of the whole process, for each trajectory; on shared cores it says more than the rates.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import anyio
import numpy as np
import zmq

from benchmarks.replay_stage import sampled_by
from learner.process.session import LearnerProgress, LearnerSession
from pipeline.config import RunConfig
from pipeline.config.explain import resolve
from pipeline.config.load import dump, loads
from pipeline.config.rollouts import OUTBOX_BYTES_MAX
from pipeline.schema import SCHEMA_VERSION, FinishReason, Message, Task, TokenSpan, Trajectory, TrajectoryStatus, Turn
from pipeline.schema.codec import Limits, encode_trajectory
from pipeline.schema.orders import Order, decode_request
from pipeline.schema.record_file import n_bytes
from pipeline.transport.messages import EventKind, Kind, WireMessage
from pipeline.transport.outbox import Outbox
from pipeline.transport.zeromq import open_link

GROUPS, ROLLOUTS, SLOTS = 32, 8, 1024
PROCESSES = ("actor", "stage", "learner")


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
    template, version = ready_made(tokens, turns), 0
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
                if order.policy_version != version:
                    version = order.policy_version
                    template = replace(template, turns=tuple(sampled_by(version, turn) for turn in template.turns))
                played = replace(template, trajectory_id=order.order_id, group_id=order.group_id, task=order.task)
                answer = WireMessage(Kind.TRAJECTORY, {"trajectory_id": order.order_id}, encode_trajectory(played))
                outbox.add(order.order_id, answer, answer.n_bytes)
            elif event.kind is EventKind.MESSAGE and message is not None and message.kind is Kind.ACK:
                for name in message.header["trajectory_ids"]:
                    outbox.forget(name)
            while (item := outbox.take()) is not None:
                await link.send(item[1])


async def learn(config: RunConfig, pids: Sequence[int]) -> tuple[float, list[float]]:
    """The learner's end: seconds from the first to the last trained update, and CPU seconds of these processes in
    between."""
    async with open_link(config, "learner") as link, anyio.create_task_group() as tasks:
        session = LearnerSession(link, config.groups, 4 * GROUPS, LearnerProgress(), Limits.of(config))
        tasks.start_soon(session.run)
        await session.welcome()
        started, before = time.perf_counter(), list(map(cpu_seconds, pids))
        await session.announce(0, 0)
        for update in range(config.run.total_steps):
            await session.ready(update)
            await session.consumed(update)
            await session.announce(update + 1, update + 1)
            await session.checkpointed(update + 1)
        seconds, after = time.perf_counter() - started, list(map(cpu_seconds, pids))
        await session.bye("finished")
        tasks.cancel_scope.cancel()
    return seconds, [one - other for one, other in zip(after, before, strict=True)]


def cpu_seconds(pid: int) -> float:
    """CPU time of a process until now, of Linux."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return sum(map(int, fields[11:13])) / os.sysconf("SC_CLK_TCK")


def run_actor(config: RunConfig, tokens: int, turns: int) -> None:
    anyio.run(act, config, tokens, turns, backend_options={"use_uvloop": True})


def through_afterplay(trajectories: int, tokens: int, turns: int) -> tuple[float, list[float]]:
    """Seconds for each of ``trajectories`` (rounded to whole updates); CPU seconds of actor, stage and learner."""
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
            assert actor.pid is not None
            pids = actor.pid, stage.pid, os.getpid()
            seconds, cpu = anyio.run(learn, config, pids, backend_options={"use_uvloop": True})
        finally:
            actor.kill()
            stage.terminate()
            stage.wait(20)
    n = steps * GROUPS * ROLLOUTS
    return seconds / n, [one / n for one in cpu]


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
    size = sum(map(n_bytes, encode_trajectory(ready_made(arguments.tokens, arguments.turns))))
    ours, cpu = through_afterplay(arguments.trajectories, arguments.tokens, arguments.turns)
    bare = through_zeromq(size, arguments.trajectories)
    print(f"trajectories of {arguments.tokens} tokens, {arguments.turns} turns, {size} bytes")
    for name, seconds in (("bare ZeroMQ, one hop", bare), ("actor → replay (durable) → learner", ours)):
        print(
            f"{name:36}{1 / seconds:10.0f} trajectories/s{size / seconds / 1e6:10.1f} MB/s{1e6 * seconds:9.1f} µs each"
        )
    print("CPU: " + ", ".join(f"{name} {1e6 * one:.0f} µs" for name, one in zip(PROCESSES, cpu, strict=True)))
    print(f"share of bare ZeroMQ's rate: {bare / ours:.3f}")


if __name__ == "__main__":
    main()
