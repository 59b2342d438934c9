"""Requests of rollouts whose engines are busy, fail, die and come back."""

from __future__ import annotations

import math
import random
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import anyio
import pytest
from aiohttp import web

from actors.engine.base import Engine, Generation, Sampling
from actors.engine.client import EngineClient
from actors.engine.pool import EnginePool
from actors.metrics import ActorMetrics
from actors.rollout.rollout import Rollout
from actors.rollout.sampling import Policy
from actors.rollout.services import Services
from pipeline.config.rollouts import EngineConfig
from pipeline.errors import EngineBusy, EngineUnavailable
from pipeline.schema import FinishReason, Order, Trajectory, TrajectoryStatus, VersionSpan
from tests.support.routing import sessions_by_engine
from tests.support.stub_engine import StubEngine, StubServer, good_answer

MakeOrder = Callable[..., Order]


@asynccontextmanager
async def watched(engines: Sequence[Engine], metrics: ActorMetrics, **more: Any) -> AsyncIterator[EnginePool]:
    """A pool whose engines have been probed."""
    pool = EnginePool(
        engines,
        wait_seconds_max=5,
        metrics=metrics,
        probe_seconds=0.01,
        jitter=random.Random(0),
        **more,
    )
    async with anyio.create_task_group() as group:
        group.start_soon(pool.watch)
        with anyio.fail_after(60):
            while not all(state.alive for state in pool.router.engines.values()):
                await anyio.sleep(0.01)
            yield pool
        group.cancel_scope.cancel()


def policy(pool: EnginePool, order: Order, metrics: ActorMetrics, tokens: int = 4, **more: Any) -> Policy:
    settings = {"model": "m", "backend": "embedded", "context_max": 1000, "retries": 3, **more}
    return Policy(order, pool, Sampling(tokens), metrics, **settings)


async def test_busy_engine_keeps_its_conversations(metrics: ActorMetrics, make_order: MakeOrder) -> None:
    refusals = [web.json_response({"error": {"message": "full"}}, status=status, headers={"Retry-After": "1000"})
                for status in (429, 503)]  # fmt: skip

    def busy_twice(body: dict[str, Any]) -> Any:
        return refusals.pop() if refusals else good_answer(body)

    async with (
        StubServer(busy_twice) as a,
        StubServer() as b,
        EngineClient(a.url) as first,
        EngineClient(b.url) as second,
        watched([first, second], metrics) as pool,
    ):
        players = [policy(pool, make_order(seed), metrics) for seed in range(100)]
        for player in players:
            await player.complete([1], 4)
        assert not refusals
        assert sessions_by_engine(pool.router) == {a.url: 50, b.url: 50}
        for player in players:
            await player.complete([1], 4)
        assert sessions_by_engine(pool.router) == {a.url: 50, b.url: 50}
        assert pool.router.moves == {} and pool.router.placements["elsewhere"] == 2


async def test_busy_engine_without_another_is_asked_again_beyond_the_retries(
    metrics: ActorMetrics, make_order: MakeOrder
) -> None:
    class Busy(StubEngine):
        async def generate(self, *args: Any, **kwargs: Any) -> Generation:
            answer = await super().generate(*args, **kwargs)
            if self.n_requests <= 10:
                raise EngineBusy("full", 0.001)
            return answer

    async with watched([engine := Busy()], metrics) as pool:
        await policy(pool, make_order(), metrics).complete([1], 4)
        assert engine.n_requests == 11


async def test_busy_engine_that_asks_for_no_wait_is_given_up_in_time(
    metrics: ActorMetrics, make_order: MakeOrder
) -> None:
    class Full(StubEngine):
        async def generate(self, *args: Any, **kwargs: Any) -> Generation:
            self.n_requests += 1
            raise EngineBusy("full", 0.0)

    async with watched([engine := Full()], metrics) as pool:
        pool.wait_seconds_max = 1.0
        with anyio.fail_after(60), pytest.raises(EngineBusy):
            await policy(pool, make_order(), metrics).complete([1], 4)
        assert engine.n_requests < 10


class Failing(StubEngine):
    """Fails a share of its requests while it is healthy."""

    rate = 0.3
    draw = random.Random(5)

    async def generate(self, *args: Any, **kwargs: Any) -> Generation:
        answer = await super().generate(*args, **kwargs)
        if self.draw.random() < self.rate:
            raise EngineUnavailable(f"engine {self.name} answered HTTP 500")
        return answer


async def test_no_order_is_lost_while_an_engine_fails_a_third_of_its_requests(
    make_services: Callable[..., Services], make_order: MakeOrder
) -> None:
    bad, good = Failing("stub://bad"), StubEngine("stub://good")
    services, played = make_services([bad, good], wait_seconds_max=60.0), list[Trajectory]()

    async def play(seed: int) -> None:
        played.append(await Rollout(make_order(seed), services).run())

    async with anyio.create_task_group() as group:
        group.start_soon(services.pool.watch)
        async with anyio.create_task_group() as episodes:
            for seed in range(60):
                episodes.start_soon(play, seed)
        state = services.pool.router.engines[bad.name]
        assert not state.breaker.closed and state.alive, "its health is good, its requests are not"
        group.cancel_scope.cancel()
    assert [t.status for t in played] == [TrajectoryStatus.COMPLETE] * 60


class Counting(StubEngine):
    """Continues a prompt with the numbers after its last; dies after ``requests``."""

    def __init__(self, name: str, requests: int = 1000, version: int = 0) -> None:
        super().__init__(name, script=lambda ids, sampling: list(range(ids[-1] + 1, ids[-1] + 1 + sampling.max_tokens)))
        self.left, self.version = requests, version

    async def generate(self, *args: Any, **kwargs: Any) -> Generation:
        self.alive = self.alive and self.left > 0
        self.left -= 1
        return await super().generate(*args, **kwargs)


