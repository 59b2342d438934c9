"""A learner that is stopped or killed and starts again ends where one ends that was never stopped.

A tiny run is played for real, with the embedded engine and with replays. Its learner saves nothing, so the replay stage
keeps every group. Then learners in processes of their own begin from update 0, each at a stage with a copy of that
store: the stage gives them the same groups for the same updates, and there is no actor that could play others.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
import pytest
import torch
import yaml
from aiohttp import web
from safetensors.torch import load_file

from learner.checkpoints.checkpoint import checkpoint_path, find_checkpoints, read_state
from pipeline.config.load import load
from pipeline.runtime.process import RoleContext
from pipeline.runtime.run_directory import RunDirectory
from pipeline.stage.role import main as stage_main
from pipeline.store.ledger import read_ledger
from pipeline.views.step_lines import read_lines
from tests.support.fork_server import Forked, ForkServer
from tests.support.http_server import serving

ROOT = Path(__file__).parents[2]
TINY = ROOT / "configs" / "tiny.yaml"
GROUPS = 6
UPDATES, EVERY, STOP_AFTER = 9, 4, 5
"""Of the run; between checkpoints; before the learner is stopped. It makes one more at most while the engine keeps it
waiting, so that it ends between two checkpoints."""
RECORDED = [
    f"run.total_steps={UPDATES}",
    "groups.n_rollout=8",
    f"groups.groups_per_step={GROUPS}",
    "environments.guess.tasks=10",
    "replay.enabled=true",
    "replay.mode=mix",
    "replay.start_ratio=0",
    "replay.entropy=current",
    "replay.ess_guard.enabled=true",
    "learner.minibatches=2",
    "learner.schedule=cosine",
    f"checkpoint.every={UPDATES + 1}",
    "checkpoint.at_end=false",
]
OF_THE_MACHINE = {"time", "started", "finished", "seconds", "tokens_per_second", "published", "saved"}
OF_THE_MACHINE |= {"mfu", "peak_memory_bytes", "candidates_scored"}
OF_THE_VERSION = {
    "policy_version",
    "staleness_mean",
    "staleness_max",
    "replay_age_mean",
    "replay_age_max",
    "logprob_diff_mean",
}
"""Weights that are published again get a new version, so that a version names one set of weights for ever."""


class Learners:
    """Starts learners without paying their imports, one at a time."""

    def __init__(self, server: ForkServer, log: Path) -> None:
        self._server, self._log = server, log
        self._process: Forked | subprocess.Popen[bytes] | None = None

    def start(self, run_file: Path) -> None:
        command = [sys.executable, "-m", "pipeline.cli.app", "learner", str(run_file)]
        with self._log.open("ab") as output:
            self._process = self._server.start(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
            )

    def end(self, number: int = 0) -> int:
        """Wait for the end, after a signal where one is given; the exit code, or minus the number of the signal."""
        assert self._process is not None
        if number:
            self._process.send_signal(number)
        return self._process.wait()

    def close(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()


@pytest.fixture(scope="module")
def learners(fork_server: ForkServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Learners]:
    found = Learners(fork_server, tmp_path_factory.mktemp("learners") / "learners.log")
    try:
        yield found
    finally:
        found.close()


@pytest.fixture(scope="module")
def recorded(forked_run: partial, tmp_path_factory: pytest.TempPathFactory) -> RunDirectory:
    """A finished run whose groups are all still there."""
    with forked_run(TINY, tmp_path_factory.mktemp("recorded"), "recorded", RECORDED) as run:
        assert run.finish(240) == 0, run.tail()
        assert [line["step"] for line in run.steps()] == list(range(1, UPDATES + 1))
        return run.directory


@dataclass
class Engine:
    """Takes the weights that it is told to take; can be made to take its time."""

    version: str = "default"
    asked: list[str] = field(default_factory=list)
    """Folders of weights."""
    hold_from: int | None = None
    """Loads after so many wait."""
    held: anyio.Event = field(default_factory=anyio.Event)
    free: anyio.Event = field(default_factory=anyio.Event)

    async def handle(self, request: web.Request) -> web.Response:
        if request.path == "/weight_info":
            return web.json_response({"weight_version": self.version})
        if request.path == "/is_paused":
            return web.json_response({"is_paused": False})
        body = await request.json() if request.can_read_body else {}
        if request.path == "/collective_rpc":
            if self.hold_from is not None and len(self.asked) >= self.hold_from:
                self.held.set()
                await self.free.wait()
            self.asked.append(body["kwargs"]["weights_path"])
        if request.path == "/update_weight_version":
            self.version = body["new_version"]
        return web.json_response({})


@asynccontextmanager
async def stage_of(recorded: RunDirectory, root: Path, engine: Engine) -> AsyncIterator[tuple[Path, RunDirectory]]:
    """A replay stage with a copy of the recorded run's store, and the run file of its learner."""
    async with serving(engine.handle) as url:
        raw = yaml.safe_load(recorded.config_file.read_text())
        raw["run"].update(directory=str(root), name="again")
        raw["engine"].update(kind="external", urls=[url], actor_key=None, learner_key=None)
        raw["checkpoint"].update(every=EVERY, at_end=True)
        run_file = root / "run.yaml"
        run_file.write_text(yaml.safe_dump(raw))
        config = load(run_file, environment={})
        directory = RunDirectory(config.run.path).create()
        shutil.copytree(recorded.model, directory.model, dirs_exist_ok=True)
        for file in recorded.path.glob(f"{recorded.store_file.name}*"):
            shutil.copy(file, directory.path)
        ctx = RoleContext("replay", 0, config, directory)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(stage_main, ctx)
            yield run_file, directory
            ctx.stopping.set()


