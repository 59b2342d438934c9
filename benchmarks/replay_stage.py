"""The replay stage's own store with trajectories of 2,000 tokens in 8 turns: ingest, memory, reopening.

    python -m benchmarks.replay_stage --reopen 50000

Time to open a stage whose trajectories are rolled up but for those of its newest groups, and one of known tasks:

    python -m benchmarks.replay_stage --rolled-up 10000000 --known 1000000 --json opening.json

CPU time of planning a replay group with so many tasks in the pool, and of changing a task:

    python -m benchmarks.replay_stage --draws 50000 1000000 --json draws.json

CPU time of the stage for an update, from the rollouts to the checkpoint, by values of ``replay.keep_trained``:

    python -m benchmarks.replay_stage --kept 0 10 --json kept.json
"""

from __future__ import annotations

import argparse
import bisect
import gc
import itertools
import json
import os
import platform
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.replay_ingest import bare, stage, trajectory
from pipeline.config import RunConfig
from pipeline.replay.difficulty import Difficulty
from pipeline.replay.pool import Pool
from pipeline.replay.replay import Planner
from pipeline.replay.selection import Draws
from pipeline.replay.stored_groups import StoredGroups
from pipeline.replay.transfer import PoolWriter
from pipeline.schema import SCHEMA_VERSION, Order, Task, TokenSpan, Turn
from pipeline.schema.codec import encode_trajectory
from pipeline.schema.orders import decode_request
from pipeline.scorer.scorer import Scorer
from pipeline.stage.core import RETAIN_GROUPS, StageCore
from pipeline.store.effects import Send
from pipeline.store.journal import Changes, group_row, order_row, task_row, trajectory_row
from pipeline.store.records import (
    Facts,
    GroupRecord,
    GroupState,
    OrderKey,
    OrderRecord,
    OrderState,
    Slot,
    TrajectoryRecord,
    TrajectoryState,
)
from pipeline.store.replay_records import PoolEntry, StoredGroup, TaskRecord
from pipeline.store.store import ReplayStore
from pipeline.transport.messages import Kind, WireMessage

PER_TASK = 5
BATCH = 64
"""Tasks of the batch, which are not drawn again."""
ROUNDS, DRAWS = 7, 1000
KEPT_UPDATES, GROUPS = 40, 8
SAMPLINGS = ["priority", "normal", "uniform", "groups"]
"""Values of ``replay.task_sampling``; ``groups``: stored groups (``replay.mode: groups``) by priority."""
ROOT = Path(__file__).resolve().parents[1]

Rows = list[tuple[str, str, str, str]]


def config(n: int, **replay: object) -> RunConfig:
    return RunConfig.model_validate(
        {
            "run": {"total_steps": 10**6},
            "groups": {"n_rollout": 8},
            "environments": {"a": {"max_seconds": 1e6}},
            "replay": {"enabled": True, "mode": "mix", "capacity": n, "max_trajectories_per_task": PER_TASK} | replay,
        }
    )


