"""Publication by deltas to an embedded engine over HTTP, from a policy that trains."""

from __future__ import annotations

import anyio
import pytest
import torch

from actors.embedded.generator import Generator
from actors.embedded.options import EngineOptions
from actors.embedded.routes import application
from learner.metrics import LearnerMetrics
from learner.policy.policy import Policy
from learner.weights.publisher import make_publisher
from pipeline.runtime.metrics import CollectorRegistry
from pipeline.runtime.run_directory import RunDirectory
from tests.support.http_server import serving

VOCABULARY = 3000


@pytest.fixture
async def engine(kit, tmp_path):
    """Generator and address of an engine over the initial model."""
    kit.tiny_model(vocabulary=VOCABULARY).save_pretrained(tmp_path / "run" / "model")
    options = EngineOptions(tmp_path / "run" / "model", dtype="bfloat16", device="cpu", threads=1, max_length=128)
    generator = Generator(options, lambda error: None)
    generator.start()
    async with serving(application(generator)) as url:
        yield generator, url
    await generator.stop()


def train(policy, seed: int) -> None:
    """A step of AdamW at a small learning rate."""
    torch.manual_seed(seed)
    optimizer = torch.optim.AdamW(policy.model.parameters(), lr=1e-4)
    policy.model(torch.randint(0, VOCABULARY, (4, 16))).logits.float().logsumexp(-1).mean().backward()
    optimizer.step()
    optimizer.zero_grad()


@pytest.mark.slow
async def test_an_engine_serves_after_each_delta_what_it_serves_after_a_whole_load(
    kit, engine, tmp_path, caplog, monkeypatch
):
    monkeypatch.setattr("learner.weights.delta_loader.WHOLE_EVERY", 4)
    generator, url = engine
    config = kit.run_config(
        run={"directory": tmp_path, "name": "run", "id": "r"},
        engine={"kind": "embedded", "urls": [url], "weight_transfer": "delta"},
        publish={"probe_nats_max": None, "dtype": "bfloat16"},
    )
    directory, policy = (
        RunDirectory(config.run.path),
        Policy(kit.tiny_model(vocabulary=VOCABULARY), config.learner, torch.device("cpu")),
    )
    publisher = make_publisher(config, directory, policy, LearnerMetrics(CollectorRegistry()))
    sizes = []
    async with publisher, anyio.create_task_group() as tasks:
        tasks.start_soon(publisher.run)
        await publisher.publish(0, policy.snapshot("bfloat16"), initial=True)
        for version in range(1, 8):
            train(policy, version)
            tensors = policy.snapshot("bfloat16")
            with anyio.fail_after(60):
                done = await publisher.publish(version, tensors)
            assert done.live == (url,)
            sizes.append(done.n_bytes)
            served = generator._model.state_dict()
            assert all(torch.equal(served[name], tensor) for name, tensor in tensors.items())
        tasks.cancel_scope.cancel()
    assert sizes[1] < sizes[0] / 2 and sizes[4] > sizes[0]
    assert "whole weights" not in caplog.text
    assert generator.versions.current == "r/7"
