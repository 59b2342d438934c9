"""The actor's client, renderer, router and agent loop on a real embedded engine and a real vLLM server alike."""

from __future__ import annotations

from collections.abc import AsyncIterator

import aiohttp
import anyio
import numpy as np
import pytest

from actors.engine.base import Sampling
from actors.engine.client import EngineClient
from actors.engine.pool import EnginePool
from actors.environments.host import EnvironmentHost
from actors.metrics import ActorMetrics
from actors.rendering.renderer import Renderer
from actors.rendering.tokenizer import load_tokenizer
from actors.rollout.rollout import Rollout
from actors.rollout.services import Services
from pipeline.errors import EngineRefused
from pipeline.runtime.metrics import CollectorRegistry
from pipeline.runtime.run_directory import RunDirectory
from pipeline.schema import Order, Task, Trajectory, TrajectoryStatus
from tests.end_to_end.conftest import VLLM
from tests.support.routing import in_flight
from tests.support.running_engine import RunningEngine
from tests.support.tokens import flattened

VERSION = 1_000_000
"""Above what other tests stamp on the same engine: versions never go back."""


@pytest.fixture(params=["embedded", VLLM])
async def engine(request: pytest.FixtureRequest) -> AsyncIterator[RunningEngine]:
    """Stamped as ``VERSION``."""
    running: RunningEngine = request.getfixturevalue(f"{request.param}_engine")
    async with aiohttp.ClientSession() as session:
        body = {"new_version": str(VERSION)}
        async with session.post(f"{running.url}/update_weight_version", json=body, headers=running.control) as answer:
            assert answer.status == 200
    yield running


async def test_client_reads_what_a_real_engine_answers(engine: RunningEngine) -> None:
    async with EngineClient(engine.url, key=engine.key("actor")) as client:
        await client.health()
        assert await client.weight_version() == VERSION
        generation = await client.generate([1, 2, 3, 4], Sampling(max_tokens=8), session_id="s", cache_salt="v1")
        assert 1 <= len(generation.token_ids) <= 8 and generation.version_spans[0].policy_version == VERSION
        assert np.isfinite(generation.logprobs).all()
        with pytest.raises(EngineRefused):
            await client.generate([10**7], Sampling(max_tokens=8))
        with pytest.raises(EngineRefused):
            await client.generate([1] * 9000, Sampling(max_tokens=8))


async def test_multi_turn_rollouts_are_complete_and_stay_in_one_branch(engine: RunningEngine) -> None:
    settings = engine.config.model_dump()
    game = {"name": "number_guess", "options": {"compact": True}, "max_turns": 4}
    settings |= {"environments": {"game": game}, "sampling": {"max_tokens": 6}}
    config = type(engine.config).model_validate(settings)
    metrics = ActorMetrics(CollectorRegistry(), environments=("game",))
    pool = EnginePool([EngineClient(engine.url, key=engine.key("actor"))], wait_seconds_max=30, metrics=metrics)
    renderer = Renderer(*load_tokenizer(RunDirectory(config.run.path).model))
    hosts = {"game": EnvironmentHost("game", config.environments["game"])}
    services = Services.of(config, "actor-0", renderer, pool, hosts, metrics)
    found: list[Trajectory] = []

    async def play(i: int) -> None:
        order = Order(f"g{i}.0.0", f"g{i}", Task(f"game/{i}", "game", i), 0, 0, VERSION, 300.0)
        found.append(await Rollout(order, services).run())

    async with anyio.create_task_group() as background:
        background.start_soon(pool.watch)
        with anyio.fail_after(320):
            async with anyio.create_task_group() as group:
                for i in range(8):
                    group.start_soon(play, i)
        background.cancel_scope.cancel()
    await pool.close()
    for trajectory in found:
        assert trajectory.status is TrajectoryStatus.COMPLETE, trajectory.failure
        assert trajectory.version_range() == (VERSION, VERSION)
        flat = flattened(trajectory)
        ends = [t.completion.token_ids[-1] in renderer.end_ids for t in trajectory.turns]
        assert len(flat) == trajectory.n_tokens and all(
            end == (t.finish_reason.value == "stop") for end, t in zip(ends, trajectory.turns, strict=True)
        )
    assert in_flight(pool.router) == 0 and len(pool.router.sessions) == 0
