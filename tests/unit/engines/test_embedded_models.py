"""Models that continuous batching alone would not serve: those that the embedded engine serves, or refuses."""

import asyncio
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch
import transformers
from transformers.generation.continuous_batching import input_outputs
from transformers.generation.continuous_batching.offloading_manager import OffloadingManager

from actors.embedded.batching import Batching
from actors.embedded.generator import Generator
from actors.embedded.options import EngineOptions
from actors.embedded.requests import EngineRequest
from pipeline.errors import ConfigurationError
from pipeline.runtime.embedded_models import check_embedded
from tests.support.families import EXPERTS, HEADS, SMALL, write_family
from tests.support.quick import slow_but

ADDED = ["Gemma 2", "Gemma 4", "gpt-oss (experts)", "DeepSeek V3 (experts)", "Qwen3.5", "LFM2", "Nemotron 3"]
WINDOWED = ["Gemma 2", "Gemma 4", "gpt-oss (experts)"]
"""Layers of two kinds, whose smallest cache has room for all requests."""
PROMPTS = [[(n + 5 * i) % 60 + 3 for i in range(length)] for n, length in enumerate((9, 20, 1, 5, 12, 12, 3, 30))]
REFUSED = {
    "Llama4TextConfig": (HEADS | EXPERTS, "which has layers of the kinds"),
    "MambaConfig": ({}, "which has no layers of attention"),
    "JambaConfig": (EXPERTS | {"attn_layer_period": 2, "attn_layer_offset": 1, "mamba_d_state": 8}, "which samples"),
    "DiffLlamaConfig": ({}, "which samples"),
    "MiniMaxConfig": (HEADS | EXPERTS | {"layer_types": ["linear_attention", "full_attention"]}, "which fails"),
}


@pytest.fixture(autouse=True)
def quiet():
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()


def options(folder):
    """Room for three requests of few tokens: prompts are read in pieces, and requests lose their places."""
    return EngineOptions(
        folder, dtype="float32", device="cpu", threads=1, max_length=64, max_sequences=3, block_size=4, batch_tokens=7,
        kv_cache_gib=0.0,
    )  # fmt: skip


async def until(condition):
    while not condition():
        await asyncio.sleep(0.001)


async def sampled(folder):
    """Answers to the prompts, one of which is abandoned, with a pause, a load, a new version and a sleep between."""
    failures = []
    generator = Generator(options(folder), failures.append)
    generator.start()
    try:
        await generator.try_out()
        await generator.stamp("1")
        tasks = [
            asyncio.create_task(generator.generate(EngineRequest(str(n), ids, 20 + n, 0.8, frozenset(), True, True)))
            for n, ids in enumerate(PROMPTS)
        ]
        await until(lambda: generator._batching.sampled_in_flight() > 3)
        await generator.pause()
        tasks[1].cancel()
        await generator.reload(folder)
        await generator.stamp("2")
        await generator.resume()
        first = generator.passes
        await until(lambda: generator.passes > first + 3)
        await generator.sleep(1)
        await generator.wake_up()
        answers = await asyncio.gather(*tasks, return_exceptions=True)
        assert failures == [] and isinstance(answers.pop(1), asyncio.CancelledError)
        return answers
    finally:
        await generator.stop()


def test_a_gpu_that_is_not_used_does_not_get_what_the_cpu_reads(tmp_path, monkeypatch):
    """PyTorch makes the pinned tensors of a Mac on its GPU. Here it refuses to pin."""
    monkeypatch.setattr(transformers.utils, "is_torch_mps_available", lambda: True)
    transformers.utils.get_available_devices.cache_clear()
    monkeypatch.setattr(input_outputs, "get_available_devices", transformers.utils.get_available_devices)

    async def first() -> None:
        generator = Generator(options(write_family("SmolLM2", tmp_path)), failures.append)
        generator.start()
        try:
            await generator.try_out()
        finally:
            await generator.stop()

    failures = []
    try:
        asyncio.run(first())
    finally:
        transformers.utils.get_available_devices.cache_clear()
    assert failures == []


@pytest.mark.parametrize("name", slow_but(("Gemma 4", "DeepSeek V3 (experts)", "LFM2"), ADDED))
def test_tokens_have_the_log_probabilities_of_a_plain_pass_whatever_happens_to_their_batch(name, tmp_path, monkeypatch):
    moved = []
    offload = OffloadingManager.offload_requests
    monkeypatch.setattr(OffloadingManager, "offload_requests", lambda self: moved.append(1) or offload(self))
    answers = asyncio.run(sampled(write_family(name, tmp_path)))
    assert moved or name in WINDOWED
    model = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    prompts = [ids for n, ids in enumerate(PROMPTS) if n != 1]
    for ids, answer in zip(prompts, answers, strict=True):
        row = torch.tensor([ids + answer.token_ids])
        with torch.no_grad():
            scores = torch.log_softmax(model(input_ids=row, use_cache=False).logits[0, :-1] / 0.8, dim=-1)
        expected = scores.gather(1, row[0, 1:, None])[len(ids) - 1 :, 0]
        torch.testing.assert_close(torch.tensor(answer.logprobs), expected, rtol=1e-3, atol=1e-3)
        assert [answer.spans[0]["start"], answer.spans[-1]["end"]] == [0, len(answer.token_ids)]
    assert {span["version"] for answer in answers for span in answer.spans} == {"1", "2"}


@pytest.mark.parametrize("name", REFUSED)
def test_a_model_that_would_sample_wrongly_is_refused_in_one_sentence_before_the_first_request(name, tmp_path):
    sizes, reason = REFUSED[name]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        config = getattr(transformers, name)(**SMALL | sizes)
        transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)

    async def start():
        check_embedded(tmp_path)
        generator = Generator(options(tmp_path), lambda error: None)
        generator.start()
        try:
            await generator.try_out()
        finally:
            await generator.stop()

    with pytest.raises(ConfigurationError, match=rf"cannot generate with \w+, {reason}.*: set engine.kind: vllm"):
        asyncio.run(start())


@pytest.mark.parametrize("device", ["cpu", "cuda:0"])
def test_sampling_continues_after_what_a_gpu_was_asked_to_do_meanwhile(monkeypatch, device):
    """transformers samples on a stream of its own, which waits for no other one."""
    events = []

    @contextmanager
    def pause():
        try:
            yield
        finally:
            events.append("continues")

    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: events.append(str(device)))
    batching = SimpleNamespace(pause=pause, model=SimpleNamespace(device=torch.device(device)))
    with pytest.raises(RuntimeError), Batching.frozen(batching):
        raise RuntimeError
    assert events == [*(["cuda:0"] if device != "cpu" else []), "continues"]
