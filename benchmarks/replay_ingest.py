"""Durable ingest of the replay stage: trajectories of 2,000 tokens through core and store, one transaction per round.

    python benchmarks/replay_ingest.py [--trajectories 8000] [--round 16]

Prints trajectories/s of the stage (decode, validate, account, score, commit) and of bare SQLite inserts of the same
bytes.
"""

from __future__ import annotations

import argparse
import sqlite3
import tempfile
import time
from pathlib import Path

import numpy as np

from pipeline.config import RunConfig
from pipeline.schema import SCHEMA_VERSION, FinishReason, Message, Order, TokenSpan, Trajectory, TrajectoryStatus, Turn
from pipeline.schema.codec import encode_trajectory
from pipeline.schema.orders import decode_request
from pipeline.scorer.scorer import Scorer
from pipeline.stage.core import StageCore
from pipeline.store.effects import Send
from pipeline.store.store import ReplayStore
from pipeline.transport.messages import Kind, WireMessage

TURNS, TOKENS = 8, 2000


def trajectory(order: Order, rng: np.random.Generator) -> Trajectory:
    """``TURNS`` turns of 50 context and 200 sampled tokens."""
    turns = []
    for _ in range(TURNS):
        context = TokenSpan.context(rng.integers(0, 49152, TOKENS // TURNS - 200, dtype=np.int32))
        sampled = rng.integers(0, 49152, 200, dtype=np.int32)
        completion = TokenSpan.sampled(sampled, -rng.random(200, dtype=np.float32), 0)
        messages = (Message("user", "x" * 200),)
        turns.append(Turn(context, completion, messages, Message("assistant", "y" * 600), FinishReason.STOP, 1.0))
    return Trajectory(
        order.order_id,
        order.group_id,
        order.task,
        tuple(turns),
        TrajectoryStatus.COMPLETE,
        rewards={"environment": 1.0},
    )


def stage(path: Path, n: int, per_round: int, synchronous: str) -> tuple[float, dict[str, float]]:
    """Trajectories per second, and seconds by part."""
    config = RunConfig.model_validate(
        {
            "run": {"total_steps": 10**6},
            "groups": {"n_rollout": 8, "groups_per_step": n // 8},
            "actor": {"concurrency": n},
            "environments": {"a": {"max_seconds": 1e6}},
        }
    )
    store = ReplayStore(path, synchronous)
    core = StageCore(config, store.load(), score_now=Scorer(config.scorer).score_now)
    core.peer_up("actor-0", {"role": "actor", "schema_version": SCHEMA_VERSION, "slots": n, "holding": []})
    hello = {"session": "s", "updates": 0, "policy_version": -1, "durable_updates": 0, "credit_groups": 1}
    core.peer_up("learner", {"role": "learner", "schema_version": SCHEMA_VERSION, **hello})
    core.message("learner", WireMessage(Kind.VERSION, {"number": 1, "policy_version": 0, "updates": 0}))
    core.plan()
    changes, effects = core.collect()
    store.commit(changes)
    rng = np.random.default_rng(0)
    template = None
    arrivals: list[WireMessage] = []
    for effect in effects:
        if isinstance(effect, Send) and effect.kind is Kind.ORDER:
            order = decode_request(Order, effect.header)
            if template is None:
                template = trajectory(order, rng)
            answer = Trajectory(
                order.order_id, order.group_id, order.task, template.turns, template.status, rewards=template.rewards
            )
            arrivals.append(WireMessage(Kind.TRAJECTORY, {"trajectory_id": order.order_id}, encode_trajectory(answer)))
    size = arrivals[0].n_bytes
    apply = commit = cpu = 0.0
    for at in range(0, len(arrivals), per_round):
        t0 = time.perf_counter()
        c0 = time.process_time()
        for message in arrivals[at : at + per_round]:
            core.message("actor-0", message)
        core.plan()
        changes, effects = core.collect()
        t1 = time.perf_counter()
        cpu += time.process_time() - c0
        store.commit(changes)
        commit += time.perf_counter() - t1
        apply += t1 - t0
    store.close()
    return len(arrivals) / (apply + commit), {
        "apply": apply,
        "commit": commit,
        "cpu": cpu,
        "bytes": float(size),
        "n": float(len(arrivals)),
    }


def bare(path: Path, n: int, size: int, per_round: int, synchronous: str) -> float:
    """SQLite inserts of ``size`` bytes, ``per_round`` to a transaction."""
    connection = sqlite3.connect(path, isolation_level=None)
    connection.execute("PRAGMA journal_mode = WAL")
    connection.execute(f"PRAGMA synchronous = {synchronous}")
    connection.execute("CREATE TABLE t (id INTEGER PRIMARY KEY, a BLOB)")
    payload = np.random.default_rng(0).bytes(size)
    started = time.perf_counter()
    for at in range(0, n, per_round):
        connection.execute("BEGIN")
        connection.executemany("INSERT INTO t VALUES (?,?)", ((i, payload) for i in range(at, min(n, at + per_round))))
        connection.execute("COMMIT")
    seconds = time.perf_counter() - started
    connection.close()
    return n / seconds


def run() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trajectories", type=int, default=8000)
    parser.add_argument("--round", type=int, default=16)
    parser.add_argument("--synchronous", default="FULL")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=".") as folder:
        rate, parts = stage(Path(folder) / "s.sqlite", options.trajectories, options.round, options.synchronous)
        floor = bare(
            Path(folder) / "b.sqlite", int(parts["n"]), int(parts["bytes"]), options.round, options.synchronous
        )
    n = parts["n"]
    print(
        f"{n:.0f} trajectories of {parts['bytes']:.0f} bytes, {options.round} to a transaction, {options.synchronous}"
    )
    print(
        f"stage        {rate:8.0f} /s   (each: apply {parts['apply'] / n * 1e6:.0f} us, "
        f"{parts['cpu'] / n * 1e6:.0f} us of CPU; commit {parts['commit'] / n * 1e6:.0f} us)"
    )
    print(f"bare SQLite  {floor:8.0f} /s   ratio {rate / floor:.2f}")


if __name__ == "__main__":
    run()
