"""Runs with real vLLM servers, each played once a session and read by several tests: the quickstart, which two signals
end, a run of a float32 engine, which one signal ends, and a run of two engines of which one is killed."""

from __future__ import annotations

import os
import shutil
import signal
import sqlite3
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from actors.engine.answers import read_report
from actors.engine.base import EngineReport
from actors.servers.vllm import vllm_available
from pipeline.config.load import load
from pipeline.runtime.run_directory import RunDirectory
from pipeline.schema import Trajectory
from pipeline.schema.codec import decode_trajectory
from pipeline.store import tables
from pipeline.store.store import marks_path
from tests.support.run_handle import RunHandle, start_run

CONFIGS = Path(__file__).parents[2] / "configs"
RIGHT_ENOUGH = 0.5
"""Share of right first answers at which the quickstart is stopped: from a sixth, in half of the updates to 0.9."""
COIN = [
    "groups.n_rollout=4",
    "checkpoint.every=1000",  # payloads are kept until a checkpoint covers them
    "checkpoint.at_end=false",
    "publish.keep=100",
    "replay.enabled=true",
    "replay.mode=mix",
    "replay.start_ratio=0",
    "replay.task_ratio=1",
    "replay.trajectories_per_task=2",
    "replay.max_trajectories_per_task=4",
    f"scorer.functions=[{{path: '{Path(__file__).with_name('plugins_for_truth.py')}:coin', weight: 1}}]",
    "scorer.environment_weight=0",
]
"""Replays of multi-turn successes soon, whoever is right, and every payload and published weight kept."""
FLOAT32_UPDATES = 3
"""Updates that a new learner asks for after the run."""
FLOAT32_GROUPS = 3
"""Groups of an update. With as many rollouts as are played at once, all of them would go on under the next version."""
COMPARED_MAX = 8
"""Trajectories of each version whose log-probabilities are recomputed."""
FLOAT32 = [
    *COIN,
    "run.total_steps=100",  # far more than are made: the run is interrupted
    "environments.arithmetic.tasks=2",  # tasks come again, so their successes do
    "engine.dtype=float32",
    "publish.dtype=float32",
    "learner.compute_dtype=float32",
    "environments.arithmetic.options.attempts=3",
    "environments.arithmetic.options.low=10",
    "environments.arithmetic.options.high=99",
    "sampling.max_tokens=16",
    f"groups.groups_per_step={FLOAT32_GROUPS}",
    "staleness.max=100",
    "actor.concurrency=4",  # few at a time, never at the bound of staleness: play goes on while weights are published
]
TWO_ENGINES_STEPS = 7
STEPS_BEFORE_KILL = 2
"""More where the second engine came later, or the other one was the first to have each new version: rollouts that wait
for a version all go to the engine that has it first."""
TWO_ENGINES = [
    *COIN,
    f"run.total_steps={TWO_ENGINES_STEPS}",
    "environments.arithmetic.options.attempts=3",
    "sampling.max_tokens=16",
    "environments.arithmetic.options.low=100",
    "environments.arithmetic.options.high=999",
    "environments.arithmetic.tasks=2",  # each step has them all, so from the second on there are replays
    "groups.groups_per_step=2",
    "staleness.max=0",  # no publication in the middle of a conversation: that would empty the caches
]


def require_vllm() -> None:
    usable, reason = vllm_available()
    if not usable:
        pytest.skip(f"NO vLLM TESTS HERE: {reason}")


@dataclass(frozen=True)
class Stop:
    """The end of a run after signals."""

    seconds: float
    had_engine: bool
    """A vLLM server was among its processes."""
    survivors: list[psutil.Process]


@dataclass(frozen=True)
class StoppedRun:
    """A run that signals ended while it played and learnt."""

    run: RunHandle
    stop: Stop
    store_before: Path | None = None
    """Copy of the store before the stop, which writes a checkpoint: without one, all groups are delivered again."""


@dataclass(frozen=True)
class TwoEnginesRun:
    """A run that finished although one of its engines was killed."""

    run: RunHandle
    hits: int
    """Prefix-cache hits of both engines before the kill."""
    before: list[Trajectory]
    """Trajectories trained by then: they finished before the counters were read."""
    exit_code: int


def stopped(run: RunHandle, signals: int) -> Stop:
    children = psutil.Process(run.process.pid).children(recursive=True)
    had_engine = any("api_server" in " ".join(child.cmdline()) for child in children)
    begun = time.monotonic()
    for _ in range(signals):
        run.process.send_signal(signal.SIGINT)
    run.process.wait(60)
    seconds = time.monotonic() - begun
    return Stop(seconds, had_engine, psutil.wait_procs(children, timeout=5)[1])


