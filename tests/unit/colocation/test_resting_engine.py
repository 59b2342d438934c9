"""Sleep of the embedded engine: its memory is given up, its requests are kept and resumed."""

from __future__ import annotations

import asyncio

import pytest
import torch

from actors.embedded.generator import Generator
from actors.embedded.options import EngineOptions
from actors.embedded.requests import EngineRequest
from actors.servers.refusal import Refusal

TOKENS = 100


@pytest.fixture
def folder(kit, tmp_path):
    kit.tiny_model(seed=3).save_pretrained(tmp_path / "model")
    return tmp_path / "model"


@pytest.fixture
async def generator(folder):
    failures = []
    generator = Generator(
        EngineOptions(folder, dtype="float32", device="cpu", threads=1, max_length=128, max_sequences=4),
        failures.append,
    )
    generator.start()
    yield generator
    await generator.stop()
    assert failures == []


def request(name: str, tokens: int = TOKENS) -> EngineRequest:
    """A greedy one: what comes must not depend on when the engine slept."""
    return EngineRequest(name, [1, 2, 3, 4, 5], tokens, 1e-6, frozenset(), True, True)


def cache_bytes(generator: Generator) -> int:
    return generator._batching.batch_processor.cache.cache_tensor.untyped_storage().nbytes()


def weight_bytes(generator: Generator) -> int:
    return sum(p.untyped_storage().nbytes() for p in generator._model.parameters())


async def until(look) -> None:
    async with asyncio.timeout(30):
        while not look():
            await asyncio.sleep(0.002)


async def sample(generator: Generator, request: EngineRequest) -> list[int]:
    async with asyncio.timeout(60):
        return (await generator.generate(request)).token_ids


@pytest.mark.slow
@pytest.mark.parametrize("level", [1, 2])
async def test_a_request_under_way_sleeps_and_ends_as_if_nothing_had_been(generator, folder, level):
    undisturbed = await sample(generator, request("a"))
    task = asyncio.create_task(sample(generator, request("b")))
    await until(lambda: generator._batching.running() == 1)
    await generator.sleep(level)
    assert generator.sleeping
    assert not task.done()
    passes = generator.passes
    late = asyncio.create_task(sample(generator, request("c", 7)))
    await asyncio.sleep(0.1)
    assert generator.passes == passes
    assert cache_bytes(generator) == 0
    assert (weight_bytes(generator) == 0) == (level == 2)
    assert await generator.wake_up(["weights"]) is False
    assert generator.sleeping
    if level == 2:
        await generator.reload(folder)
    assert await generator.wake_up(["kv_cache"]) is True
    assert not generator.sleeping
    assert cache_bytes(generator) > 0
    assert await task == undisturbed
    assert await late == undisturbed[:7]
    assert generator.passes > passes


async def test_discarded_weights_must_be_loaded_before_anything_is_sampled(generator, folder):
    await sample(generator, request("a", 3))
    await generator.sleep(2)
    with pytest.raises(Refusal, match="weights are asleep"):
        await generator.reload(folder)
    with pytest.raises(Refusal, match="discarded"):
        await generator.wake_up()
    with pytest.raises(Refusal, match="discarded"):
        await generator.wake_up(["kv_cache"])
    with pytest.raises(Refusal, match="wake it up"):
        await generator.resume()
    await generator.wake_up(["weights"])
    with pytest.raises(Refusal, match="discarded"):
        await generator.wake_up(["kv_cache"])
    await generator.sleep(1)
    await generator.wake_up(["weights"])
    with pytest.raises(Refusal, match="discarded"):
        await generator.wake_up(["kv_cache"])
    await generator.reload(folder)
    assert await generator.wake_up(["kv_cache"])
    assert len(await sample(generator, request("b", 3))) == 3


async def test_sleeping_and_waking_twice_is_harmless(generator):
    before = await sample(generator, request("a", 5))
    assert await generator.wake_up() is True
    await generator.sleep(1)
    await generator.sleep(1)
    assert await generator.wake_up() is True
    assert await generator.wake_up(["kv_cache"]) is True
    assert await sample(generator, request("b", 5)) == before
    with pytest.raises(Refusal, match="expected tags"):
        await generator.wake_up(["everything"])


async def test_an_engine_that_is_stopped_asleep_answers_its_requests(folder):
    torch.manual_seed(0)
    generator = Generator(
        EngineOptions(folder, dtype="float32", device="cpu", threads=1, max_length=128, max_sequences=4), print
    )
    generator.start()
    await until(lambda: generator._batching.batch_processor is not None)
    await generator.sleep(2)
    task = asyncio.create_task(sample(generator, request("a", 5)))
    await until(lambda: len(generator._waiting) == 1)
    async with asyncio.timeout(10):
        await generator.stop()
    with pytest.raises(Refusal, match="shutting down"):
        await task
    await until(lambda: not generator.alive)  # else its process would never end
    assert generator.passes == 0


async def test_tokens_bear_the_version_that_sampled_them_also_of_a_request_that_comes_in_a_pause(generator):
    """A request alone samples a token in each pass."""
    await generator.stamp("0")
    for number in range(8):
        before = generator.passes
        pausing = asyncio.create_task(generator.pause()) if number % 2 else None
        task = asyncio.create_task(generator.generate(request(str(number), 5)))
        await until(lambda task=task: generator._waiting or task.done())
        await (pausing or generator.pause())
        old = generator.passes - before
        await generator.stamp(str(number + 1))
        await generator.resume()
        async with asyncio.timeout(60):
            spans = (await task).spans
        sampled_by = [(str(number), 0, old), (str(number + 1), old, 5)]
        assert [(s["version"], s["start"], s["end"]) for s in spans] == [s for s in sampled_by if s[1] < s[2]]
