"""Turns over HTTP, with engines that fail, restart, or were left asleep by a learner that died."""

from __future__ import annotations

import contextlib
from functools import partial
from typing import Any

import anyio
import pytest
from aiohttp import web

from learner.metrics import LearnerMetrics
from learner.weights.colocated import SharedDevice, await_engines
from learner.weights.publisher import Publisher, write_weights
from pipeline.config import RunConfig
from pipeline.config.learner import PublishConfig
from pipeline.runtime.metrics import CollectorRegistry
from pipeline.runtime.process import RoleContext
from pipeline.runtime.run_directory import RunDirectory
from tests.support.http_server import serving


class Engine:
    """vLLM's control routes with its rules: memory of weights and KV cache, a scheduler that runs or not. Breaks the
    test when something happens that would break a real engine."""

    def __init__(self) -> None:
        self.faults: dict[str, int] = {}
        """Path, or path and query: how many more answers are 500."""
        self.broken: list[str] = []
        self.calls: list[str] = []
        self.url, self.port = "", 0
        self.restart()

    def restart(self) -> None:
        self.version, self.asleep, self.paused, self.weights = "default", set(), False, "initial"

    @property
    def serves(self) -> bool:
        return not self.asleep and not self.paused

    async def handle(self, request: web.Request) -> web.Response:
        path, whole = request.path, request.path_qs
        if path == "/collective_rpc" and (await request.json())["method"] == "abandon_update":
            return web.json_response({"error": "unknown"}, status=400)
        self.calls.append(whole)
        for key in (whole, path):
            if self.faults.get(key, 0) > 0:
                self.faults[key] -= 1
                return web.json_response({"error": "no"}, status=500)
        answer: dict[str, Any] = {}
        if path == "/weight_info":
            answer = {"weight_version": self.version}
        elif path == "/is_paused":
            answer = {"is_paused": self.paused}
        elif path == "/is_sleeping":
            answer = {"is_sleeping": bool(self.asleep) or self.paused}
        elif path == "/sleep":
            assert request.query["mode"] == "keep"
            if request.query["level"] == "2":
                self.weights = "nothing"
            self.asleep, self.paused = {"weights", "kv_cache"}, True
        elif path == "/wake_up":
            self.asleep.discard(request.query["tags"])
            self.paused = bool(self.asleep)
            answer = {"status": "sleeping" if self.asleep else "awake"}
        elif path == "/pause":
            self.paused = True
        elif path == "/resume":
            if self.asleep:
                self.broken.append("resumed asleep")
            self.paused = False
        elif path == "/collective_rpc":
            if self.serves or "weights" in self.asleep:
                self.broken.append("loaded while it served, or without memory")
            self.weights = (await request.json())["kwargs"]["weights_path"].rsplit("/", 1)[-1]
        elif path == "/update_weight_version":
            self.version = (await request.json())["new_version"]
        if self.serves and self.weights == "nothing":
            self.broken.append("sampled with discarded weights")
        return web.json_response(answer)

    @contextlib.asynccontextmanager
    async def serving(self):
        async with serving(self.handle, self.port) as self.url:
            self.port = int(self.url.rpartition(":")[2])
            yield self


@pytest.fixture(autouse=True)
def _impatient(monkeypatch):
    monkeypatch.setattr("learner.weights.engine_keeper.WATCH_SECONDS", 0.03)
    monkeypatch.setattr("learner.weights.engine_keeper.RETRY_SECONDS", 0.02)
    monkeypatch.setattr("learner.weights.engine_keeper.RETRY_SECONDS_MAX", 0.05)
    monkeypatch.setattr("learner.weights.colocated.RETRY_SECONDS", 0.02)


@pytest.fixture
async def engine():
    engine = Engine()
    async with engine.serving():
        yield engine
    assert engine.broken == []


