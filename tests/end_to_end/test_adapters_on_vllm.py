"""Adapters alone published to a real vLLM server, and the same server as reference policy.

One server serves both: under its own name the initial model, under ``adapter`` the policy in training.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager

import aiohttp
import anyio
import numpy as np
import pytest
import torch
from prometheus_client import CollectorRegistry

from actors.engine.base import Sampling
from actors.engine.client import EngineClient
from actors.servers.vllm import vllm_available
from learner.data.rows import Row
from learner.metrics import LearnerMetrics
from learner.observability.timing import Stopwatch
from learner.policy.policy import Policy
from learner.policy.reference import ServerReference
from learner.process.build import make_policy
from learner.weights.publisher import Publisher, make_publisher, weights_to_publish
from pipeline.config.learner import ReferenceConfig
from pipeline.runtime.run_directory import RunDirectory
from tests.end_to_end.conftest import prepared, tiny_config
from tests.support.running_engine import RunningEngine, running_engine

pytestmark = pytest.mark.vllm
TARGETS = ["q_proj", "v_proj", "o_proj", "down_proj"]
MEAN_ERROR_MAX = 1e-3
"""Nats per token between two float32 implementations of one model."""


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningEngine]:
    usable, reason = vllm_available()
    if not usable:
        pytest.skip(f"NO vLLM TESTS HERE: {reason}")
    config = tiny_config(
        tmp_path_factory.mktemp("adapters"),
        model={"source": "tiny", "max_length": 512, "tiny": {"initializer_range": 0.3, "hidden_size": 128}},
        engine={"kind": "vllm", "port": 0, "dtype": "float32", "block_size": 32, "max_sequences": 8},
        learner={"lora": {"rank": 4, "targets": TARGETS}, "device": "cpu", "compute_dtype": "float32"},
        publish={"lora": "adapter", "dtype": "float32"},
    )
    with running_engine(prepared(config)) as running:
        yield running


@pytest.fixture(scope="module")
def policy(engine: RunningEngine) -> Policy:
    torch.manual_seed(0)
    return make_policy(engine.config, RunDirectory(engine.config.run.path).model, None)


@asynccontextmanager
async def publishing(engine: RunningEngine, policy: Policy) -> AsyncIterator[Publisher]:
    config = engine.config.model_copy(
        update={"engine": engine.config.engine.model_copy(update={"urls": (engine.url,)})}
    )
    directory = RunDirectory(config.run.path).create()
    async with (
        make_publisher(config, directory, policy, LearnerMetrics(CollectorRegistry())) as publisher,
        anyio.create_task_group() as tasks,
    ):
        tasks.start_soon(publisher.run)
        yield publisher
        tasks.cancel_scope.cancel()


def row_of(ids: list[int], sampled: list[int]) -> Row:
    n, mask = len(ids) + len(sampled), np.arange(len(ids) + len(sampled)) >= len(ids)
    return Row(
        trajectory_id="t",
        trajectory_index=0,
        environment="toy",
        token_ids=np.asarray([*ids, *sampled], np.int32),
        loss_mask=mask,
        behaviour_logprobs=np.zeros(n, np.float32),
        policy_versions=np.zeros(n, np.int32),
        temperatures=np.ones(n, np.float32),
        turns=np.zeros(n, np.int32),
        advantages=np.zeros(len(sampled), np.float32),
    )


def scored(policy: Policy, row: Row) -> np.ndarray:
    return policy.score_rows([row])[0]


def change(policy: Policy, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in policy.named_parameters:
            if "lora_B" in name:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.2)


PROMPT = list(range(10, 40))


async def test_published_adapters_are_what_is_sampled_from(engine: RunningEngine, policy: Policy) -> None:
    """Version 0 is the initial policy, the next two are others."""
    name = engine.config.publish.served_name
    async with publishing(engine, policy) as publisher, EngineClient(engine.url, model=name) as client:
        seen = []
        for version in (0, 1, 2):
            if version:
                change(policy, version)
            done = await publisher.publish(version, weights_to_publish(policy, engine.config.publish))
            assert done.live == (engine.url,), done.lagging
            answer = await client.generate(PROMPT, Sampling(max_tokens=24, temperature=1.0))
            assert {span.policy_version for span in answer.version_spans} == {version}
            row = row_of(PROMPT, answer.token_ids.tolist())
            errors = np.abs(scored(policy, row) - answer.logprobs)
            assert errors.mean() < MEAN_ERROR_MAX
            seen.append(scored(policy, row) - initial(policy, row))
        assert np.abs(seen[0]).max() == 0
        assert min(np.abs(s).mean() for s in seen[1:]) > 20 * MEAN_ERROR_MAX


def initial(policy: Policy, row: Row) -> np.ndarray:
    with policy.without_adapters():
        return scored(policy, row)


async def test_a_request_in_flight_goes_on_with_the_new_adapters(engine: RunningEngine, policy: Policy) -> None:
    config, answers = engine.config.publish, []
    async with (
        publishing(engine, policy) as publisher,
        EngineClient(engine.url, model=config.served_name) as client,
        anyio.create_task_group() as tasks,
    ):
        await publisher.publish(10, weights_to_publish(policy, config))
        before = scored_by(policy)
        change(policy, 99)

        async def play() -> None:
            answers.append(await client.generate(PROMPT, Sampling(max_tokens=300, temperature=1.0)))

        for _ in range(8):
            tasks.start_soon(play)
        await sampling(engine)
        await publisher.publish(11, weights_to_publish(policy, config))
    crossing = [answer for answer in answers if len(answer.version_spans) == 2]
    if not crossing:
        pytest.skip(f"NOT SHOWN: every request ended before the update: {[a.version_spans for a in answers]}")
    answer = max(crossing, key=lambda a: min(span.stop - span.start for span in a.version_spans))
    spans = answer.version_spans
    assert [span.policy_version for span in spans] == [10, 11]
    row = row_of(PROMPT, answer.token_ids.tolist())
    recorded, cut = answer.logprobs, spans[0].stop
    assert np.abs(before(row)[:cut] - recorded[:cut]).mean() < MEAN_ERROR_MAX
    assert np.abs(before(row)[cut:] - recorded[cut:]).mean() > 20 * MEAN_ERROR_MAX


async def sampling(engine: RunningEngine) -> None:
    """Wait until the engine decodes something."""
    async with aiohttp.ClientSession() as session:
        with anyio.fail_after(60):
            while True:
                async with session.get(engine.url + "/metrics") as answer:
                    if "vllm:num_requests_running{" in (text := await answer.text()) and not all(
                        line.endswith(" 0.0")
                        for line in text.splitlines()
                        if line.startswith("vllm:num_requests_running{")
                    ):
                        return
                await anyio.sleep(0.05)


def scored_by(policy: Policy) -> Callable[[Row], np.ndarray]:
    """Scores with the adapters of now, later."""
    kept = [p.detach().clone() for p in policy.parameters]

    def score(row: Row) -> np.ndarray:
        now = [p.detach().clone() for p in policy.parameters]
        with torch.no_grad():
            for p, old in zip(policy.parameters, kept, strict=True):
                p.copy_(old)
            found = scored(policy, row)
            for p, new in zip(policy.parameters, now, strict=True):
                p.copy_(new)
        return found

    return score


async def test_the_server_scores_prompts_like_the_frozen_weights(engine: RunningEngine, policy: Policy) -> None:
    """So does the longest row that a run with this reference has."""
    rng, server = np.random.default_rng(0), ReferenceConfig(url=engine.url, model="policy")
    lengths = (25, 26, 27, engine.config.updated(learner={"reference": server}).context_max)
    rows = [row_of(rng.integers(8, 60, 20).tolist(), rng.integers(8, 60, n - 20).tolist()) for n in lengths]
    reference = ServerReference(server, policy.interrupt)
    came = await anyio.to_thread.run_sync(reference.logprobs, rows, Stopwatch(policy.device))
    expected = np.concatenate([initial(policy, row) for row in rows])
    assert np.abs(came - expected).mean() < MEAN_ERROR_MAX
