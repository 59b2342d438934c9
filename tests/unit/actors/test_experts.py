"""Experts that engines return stay with their tokens: over turns, branches, parts and engines."""

from __future__ import annotations

import base64
import dataclasses
import io
import random
import zlib
from collections.abc import Callable, Sequence
from typing import Any

import anyio
import numpy as np
import numpy.typing as npt
import pytest

from actors.engine.base import Sampling
from actors.engine.client import EngineClient
from actors.engine.pool import EnginePool
from actors.metrics import ActorMetrics
from actors.rendering.renderer import Renderer
from actors.rollout.recorder import BranchTip, Recorder
from actors.rollout.sampling import Policy
from learner.data.rows import trajectory_rows
from pipeline.errors import EngineProtocolError
from pipeline.schema import Order, Task, Trajectory, TrajectoryStatus
from pipeline.schema.codec import decode_trajectory, encode_trajectory
from tests.support.stub_engine import StubEngine, StubServer, good_answer

LAYERS, K = 2, 3


def chosen(ids: Sequence[int]) -> npt.NDArray[np.uint8]:
    """Experts ``[layers, k]`` of the last of ``ids``: another choice for every beginning of a sequence."""
    seed = zlib.crc32(np.asarray(ids, "<i4").tobytes())
    return np.random.default_rng(seed).integers(0, 200, (LAYERS, K)).astype(np.uint8)


def encoded(array: npt.NDArray[Any]) -> str:
    buffer = io.BytesIO()
    np.save(buffer, array)
    return base64.b64encode(buffer.getvalue()).decode()


def routed(body: dict[str, Any]) -> dict[str, Any]:
    """As vLLM answers: those of all tokens from a position on but the last one sampled."""
    answer = good_answer(body)
    start = body["sampling_params"].get("routed_experts_prompt_start", 0)
    ids = [*body["token_ids"], *answer["choices"][0]["token_ids"]]
    rows = [chosen(ids[: t + 1]) for t in range(start, len(ids) - 1)]
    answer["choices"][0]["routed_experts"] = encoded(np.stack(rows))
    return answer


@pytest.mark.parametrize("part_tokens", [None, 2, 3])
async def test_every_token_that_an_engine_read_has_its_choice(
    part_tokens: int | None, metrics: ActorMetrics, make_order: Callable[..., Order], smollm2: Any
) -> None:
    """Two turns, a branch that repeats a part of them, one more turn there; then bytes, and rows of the learner."""
    recorder = Recorder(renderer := Renderer(smollm2))
    async with StubServer(routed) as server, EngineClient(server.url) as client:
        pool = EnginePool([client], wait_seconds_max=5, metrics=metrics, probe_seconds=0.01, jitter=random.Random(0))
        async with anyio.create_task_group() as group:
            group.start_soon(pool.watch)
            policy = Policy(
                make_order(1), pool, Sampling(7, experts_from=0), metrics, model="m", backend="vllm",
                context_max=1000, retries=0, part_tokens=part_tokens,
            )  # fmt: skip

            async def turn(ids: tuple[int, ...], tip: BranchTip | None = None) -> BranchTip:
                call = recorder.begin_tokens(ids, tip)
                with anyio.fail_after(60):
                    done = await policy.complete(ids, 7, (), None, len(call.added_ids))
                completed = renderer.completed(done.generation.token_ids.tolist())
                return recorder.finish(call, done.generation, completed, 1.0)

            first = await turn((5, 6, 7))
            second = await turn((*first.ids, 8, 9), first)
            branch = await turn((*second.ids[:8], 3))
            await turn((*branch.ids, 4, 4, 4), branch)
            group.cancel_scope.cancel()
        asked = [body["sampling_params"]["routed_experts_prompt_start"] for body in server.bodies]
    expected_starts = {0, len(first.ids) - 1, len(branch.ids) - 1}
    assert expected_starts <= set(asked) and (part_tokens or set(asked) == expected_starts)
    task = Task("t", "e", 1)
    made = Trajectory("t.0", "t", task, recorder.turns(), TrajectoryStatus.COMPLETE, reward=1.0)
    came = decode_trajectory(encode_trajectory(made))
    assert [len({t.branch for t in came.turns}), len(came.turns)] == [2, 4]
    for row in trajectory_rows(came, 0):
        assert row.experts is not None and (row.experts[-1] == 255).all()
        ids = row.token_ids.tolist()
        np.testing.assert_array_equal(row.experts[:-1], [chosen(ids[: t + 1]) for t in range(len(ids) - 1)])


async def test_orders_that_are_not_trained_ask_for_none(
    metrics: ActorMetrics, make_order: Callable[..., Order]
) -> None:
    pool = EnginePool([StubEngine()], wait_seconds_max=5, metrics=metrics, probe_seconds=1, jitter=random.Random(0))
    for order, asked in ((make_order(1), 0), (dataclasses.replace(make_order(1), greedy=True), None)):
        settings: dict[str, Any] = {"model": "m", "backend": "vllm", "context_max": 9, "retries": 0}
        assert Policy(order, pool, Sampling(7, experts_from=0), metrics, **settings).sampling.experts_from == asked


def changed(value: Any) -> Callable[[dict[str, Any]], dict[str, Any]]:
    def answer(body: dict[str, Any]) -> dict[str, Any]:
        found = good_answer(body)
        found["choices"][0]["routed_experts"] = value
        return found

    return answer


@pytest.mark.parametrize(
    "value",
    [
        None,
        7,
        "not base64!",
        base64.b64encode(b"not a file").decode(),
        encoded(np.zeros((5, LAYERS, K), np.uint8)),
        encoded(np.zeros((6, LAYERS), np.uint8)),
        encoded(np.zeros((6, LAYERS, 0), np.uint8)),
        encoded(np.zeros((6, LAYERS, K), np.float32)),
    ],
)
async def test_an_answer_without_the_experts_of_its_tokens_is_a_fault(value: Any) -> None:
    async with StubServer(changed(value)) as server, EngineClient(server.url) as client:
        with pytest.raises(EngineProtocolError, match="expected routed_experts"):
            await client.generate((5, 6, 7), Sampling(4, experts_from=0))


async def test_nothing_is_asked_for_and_nothing_is_read_where_it_is_off() -> None:
    async with StubServer(changed("junk")) as server, EngineClient(server.url) as client:
        generation = await client.generate((5, 6, 7), Sampling(4))
        assert generation.experts is None
    assert "routed_experts_prompt_start" not in server.bodies[0]["sampling_params"]