class Learner:
    """Publisher and shared device of one learner process."""

    def __init__(self, engine, kit, tmp_path, level=1, others=(), timeout_seconds=2.0):
        self.registry = CollectorRegistry()
        self.metrics = LearnerMetrics(self.registry)
        urls = [engine.url, *(other.url for other in others)]
        self.device = SharedDevice(urls, self.metrics, level)
        policy = kit.tiny_policy()
        self.weights = policy.snapshot("bfloat16")
        config = PublishConfig(timeout_seconds=timeout_seconds)
        self.publisher = Publisher(
            urls,
            RunDirectory(tmp_path).create(),
            config,
            partial(write_weights, policy.model),
            device=self.device,
        )

    async def __aenter__(self):
        await self.publisher.__aenter__()
        self.group = anyio.create_task_group()
        await self.group.__aenter__()
        self.group.start_soon(self.publisher.run)
        return self

    async def __aexit__(self, *args):
        self.group.cancel_scope.cancel()
        await self.group.__aexit__(*args)
        await self.publisher.__aexit__(*args)

    async def take(self):
        with anyio.fail_after(60):
            await self.device.acquire(look_seconds=0.05)

    async def publish(self, version):
        with anyio.fail_after(60):
            await self.publisher.publish(version, self.weights if version else None)
            await self.publisher.until_live(version)

    def count(self, name, **labels):
        return self.registry.get_sample_value(f"afterplay_learner_{name}", labels)


async def settled(look):
    with anyio.fail_after(60):
        while not look():
            await anyio.sleep(0.01)


@pytest.mark.parametrize("level", [1, 2])
async def test_engine_sleeps_in_the_learners_turn_and_serves_new_weights_after_it(engine, kit, tmp_path, level):
    async with Learner(engine, kit, tmp_path, level) as learner:
        for version in range(3):
            await learner.take()
            assert engine.asleep == {"weights", "kv_cache"}
            await learner.publish(version)
            assert engine.serves
            assert engine.version == str(version)
            assert engine.weights == (f"v{version:06d}" if version else "model")
        assert learner.count("device_handovers_total", to="learner") == 3
        assert learner.count("device_handovers_total", to="engines") == 3
        assert learner.count("device_handover_failures_total", operation="sleep") == 0
        assert learner.count("device_handover_failures_total", operation="wake") == 0
        assert learner.count("engine_sleep_seconds_total") > 0
    assert engine.calls.count(f"/sleep?level={level}&mode=keep") == 3


async def test_an_engine_that_does_not_fall_asleep_is_waited_for_and_named(engine, kit, tmp_path):
    engine.faults["/sleep"] = 3
    said = []
    async with Learner(engine, kit, tmp_path) as learner:
        with anyio.fail_after(60):
            await learner.device.acquire(said.append, look_seconds=0.02)
        assert engine.asleep
        assert learner.count("device_handover_failures_total", operation="sleep") == 3
        assert any(engine.url in why and "500" in why for why in said)


@pytest.mark.parametrize("fault", ["/wake_up?tags=weights", "/collective_rpc", "/update_weight_version",
                                   "/wake_up?tags=kv_cache"])  # fmt: skip
async def test_an_engine_that_does_not_wake_is_tried_again_and_never_samples_half_loaded(engine, kit, tmp_path, fault):
    async with Learner(engine, kit, tmp_path, level=2) as learner:
        await learner.take()
        engine.faults[fault] = 2
        await learner.publish(1)
        assert engine.serves
        assert engine.weights == "v000001"
        assert learner.count("device_handover_failures_total", operation="wake") == 2
        await learner.take()
        assert engine.asleep == {"weights", "kv_cache"}


async def test_an_engine_that_restarts_in_the_learners_turn_is_put_to_sleep_again(engine, kit, tmp_path):
    async with Learner(engine, kit, tmp_path) as learner:
        await learner.take()
        engine.restart()
        await settled(lambda: engine.asleep)
        assert learner.device.arbiter.granted
        assert engine.version == "default"
        await learner.publish(1)
        assert (engine.version, engine.serves) == ("1", True)