def fill(path: Path, n: int) -> float:
    """A store whose pool holds ``n`` trajectories; bytes on disk."""
    rng = np.random.default_rng(0)
    template = trajectory(Order("g000000.0.0", "g000000", Task("a/0", "a", 0), 0, 0, 0, 1.0), rng)
    with ReplayStore(path, "NORMAL") as store:
        pool = PoolWriter(config(n), store, 0)
        for at in range(0, n, 500):
            some = []
            for i in range(at, min(n, at + 500)):
                task = Task(f"a/{i // PER_TASK}", "a", i // PER_TASK)
                one = replace(template, trajectory_id=f"import-{i:024x}", task=task, reward=1.0)
                some.append((one, None))
            pool.add(some)
    return float(path.stat().st_size)


def fill_rolled_up(path: Path, n: int) -> None:
    """A store of ``n`` trajectories, all rolled up but those of the newest :data:`RETAIN_GROUPS` groups."""
    size = config(1).groups.n_rollout
    last, first = n // size, max(0, n // size - RETAIN_GROUPS)
    with ReplayStore(path, "OFF") as store:
        for at in range(first, last, 1000):
            changes = Changes(forgotten_groups=list(range(at, min(at + 1000, last))))
            for number in changes.forgotten_groups:
                update, slots = number // BATCH, [Slot() for _ in range(size)]
                group = GroupRecord(number, Task(f"a/{number}", "a", number), update, 0.0, slots, GroupState.TRAINED)
                group.update, group.ended_at = update, 1.0
                changes.groups.append(group_row(group))
                for slot in range(size):
                    key = OrderKey(number, slot, 0)
                    order = OrderRecord(key, "actor-0", 0, update, 1.0, OrderState.DELIVERED, ended_at=2.0)
                    facts = Facts("complete", 8, 2000, 1500, update, update, 3.5, "actor-0", 20000, entropy=1.25)
                    held = TrajectoryRecord(number * size + slot, key, facts, 2.5, TrajectoryState.TRAINED, reward=1.0)
                    changes.orders.append(order_row(order))
                    changes.trajectories.append(trajectory_row(held))
            changes.meta = {"next_group": last, "consumed": last // BATCH, "policy_version": 0, "rolled_below": first}
            store.commit(changes)


def fill_known(path: Path, n: int) -> None:
    """A store with records of ``n`` tasks."""
    records = task_records(n, random.Random(0))
    with ReplayStore(path, "OFF") as store:
        for at in range(0, n, 10_000):
            store.commit(Changes(tasks=[task_row(record) for record in records[at : at + 10_000]]))


def rss_bytes() -> int:
    fields = Path("/proc/self/statm").read_text().split()
    return int(fields[1]) * 4096


def reopen(path: Path, n: int) -> None:
    """In a process of its own: seconds until the stage could serve, and what its memory grew by."""
    before = rss_bytes()
    started, cpu_started = time.perf_counter(), time.process_time()
    store = ReplayStore(path)
    core = StageCore(config(n), store.load())
    found: dict[str, object] = {"seconds": time.perf_counter() - started}
    found["cpu_seconds"] = time.process_time() - cpu_started
    print(json.dumps(found | {"bytes": rss_bytes() - before, "held": len(core.replay.pool)}))
    store.close()


def draw(n: int, samplings: list[str]) -> dict[str, object]:
    """Microseconds of CPU, a median and all rounds: one planned group, and one finished group of a stored task."""
    gc.disable()
    found: dict[str, object] = {"tasks": n, "batch": BATCH, "draws": DRAWS} | bare_draws(n)
    for sampling in samplings:
        found[sampling] = draw_groups(n) if sampling == "groups" else draw_tasks(n, sampling)
    return found


def bare_draws(n: int) -> dict[str, float]:
    """The least that a draw can cost. ``bisect_us``: one random number and a binary search in sums of weights that
    never change. ``cumsum_us``: these sums computed again by NumPy, as after a change."""
    rng, weights = random.Random(0), np.random.default_rng(0).random(n)
    ends = list(itertools.accumulate(weights))
    searched = timed(lambda _: bisect.bisect(ends, rng.random() * ends[-1]), range(DRAWS))
    summed = timed(lambda _: np.searchsorted(np.cumsum(weights), rng.random()), range(DRAWS // 50))
    return {"bisect_us": statistics.median(searched), "cumsum_us": statistics.median(summed)}


def timed(one: Callable[[Any], object], over: Sequence[Any]) -> list[float]:
    """Microseconds of CPU of ``one`` in each round."""
    rounds = []
    for _ in range(ROUNDS):
        started = time.process_time()
        for item in over:
            one(item)
        rounds.append((time.process_time() - started) / len(over) * 1e6)
    return rounds


def measured(built: float, drawn: list[float], changed: list[float]) -> dict[str, object]:
    return {
        "draw_us": statistics.median(drawn),
        "change_us": statistics.median(changed),
        "build_s": built,
        "draw_us_rounds": drawn,
        "change_us_rounds": changed,
    }


def entry_of(i: int, version: int) -> PoolEntry:
    return PoolEntry(i, f"t{i}", Task(f"a/{i}", "a", i), i, 1.0, 8, 2000, 1500, 20000, version, version, 1.0)


def task_records(n: int, rng: random.Random) -> list[TaskRecord]:
    """Of n tasks, each with a finished group of eight rollouts, from one to seven of them successes."""
    fresh = (TaskRecord.of(Task(f"a/{i}", "a", i)) for i in range(n))
    return [replace(one, bucket=s, successes=s, failures=8 - s, visits=1) for one in fresh for s in [rng.randint(1, 7)]]


def draw_tasks(n: int, sampling: str) -> dict[str, object]:
    """Of a pool with a trajectory of each of n tasks."""
    rng = random.Random(0)
    records = task_records(n, rng)
    tasks = [record.task for record in records]
    difficulty = Difficulty(config(n), {"a": n}, records)
    entries = [entry_of(i, rng.randrange(1000)) for i in range(n)]
    pool = Pool(config(n, capacity_bytes=2**50).replay, 1, entries)
    planner = Planner(config(n, task_sampling=sampling), pool, difficulty, Draws(0))
    started = time.process_time()
    planner.reindex()
    built = time.process_time() - started
    batch = dict.fromkeys(f"a/{rng.randrange(n)}" for _ in range(BATCH))

    def change(task: Task) -> None:
        difficulty.finished(task, 4, 8)
        pool.touched.add(task.task_id)
        planner.reindex()

    assert planner.replay_group(batch, 0.5, 1000) is not None
    drawn = timed(lambda _: planner.replay_group(batch, 0.5, 1000), range(DRAWS))
    return measured(built, drawn, timed(change, rng.sample(tasks, DRAWS)))


def draw_groups(n: int) -> dict[str, object]:
    """Of n stored groups (``replay.mode: groups``), each of its own task; the change is one more, which the oldest one
    leaves for."""
    rng, counter, draws = random.Random(0), itertools.count(), Draws(0)
    rules = config(n, mode="groups", groups={"capacity": n, "uses_max": 10**9})

    def group(_: int) -> StoredGroup:
        i = next(counter)
        one = entry_of(i, rng.randrange(1000))
        return StoredGroup(i, one.task, (one, *[replace(one, reward=0.0)] * rng.randint(1, 7)))

    started = time.process_time()
    held = StoredGroups(rules.replay, 8, 1, rules.environments)
    for i in range(n):
        held.save(group(i))
    built = time.process_time() - started
    batch = dict.fromkeys(f"a/{rng.randrange(n)}" for _ in range(BATCH))
    assert held.draw(batch, 1000, draws.next("group")) is not None
    drawn = timed(lambda _: held.draw(batch, 1000, draws.next("group")), range(DRAWS))
    return measured(built, drawn, timed(lambda i: held.save(group(i)), range(DRAWS)))


def draws(sizes: list[int], samplings: list[str]) -> dict[str, object]:
    """One size after the other, each in a process of its own."""
    found = []
    for n in sizes:
        command = [sys.executable, "-m", "benchmarks.replay_stage", "--draw", str(n), "--sampling", *samplings]
        found.append(json.loads(subprocess.run(command, capture_output=True, check=True, text=True, cwd=ROOT).stdout))
        for sampling in samplings:
            at, least = found[-1][sampling], found[-1]["bisect_us"]
            print(
                f"{n:,} tasks, {sampling}: {at['draw_us']:.1f} us a draw, {at['change_us']:.1f} us a change; "
                f"{at['draw_us'] / least:.0f} times a bare binary search ({least:.2f} us), "
                f"NumPy's sums of all weights: {found[-1]['cumsum_us']:.0f} us",
                flush=True,
            )
    return {"python": platform.python_version(), "cores": os.cpu_count(), "sizes": found}


def kept_update(keep: int) -> dict[str, float]:
    """Milliseconds of CPU that core and store take for an update of ``GROUPS`` groups with ``replay.keep_trained:
    keep``, and bytes of the store after :data:`KEPT_UPDATES`, with a checkpoint after every tenth."""
    plain: dict[str, object] = {"enabled": False, "mode": "groups", "keep_trained": keep}
    rules = config(1, **plain).updated(groups={"groups_per_step": GROUPS}, checkpoint={"every": 10})
    rng, sent, cpu = np.random.default_rng(0), list[Send](), 0.0
    with tempfile.TemporaryDirectory(dir=".") as folder, ReplayStore(Path(folder) / "s.sqlite", "FULL") as store:
        core = StageCore(rules, store.load(), score_now=Scorer(rules.scorer).score_now)

        def tell(peer: str, *messages: WireMessage) -> None:
            nonlocal cpu
            started = time.process_time()
            for message in messages:
                core.message(peer, message)
            core.plan()
            changes, effects = core.collect()
            store.commit(changes)
            cpu += time.process_time() - started
            sent.extend(effect for effect in effects if isinstance(effect, Send))

        def report(kind: Kind, **header: object) -> WireMessage:
            return WireMessage(kind, {"number": core.control.applied + 1, **header})

        slots = 2 * GROUPS * rules.groups.n_rollout
        schema = {"schema_version": SCHEMA_VERSION}
        core.peer_up("actor-0", {"role": "actor", "slots": slots, "holding": [], **schema})
        hello = {"session": "s", "updates": 0, "policy_version": -1, "durable_updates": 0, "credit_groups": 2 * GROUPS}
        core.peer_up("learner", {"role": "learner", **hello, **schema})
        tell("learner", report(Kind.VERSION, policy_version=0, updates=0))
        template, version = trajectory(Order("g000000.0.0", "g000000", Task("a/0", "a", 0), 0, 0, 0, 1.0), rng), 0
        for update in range(KEPT_UPDATES):
            placed: list[str] = []
            while len(placed) < GROUPS:
                orders = [decode_request(Order, one.header) for one in sent if one.kind is Kind.ORDER]
                placed += [s.header["group_id"] for s in sent if s.kind is Kind.PLAN and s.header["update"] == update]
                sent[:] = [s for s in sent if s.kind is Kind.PLAN and s.header["update"] != update]
                answers = []
                for order in orders:
                    if order.policy_version != version:
                        version = order.policy_version
                        template = replace(template, turns=tuple(sampled_by(version, turn) for turn in template.turns))
                    own = replace(template, trajectory_id=order.order_id, group_id=order.group_id, task=order.task)
                    frames = encode_trajectory(replace(own, rewards={"environment": float(order.slot % 2)}))
                    answers.append(WireMessage(Kind.TRAJECTORY, {"trajectory_id": order.order_id}, frames))
                for at in range(0, len(answers), 16):
                    tell("actor-0", *answers[at : at + 16])
            done = update + 1
            tell("learner", report(Kind.CONSUMED, update=update, group_ids=sorted(placed)))
            tell("learner", report(Kind.VERSION, policy_version=done, updates=done))
            if done % 10 == 0:
                tell("learner", report(Kind.CHECKPOINTED, updates=done))
        n_bytes = store.path.stat().st_size
    return {"keep_trained": keep, "cpu_ms": cpu / KEPT_UPDATES * 1e3, "store_bytes": n_bytes}


def sampled_by(version: int, turn: Turn) -> Turn:
    logprobs = turn.completion.behaviour_logprobs
    assert logprobs is not None
    return replace(turn, completion=TokenSpan.sampled(turn.completion.token_ids, logprobs, version))


def kept(values: list[int], rounds: int) -> dict[str, object]:
    """Rounds of all values in turn, each in a process of its own, the order reversed every second round."""
    found = []
    for i in range(rounds):
        for keep in values[:: -1 if i % 2 else 1]:
            command = [sys.executable, "-m", "benchmarks.replay_stage", "--kept-once", str(keep)]
            done = subprocess.run(command, capture_output=True, check=True, text=True, cwd=ROOT)
            found.append(json.loads(done.stdout))
            print(found[-1], flush=True)
    medians = {keep: statistics.median(f["cpu_ms"] for f in found if f["keep_trained"] == keep) for keep in values}
    ratios = [medians[keep] / medians[values[0]] for keep in values]
    return {"updates": KEPT_UPDATES, "groups": GROUPS, "cpu_ms": medians, "ratios": ratios, "rounds": found}


def reopened(path: Path, n: int, rounds: int = 3) -> list[dict[str, float]]:
    """Results of :func:`reopen`, one for each round."""
    command = [sys.executable, "-m", "benchmarks.replay_stage", "--measure", str(path.absolute()), "--reopen", str(n)]
    runs = [subprocess.run(command, capture_output=True, check=True, text=True, cwd=ROOT) for _ in range(rounds)]
    return [json.loads(run.stdout) for run in runs]


def opening(folder: Path, rolled_up: int | None, known: int | None) -> dict[str, object]:
    """Seconds until a stage could serve, wall and CPU."""
    found: dict[str, object] = {}
    for what, fill_it, n in (("rolled-up trajectories", fill_rolled_up, rolled_up), ("tasks", fill_known, known)):
        if n is not None:
            path = folder / f"{what}.sqlite"
            fill_it(path, n)
            rounds = found[what] = reopened(path, n)
            wall, cpu = (min(one[key] for one in rounds) for key in ("seconds", "cpu_seconds"))
            print(f"{n:,} {what} | {wall:.2f} s | {cpu:.2f} s of CPU", flush=True)
    return {"python": platform.python_version(), "cores": os.cpu_count(), "opening": found}


def stage_rows(folder: Path, n: int) -> Rows:
    rate, parts = max((stage(folder / f"s{i}.sqlite", 4000, 16, "FULL") for i in range(3)), key=lambda found: found[0])
    size = int(parts["bytes"])
    floor = bare(folder / "bare.sqlite", 4000, size, 16, "FULL")
    rows = [
        (f"durable ingest, {size:,} B each", f"{rate:,.0f} /s", f"{floor:,.0f} /s (bare SQLite inserts)",
         f"{floor / rate:.2f}×"),
    ]  # fmt: skip
    path = folder / "pool.sqlite"
    on_disk = fill(path, n)
    found = reopened(path, n)
    assert all(f["held"] == n for f in found), found
    best = min(found, key=lambda f: f["seconds"])
    rows += [
        (f"reopen a pool of {n:,}", f"{best['seconds']:.2f} s", "", ""),
        ("memory of the process per trajectory", f"{best['bytes'] / n:,.0f} B", f"{size:,} B (payload)", ""),
        ("disk per trajectory", f"{on_disk / n:,.0f} B", f"{size:,} B (payload)", ""),
    ]
    for row in rows:
        print("  " + " | ".join(row), file=sys.stderr, flush=True)
    return rows


def run() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--reopen", type=int, default=50_000)
    parser.add_argument("--folder", type=Path, default=Path("."))
    parser.add_argument("--measure", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--rolled-up", type=int, help="trajectories of a stage: measure its opening instead")
    parser.add_argument("--known", type=int, help="tasks with a record: measure the opening instead")
    parser.add_argument("--draws", type=int, nargs="+", help="tasks in the pool: measure planning instead")
    parser.add_argument("--sampling", nargs="+", choices=SAMPLINGS, default=SAMPLINGS)
    parser.add_argument("--kept", type=int, nargs="+", help="values of replay.keep_trained: measure updates instead")
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="with --kept")
    parser.add_argument("--json", type=Path, help="all but --reopen: write every round to this file")
    parser.add_argument("--draw", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--kept-once", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.kept_once is not None:
        print(json.dumps(kept_update(options.kept_once)))
        return
    if options.draw:
        print(json.dumps(draw(options.draw, options.sampling)))
        return
    if options.draws or options.kept or options.rolled_up or options.known:
        if options.draws:
            found = draws(options.draws, options.sampling)
        elif options.kept:
            found = kept(options.kept, options.rounds)
        else:
            with tempfile.TemporaryDirectory(dir=options.folder) as folder:
                found = opening(Path(folder), options.rolled_up, options.known)
        if options.json:
            options.json.write_text(json.dumps(found, indent=1) + "\n")
        return
    if options.measure:
        reopen(options.measure, options.reopen)
        return
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        for row in stage_rows(Path(folder), options.reopen):
            print(" | ".join(row))


if __name__ == "__main__":
    run()