@contextmanager
def played(
    factory: pytest.TempPathFactory, name: str, file: str = "quickstart", overrides: Sequence[str] = ()
) -> Iterator[RunHandle]:
    """``configs/FILE.yaml`` in a folder of its own. Its weights are removed in the end: pytest keeps the folders of
    three sessions."""
    require_vllm()
    with start_run(CONFIGS / f"{file}.yaml", factory.mktemp(name), name, overrides) as run:
        yield run
    shutil.rmtree(run.directory.path / "weights", ignore_errors=True)


@pytest.fixture(scope="session")
def quickstart_run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StoppedRun]:
    """The quickstart until half of an update's first answers are right and a checkpoint is written."""
    with played(tmp_path_factory, "quickstart", overrides=["checkpoint.every=4"]) as run:
        run.until("a step of 50 % right first answers, and a checkpoint", lambda: has_learnt(run), 1200)
        yield StoppedRun(run, stopped(run, 2))


def has_learnt(run: RunHandle) -> bool:
    right = any(step["signals"]["first_right"] >= RIGHT_ENOUGH for step in run.steps())
    return right and any(run.directory.checkpoints.glob("u*/model"))


@pytest.fixture(scope="session")
def float32_run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StoppedRun]:
    """Until the store has replays, trajectories under several versions, and enough groups."""
    with played(tmp_path_factory, "float32", overrides=FLOAT32) as run:
        run.until("play while weights were published, and replays", lambda: shows_the_truth(run.directory), 1500)
        store = tmp_path_factory.mktemp("before") / run.directory.store_file.name
        shutil.copy(marks_path(run.directory.store_file), store.parent)  # first: the store may know more than its marks
        with (
            closing(sqlite3.connect(f"file:{run.directory.store_file}?mode=ro", uri=True)) as alive,
            closing(sqlite3.connect(store)) as copy,
        ):
            alive.backup(copy)
        yield StoppedRun(run, stopped(run, 1), store)


def shows_the_truth(directory: RunDirectory) -> bool:
    """Trajectories under one policy version and under several, a trained replay, and trained groups."""
    if not directory.store_file.exists():
        return False
    with closing(tables.STORE.connect(directory.store_file, read_only=True)) as connection:
        (replays,) = connection.execute("SELECT count(*) FROM group_replays WHERE chosen = 1").fetchone()
        (groups,) = connection.execute("SELECT count(*) FROM groups WHERE state = 'trained'").fetchone()
        alike = connection.execute(
            "SELECT count(*) FROM trajectories WHERE version_min = version_max GROUP BY version_min"
        ).fetchall()
    enough = sum(min(count, COMPARED_MAX) for (count,) in alike) >= 2 * COMPARED_MAX
    return bool(enough and replays and groups >= FLOAT32_UPDATES * FLOAT32_GROUPS and mixed(directory) >= 3)


def mixed(directory: RunDirectory) -> int:
    """Trajectories whose tokens come from more than one policy version."""
    with closing(tables.STORE.connect(directory.store_file, read_only=True)) as connection:
        (count,) = connection.execute("SELECT count(*) FROM trajectories WHERE version_min < version_max").fetchone()
    return int(count)


@pytest.fixture(scope="session")
def two_engines_run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TwoEnginesRun]:
    """To its last step, with one engine killed on the way."""
    with played(tmp_path_factory, "two_engines", "two_engines", TWO_ENGINES) as run:
        before = run.until("two steps and trained rollouts of both engines", lambda: both_played(run), 900)
        hits = sum(report.prefix_hits for report in reports(run))
        os.kill(engine_process(run).pid, signal.SIGKILL)
        yield TwoEnginesRun(run, hits, before, run.finish(900))


def both_played(run: RunHandle) -> list[Trajectory] | None:
    """The trained rollouts, once they come from two engines; else None."""
    steps = len(run.steps())
    if steps < STEPS_BEFORE_KILL:
        return None
    trained = [t for t in stored(run.directory) if (seen := t.version_range()) and seen[1] < steps]
    return trained if len({url for t in trained for url in t.engine.engine_ids}) == 2 else None


def reports(run: RunHandle) -> list[EngineReport]:
    """The engines' own counters."""
    config = load(run.directory.config_file, environment={})
    found = []
    for url in config.engine.addresses():
        with urllib.request.urlopen(f"{url}/metrics", timeout=20) as answer:
            report = read_report(answer.read().decode())
        assert report is not None
        found.append(report)
    return found


def engine_process(run: RunHandle) -> psutil.Process:
    """The first engine's server."""
    port = load(run.directory.config_file, environment={}).engine.port
    for child in psutil.Process(run.process.pid).children(recursive=True):
        if f"--port {port}" in " ".join(child.cmdline()) and "api_server" in " ".join(child.cmdline()):
            return child
    raise AssertionError(f"no engine on port {port}")


def stored(directory: RunDirectory) -> list[Trajectory]:
    """Every trajectory whose payload is kept."""
    with closing(tables.STORE.connect(directory.store_file, read_only=True)) as connection:
        rows = connection.execute("SELECT header, token_ids, logprobs, spans FROM payloads").fetchall()
    return [decode_trajectory(row) for row in rows]