async def test_turn_that_loses_its_engine_goes_on_elsewhere_from_its_tokens(
    metrics: ActorMetrics, make_order: MakeOrder
) -> None:
    first, second = Counting("stub://a", requests=2, version=3), Counting("stub://b", version=4)
    async with watched([first, second], metrics) as pool:
        player = policy(pool, make_order(policy_version=3), metrics, part_tokens=4)
        completion = await player.complete([100], 11)
    generation = completion.generation
    assert generation.token_ids.tolist() == list(range(101, 112)), "as if one engine had sampled them"
    assert generation.version_spans == (VersionSpan(0, 8, 3), VersionSpan(8, 11, 4))
    assert len(generation.logprobs) == 11 and generation.finish_reason is FinishReason.LENGTH
    assert player.engines == ["stub://a", "stub://b"]
    begins = [begin for begin, _ in player.requests]
    assert len(begins) == 3 and begins == sorted(begins), "one time for each part"
    assert [len(ids) for _, ids in second.requests] == [9], "no token was sampled again"


@pytest.mark.parametrize("dies", ["between", "inside"])
async def test_a_turn_that_is_heard_goes_on_elsewhere_unless_the_failed_part_was_heard(
    metrics: ActorMetrics, make_order: MakeOrder, dies: str
) -> None:
    """Tokens of a stream are the first ones of the answer, each once."""
    first, second = Counting("stub://a", requests=2 if dies == "between" else 1000), Counting("stub://b")
    heard: list[int] = []

    def hear(ids: Any, logprobs: Any) -> None:
        heard.extend(ids.tolist())
        first.alive = first.alive and not (dies == "inside" and len(heard) == 6)

    async with watched([first, second], metrics) as pool:
        player = policy(pool, make_order(), metrics, part_tokens=4)
        if dies == "between":
            completion = await player.complete([100], 11, heard=hear)
            assert completion.generation.token_ids.tolist() == heard == list(range(101, 112))
        else:
            with pytest.raises(EngineUnavailable, match="died in a request"):
                await player.complete([100], 11, heard=hear)
            assert heard == list(range(101, 109)) and not second.requests


async def test_turns_of_a_run_are_requested_in_parts_without_a_setting(
    make_services: Callable[..., Services], make_order: MakeOrder
) -> None:
    first, second = Counting("stub://a", requests=1), Counting("stub://b")
    services = make_services([first, second], sampling={"max_tokens": 600})
    async with anyio.create_task_group() as group:
        group.start_soon(services.pool.watch)
        while not all(state.alive for state in services.pool.router.engines.values()):
            await anyio.sleep(0.01)
        completion = await services.policy(make_order()).complete([100], 600)
        group.cancel_scope.cancel()
    assert completion.generation.token_ids.tolist() == list(range(101, 701))
    part = EngineConfig().part_tokens
    assert part is not None and [len(ids) for _, ids in second.requests] == [1 + part, 1 + 2 * part]


async def test_part_is_never_continued_by_older_weights(metrics: ActorMetrics, make_order: MakeOrder) -> None:
    first, second = Counting("stub://a", requests=1, version=3), Counting("stub://b", version=2)
    async with watched([first, second], metrics) as pool, anyio.create_task_group() as group:

        async def publish() -> None:
            while not pool.waiting_reason():
                await anyio.sleep(0.01)
            assert "version 2 < 3" in pool.waiting_reason() and not second.requests
            second.version = 3

        group.start_soon(publish)
        completion = await policy(pool, make_order(policy_version=3), metrics, part_tokens=4).complete([100], 8)
    assert completion.generation.version_spans == (VersionSpan(0, 8, 3),)


@pytest.mark.parametrize(("stop", "requests"), [((), 3), (("x",), 1)])
async def test_turn_with_stop_strings_is_one_request(
    metrics: ActorMetrics, make_order: MakeOrder, stop: tuple[str, ...], requests: int
) -> None:
    async with watched([engine := Counting("stub://a")], metrics) as pool:
        completion = await policy(pool, make_order(), metrics, part_tokens=4).complete([100], 12, stop)
    assert completion.generation.token_ids.tolist() == list(range(101, 113)) and engine.n_requests == requests


async def test_tokens_of_a_turn_that_fails_in_the_end_are_counted_as_discarded(
    metrics: ActorMetrics, make_order: MakeOrder
) -> None:
    class Once(Counting):
        async def generate(self, *args: Any, **kwargs: Any) -> Generation:
            answer = await super().generate(*args, **kwargs)
            self.fault = EngineUnavailable("HTTP 500")
            return answer

    async with watched([Once("stub://a")], metrics) as pool:
        with pytest.raises(EngineUnavailable):
            await policy(pool, make_order(), metrics, part_tokens=4, retries=0).complete([100], 8)
    assert metrics.tokens_total.labels(kind="discarded")._value.get() == 4


async def test_an_actor_exports_no_policy_version_until_an_engine_has_one(metrics: ActorMetrics) -> None:
    """Neither 0, which a run begins with, nor the mark of weights without a version."""
    engine = StubEngine(version=None)
    exported = lambda: metrics.policy_version._value.get()  # noqa: E731
    assert math.isnan(exported())
    async with watched([engine], metrics):
        assert math.isnan(exported())
        engine.version = 7
        with anyio.fail_after(60):
            while math.isnan(exported()):
                await anyio.sleep(0.01)
        assert exported() == 7