async def test_an_engine_that_is_down_blocks_the_turn_until_it_is_back(kit, tmp_path):
    engine = Engine()
    async with engine.serving():
        pass
    async with Learner(engine, kit, tmp_path) as learner:
        with anyio.move_on_after(0.2) as early:
            await learner.device.acquire(look_seconds=0.05)
        assert early.cancelled_caught
        assert not learner.device.arbiter.granted
        async with engine.serving():
            await learner.take()
            assert engine.asleep
            await learner.publish(0)
            assert engine.serves
    assert engine.broken == []


async def test_an_engine_that_is_late_to_wake_is_waited_for_until_it_sleeps_again(engine, kit, tmp_path, monkeypatch):
    """It has slept since the turn before, and may wake at any moment."""
    late, handle, late_one, answers = Engine(), Engine.handle, anyio.Event(), anyio.Event()

    async def held(engine, request):
        if engine is late and engine.asleep and request.path == "/weight_info":
            late_one.set()
            await answers.wait()
        return await handle(engine, request)

    monkeypatch.setattr(Engine, "handle", held)
    async with late.serving(), Learner(engine, kit, tmp_path, others=[late], timeout_seconds=60.0) as learner:
        await learner.take()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(learner.publisher.publish, 1, learner.weights)
            await settled(lambda: engine.serves and late_one.is_set())
            tasks.start_soon(learner.take)
            await settled(lambda: engine.url not in learner.device.arbiter.awake)
            assert not learner.device.arbiter.granted
            answers.set()
            await settled(lambda: learner.device.arbiter.granted)
            assert engine.asleep == late.asleep == {"weights", "kv_cache"}
    assert late.broken == []


@pytest.mark.parametrize("level", [1, 2])
@pytest.mark.parametrize("left", ["asleep", "half awake", "paused"])
async def test_a_learner_that_died_in_its_turn_leaves_nothing_asleep_for_the_next(engine, kit, tmp_path, level, left):
    async with Learner(engine, kit, tmp_path, level) as learner:
        await learner.take()
        await learner.publish(1)
        await learner.take()
    if left != "asleep":
        engine.asleep.discard("weights")
    if left == "paused":
        engine.asleep.clear()
        engine.weights = "v000001"
    async with Learner(engine, kit, tmp_path / "next", level) as learner:
        await learner.take()
        assert engine.asleep == {"weights", "kv_cache"}
        await learner.publish(2)
        assert (engine.version, engine.serves, engine.weights) == ("2", True, "v000002")


async def test_a_request_that_is_cancelled_lets_the_engine_serve_again(engine, kit, tmp_path):
    async with Learner(engine, kit, tmp_path) as learner:
        await learner.take()
        await learner.publish(1)
        engine.faults["/sleep"] = 1_000_000
        with anyio.move_on_after(0.2):
            await learner.device.acquire(look_seconds=0.05)
        engine.faults.clear()
        calls = len(engine.calls)
        await settled(lambda: "/weight_info" in engine.calls[calls:] and engine.serves)
        assert engine.version == "1"


async def test_engines_are_quiet_before_the_models_are_loaded(engine, tmp_path):
    engine.faults["/sleep"] = 2
    config = RunConfig.model_validate(
        {
            "run": {"directory": tmp_path},
            "engine": {"kind": "external", "urls": [engine.url], "colocate": "sleep", "sleep_external": True},
        }
    )
    with anyio.fail_after(60):
        await await_engines(RoleContext("learner", 0, config))
    assert engine.asleep == {"weights", "kv_cache"}


async def test_a_learner_that_shares_the_device_loads_nothing_before_the_engine_is_up(engine, tmp_path):
    engine.faults["/weight_info"] = 2
    config = RunConfig.model_validate(
        {
            "run": {"directory": tmp_path},
            "engine": {"kind": "external", "urls": [engine.url], "colocate": "split"},
        }
    )
    with anyio.fail_after(60):
        await await_engines(RoleContext("learner", 0, config))
    assert engine.faults["/weight_info"] == 0
    assert engine.asleep == set()
