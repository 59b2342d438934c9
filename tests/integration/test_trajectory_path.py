"""The way of a trajectory from its order to the update, traced: how many files of the product it crosses.

Stage, actor and learner run in this process over the in-memory transport, against vLLM's routes on loopback. A file is
crossed when one of its functions is called with something of a trajectory: its order, task, tokens, turns, record,
group, rows or batch. Functions that see nothing of it (heartbeats, probes, metrics of the process) do not count.
"""

import sys
import threading
from collections import defaultdict
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

import anyio
import pytest
from aiohttp import web

import actors.process.role
from learner.models.prepare import prepare_model
from learner.process.role import serve as serve_learner
from pipeline.config import RunConfig
from pipeline.runtime.process import RoleContext
from pipeline.runtime.run_directory import RunDirectory
from pipeline.stage.role import serve as serve_stage
from scripts.size import TRAJECTORY, written
from tests.support.http_server import serving
from tests.support.memory_transport import MemoryHub, MemoryLink, MemoryNetwork
from tests.support.stub_engine import good_answer

ROOT = Path(__file__).resolve().parents[2]
PRODUCT = tuple(str(ROOT / package) + "/" for package in ("afterplay", "pipeline", "actors", "learner"))
CARRIERS = (
    "pipeline.schema.",
    "pipeline.transport.messages",
    "pipeline.store.records",
    "pipeline.store.journal",
    "learner.data.rows",
    "learner.data.microbatch",
)
"""Modules whose classes hold something of a trajectory,"""
NO_CARRIERS = {"Journal", "Limits", "RoleState"}
"""but these."""


def carries(value: object, depth: int = 2) -> bool:
    if type(value).__module__.startswith(CARRIERS):
        return type(value).__name__ not in NO_CARRIERS
    if depth and isinstance(value, list | tuple):
        return any(carries(item, depth - 1) for item in value[:2])
    return bool(depth) and isinstance(value, dict) and any(carries(item, depth - 1) for item in [*value.values()][:2])


class Trace:
    """Files whose functions were called with something of a trajectory."""

    def __init__(self) -> None:
        self.functions: dict[str, set[str]] = defaultdict(set)

    def __call__(self, frame, event, argument) -> None:
        if event != "call" or not frame.f_code.co_filename.startswith(PRODUCT):
            return
        code = frame.f_code
        file = str(Path(code.co_filename).relative_to(ROOT))
        if code.co_name in self.functions[file]:
            return
        names = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
        if any(carries(frame.f_locals.get(name)) for name in names):
            self.functions[file].add(code.co_name)

    @property
    def files(self) -> list[str]:
        return sorted(file for file, functions in self.functions.items() if functions)

    def __enter__(self):
        threading.setprofile(self)
        sys.setprofile(self)
        return self

    def __exit__(self, *error) -> None:
        sys.setprofile(None)
        threading.setprofile(None)


@asynccontextmanager
async def engine():
    """vLLM's routes: random tokens, and every control call succeeds."""
    version = ["default"]

    async def handle(request):
        if request.path == "/weight_info":
            return web.json_response({"weight_version": version[0]})
        if request.path == "/is_paused":
            return web.json_response({"is_paused": False})
        body = await request.json() if request.can_read_body else {}
        if request.path == "/inference/v1/generate":
            return web.json_response(good_answer(body, version=version[0]))
        if request.path == "/update_weight_version":
            version[0] = body["new_version"]
        return web.json_response({})

    async with serving(handle) as url:
        yield url


def config_of(directory: Path, url: str) -> RunConfig:
    return RunConfig.model_validate(
        {
            "run": {"directory": str(directory), "name": "r", "total_steps": 1},
            "model": {"source": "tiny", "max_length": 256, "tiny": {"hidden_size": 16, "layers": 1, "heads": 2}},
            "sampling": {"max_tokens": 4},
            "engine": {"kind": "external", "urls": [url]},
            "environments": {"guess": {"name": "number_guess"}},
            "groups": {"n_rollout": 2, "groups_per_step": 1, "zero_variance": "keep"},
            "learner": {"device": "cpu", "compute_dtype": "float32"},
            "checkpoint": {"every": 1},
            "stage": {"synchronous": "NORMAL"},
        }
    )


@pytest.mark.timeout(120)
async def test_a_trajectory_crosses_few_files_from_order_to_update(tmp_path, monkeypatch) -> None:
    network = MemoryNetwork()
    monkeypatch.setattr(actors.process.role, "open_link", lambda config, name: MemoryLink(network, name))
    async with engine() as url:
        config = config_of(tmp_path, url)
        directory = RunDirectory(config.run.path).create()
        prepare_model(config, directory.model)
        with Trace() as trace, anyio.fail_after(100):
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(serve_stage, RoleContext("replay", 0, config, directory), MemoryHub(network))
                tasks.start_soon(actors.process.role.main, RoleContext("actor", 0, config, directory))
                learner = RoleContext("learner", 0, config, directory)
                await partial(serve_learner, learner, MemoryLink(network, "learner"))()
                tasks.cancel_scope.cancel()
    assert learner.status.state == "finished"
    told = f"{len(trace.files)} files:\n" + "\n".join(
        f"  {f}: {', '.join(sorted(trace.functions[f]))}" for f in trace.files
    )
    print(told)
    assert set(trace.files) >= {
        "actors/rollout/recorder.py",
        "pipeline/schema/codec.py",
        "pipeline/stage/groups.py",
        "learner/training/optimizer_step.py",
    }, told
    assert len(trace.files) <= written()[TRAJECTORY], told