@pytest.fixture(scope="module")
def uninterrupted(recorded: RunDirectory, learners: Learners, tmp_path_factory: pytest.TempPathFactory) -> RunDirectory:
    directory: RunDirectory = anyio.run(train, recorded, learners, tmp_path_factory.mktemp("straight"), 0)
    return directory


async def train(recorded: RunDirectory, learners: Learners, root: Path, number: int) -> RunDirectory:
    """Train the recorded groups to the end; ``number``: the signal that ends the first learner on the way."""
    engine = Engine(hold_from=STOP_AFTER if number else None)
    with anyio.fail_after(120):
        async with stage_of(recorded, root, engine) as (run_file, directory):
            learners.start(run_file)
            if number:
                await engine.held.wait()
                status = await anyio.to_thread.run_sync(learners.end, number)
                assert status == (0 if number == signal.SIGTERM else -signal.SIGKILL)
                made = read_lines(directory.metrics_file)[-1]["step"]
                durable = max([read_state(path).updates for path in find_checkpoints(directory.checkpoints)], default=0)
                lost = number == signal.SIGKILL
                assert (durable < made if lost else durable == made) and made < UPDATES, "some were left to make"
                engine.hold_from = None
                engine.free.set()
                learners.start(run_file)
            assert await anyio.to_thread.run_sync(learners.end) == 0
    return directory


def tensors(directory: RunDirectory) -> dict[str, torch.Tensor]:
    """Weights and what training goes on from, of the last checkpoint."""
    folder = checkpoint_path(directory.checkpoints, UPDATES)
    found = {f"model.{k}": v for k, v in load_file(folder / "model" / "model.safetensors").items()}
    pending: list[tuple[str, Any]] = [("training", torch.load(folder / "training.pt", weights_only=True))]
    while pending:
        name, value = pending.pop()
        if isinstance(value, torch.Tensor):
            found[name] = value
        elif isinstance(value, dict | list | tuple):
            items = value.items() if isinstance(value, dict) else enumerate(value)
            pending += [(f"{name}.{key}", item) for key, item in items]
    return found


def told(directory: RunDirectory) -> dict[tuple[int, str], Any]:
    """By step and key, what the lines say that is no time and no version."""
    hidden = OF_THE_MACHINE | OF_THE_VERSION
    lines = read_lines(directory.metrics_file)
    assert [line["step"] for line in lines] == list(range(1, UPDATES + 1))
    assert sum(line["grad_norm"] > 0 for line in lines) > UPDATES // 2, "there was something to learn"
    assert sum(line["n_replayed"] for line in lines) > 0
    return {(line["step"], key): value for line in lines for key, value in line.items() if key not in hidden}


def told_otherwise(one: RunDirectory, other: RunDirectory) -> dict[tuple[int, str], tuple[Any, Any]]:
    a, b = told(one), told(other)
    return {key: (a.get(key), b.get(key)) for key in a | b if a.get(key) != b.get(key)}


def differences(expected: dict[str, torch.Tensor], came: dict[str, torch.Tensor]) -> list[str]:
    assert expected.keys() == came.keys()
    return [k for k in expected if not torch.allclose(expected[k].double(), came[k].double(), rtol=1e-6, atol=1e-9)]


@pytest.mark.timeout(300)
def test_the_recorded_groups_make_the_weights_of_the_recorded_run(
    recorded: RunDirectory, uninterrupted: RunDirectory
) -> None:
    assert told_otherwise(recorded, uninterrupted) == {}
    published = load_file(recorded.weights(UPDATES) / "model.safetensors")
    final = {f"model.{name}": tensor for name, tensor in published.items()}
    assert final and differences(final, {k: v for k, v in tensors(uninterrupted).items() if k in final}) == []


@pytest.mark.timeout(300)
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL], ids=["stopped", "killed"])
def test_a_learner_that_starts_again_ends_with_the_same_weights_moments_and_lines(
    number: signal.Signals, recorded: RunDirectory, uninterrupted: RunDirectory, learners: Learners, tmp_path: Path
) -> None:
    again = anyio.run(train, recorded, learners, tmp_path, number)
    expected, came = tensors(uninterrupted), tensors(again)
    assert sum("exp_avg" in name for name in expected) > 0
    assert differences(expected, came) == []
    assert told_otherwise(uninterrupted, again) == {}
    ledger = read_ledger(again.store_file, rows=True)
    assert ledger.audit() == []
    assert ledger.groups["trained"] == GROUPS * UPDATES
