"""The contract that Afterplay relies on in an inference engine, proved on the embedded engine and on a real vLLM."""

from __future__ import annotations

import asyncio
import functools
import os
import random
import shutil
import time
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import aiohttp
import anyio
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from actors.engine.answers import AnswerStream, read_generate
from actors.engine.base import Sampling
from actors.engine.client import EngineClient
from actors.servers.authorization import CONTROL, GENERATION
from learner.metrics import LearnerMetrics
from learner.policy.reference import prompt_logprobs
from learner.weights.delta_loader import bits_of
from learner.weights.engine_client import EngineControl
from learner.weights.engine_keeper import WeightProbe
from learner.weights.publisher import Publisher
from pipeline.config import RunConfig
from pipeline.config.learner import PublishConfig
from pipeline.errors import EngineRefused
from pipeline.runtime.engine_keys import authorization
from pipeline.runtime.http import HttpClient
from pipeline.runtime.metrics import CollectorRegistry
from pipeline.runtime.run_directory import RunDirectory
from pipeline.runtime.weights import write_delta
from tests.end_to_end.conftest import VLLM
from tests.support.running_engine import RunningEngine, running_engine

MEAN_ERROR_MAX = 1e-3
"""Nats per token between two float32 implementations of one model."""


class Api:
    """The engine's routes."""

    def __init__(self, engine: RunningEngine, session: aiohttp.ClientSession) -> None:
        self.engine = engine
        self.session = session
        self.model = RunDirectory(engine.config.run.path).model.absolute()

    async def post(self, path: str, body: Any = None, **kwargs: Any) -> tuple[int, Any]:
        timeout = aiohttp.ClientTimeout(total=280)
        async with self.session.post(self.engine.url + path, json=body, timeout=timeout, **kwargs) as answer:
            return answer.status, await answer.json(content_type=None) if await answer.read() else None

    async def generate(self, ids: list[int], **sampling: Any) -> dict[str, Any]:
        parameters = {"max_tokens": 16, "temperature": 1.0, "logprobs": 0, **sampling}
        status, body = await self.post("/inference/v1/generate", {"token_ids": ids, "sampling_params": parameters})
        assert status == 200, body
        choice: dict[str, Any] = body["choices"][0]
        return choice

    async def update(self, version: int, folder: Path) -> None:
        """A publication: pause, load, stamp, resume."""
        _folders[self.engine.url] = folder
        assert (await self.post("/pause?mode=keep"))[0] == 200
        body = {"method": "reload_weights", "kwargs": {"weights_path": str(folder)}}
        assert (await self.post("/collective_rpc", body))[0] == 200
        await self.stamp(version)
        assert (await self.post("/resume"))[0] == 200

    async def stamp(self, version: int) -> None:
        assert (await self.post("/update_weight_version", {"new_version": str(version)}))[0] == 200

    async def metric(self, name: str) -> float:
        async with self.session.get(self.engine.url + "/metrics") as answer:
            lines = (await answer.text()).splitlines()
        values = [float(line.rpartition(" ")[2]) for line in lines if line.startswith(f"vllm:{name}{{")]
        assert values, f"no metric {name}"
        return sum(values)

    async def until_state(self, state: str) -> None:
        """Wait until the engine tells that it is in ``state``, and not stuck."""
        async with asyncio.timeout(30):
            while True:
                async with self.session.get(self.engine.url + "/metrics") as answer:
                    if f'afterplay_role_state{{state="{state}"}} 1.0' in await answer.text():
                        break
                await asyncio.sleep(0.1)
        async with self.session.get(self.engine.url + "/health") as answer:
            assert answer.status == 200

    async def until(self, name: str, wanted: Any) -> None:
        """Wait until a metric satisfies ``wanted``."""
        async with asyncio.timeout(120):
            while not wanted(await self.metric(name)):
                await asyncio.sleep(0.01)


@pytest.fixture(params=["embedded", VLLM])
async def api(request: pytest.FixtureRequest) -> AsyncIterator[Api]:
    """With the model's weights under a version of its own."""
    engine = request.getfixturevalue(f"{request.param}_engine")
    connector = aiohttp.TCPConnector(force_close=True)
    async with aiohttp.ClientSession(connector=connector, headers=engine.control) as session:
        api = Api(engine, session)
        if _folders.get(engine.url, api.model) == api.model:
            await api.stamp(next_version(engine))
        else:
            await api.update(next_version(engine), api.model)
        yield api


_versions: dict[str, int] = {}
_folders: dict[str, Path] = {}
"""Whose weights an engine has; one that is not here has the model's."""


def next_version(engine: RunningEngine) -> int:
    _versions[engine.url] = _versions.get(engine.url, -1) + 1
    return _versions[engine.url]


def on_vllm(api: Api) -> bool:
    return api.engine.config.engine.kind == "vllm"


def prompt(api: Api, length: int, seed: int = 0) -> list[int]:
    vocabulary = 40_000 if on_vllm(api) else 30
    rng = random.Random(seed)
    return [rng.randrange(8, vocabulary) for _ in range(length)]


@functools.lru_cache(maxsize=1)
def model_in(folder: Path) -> Any:
    """In float32. Most tests ask for the same one."""
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


def recomputed(folder: Path, ids: list[int], sampled: list[int], temperature: float) -> torch.Tensor:
    """Log-probabilities of ``sampled`` after ``ids`` by a plain forward pass, float32 [n]."""
    with torch.no_grad():
        logits = model_in(folder)(torch.tensor([ids + sampled])).logits[0].float()
    scores = torch.log_softmax(logits[len(ids) - 1 : -1] / temperature, dim=-1)
    return scores.gather(1, torch.tensor(sampled)[:, None])[:, 0]


def recorded(choice: dict[str, Any]) -> torch.Tensor:
    content = choice["logprobs"]["content"]
    assert [entry["token_id"] for entry in content] == choice["token_ids"]
    return torch.tensor([entry["logprob"] for entry in content])


def other_weights(api: Api, folder: Path, seed: int = 1) -> Path:
    """A folder of weights that differ a little from the model's."""
    tensors = load_file(api.model / "model.safetensors")
    largest = max(tensor.numel() for tensor in tensors.values())
    drawn = torch.randn(largest, generator=torch.Generator().manual_seed(seed))
    changed = {}
    for name, tensor in tensors.items():
        noise = drawn[: tensor.numel()].view_as(tensor) * tensor.float().std()
        changed[name] = (tensor.float() + 0.2 * noise).to(tensor.dtype) if tensor.dim() > 1 else tensor
    folder.mkdir(parents=True, exist_ok=True)
    save_file(changed, folder / "model.safetensors", metadata={"format": "pt"})
    for file in ("config.json", "generation_config.json"):
        (folder / file).write_bytes((api.model / file).read_bytes())
    return folder


async def test_answer_has_ids_logprobs_versions_and_reason(api: Api) -> None:
    version = str(_versions[api.engine.url])
    choice = await api.generate(prompt(api, 12), max_tokens=9, ignore_eos=True)
    assert len(choice["token_ids"]) == 9
    assert choice["finish_reason"] == "length"
    assert choice["weight_versions"] == [{"version": version, "start": 0, "end": 9}]
    async with api.session.get(api.engine.url + "/weight_info") as answer:
        assert await answer.json() == {"weight_version": version}


@pytest.mark.parametrize("temperature", [1.0, 0.7])
async def test_recorded_logprobs_are_those_of_the_sampled_distribution(api: Api, temperature: float) -> None:
    ids = prompt(api, 40, seed=3)
    choice = await api.generate(ids, max_tokens=60, temperature=temperature, ignore_eos=True)
    mine, theirs = recomputed(api.model, ids, choice["token_ids"], temperature), recorded(choice)
    assert (mine - theirs).abs().mean() < MEAN_ERROR_MAX
    assert (mine[1:] - theirs[:-1]).abs().mean() > 100 * MEAN_ERROR_MAX, "shifting by one token must fail"


CLOSED = ("/abort_requests", "/reset_prefix_cache", "/server_info", "/start_profile", "/release_kv_cache_memory",
          "/weight_checker", "/v1/unload_lora_adapter", "/docs", "/openapi.json")  # fmt: skip
"""Routes of vLLM that Afterplay does not use."""


async def test_without_the_learners_key_nobody_controls_an_engine(api: Api) -> None:
    url, actor = api.engine.url, authorization(api.engine.key("actor"))
    async with aiohttp.ClientSession() as stranger:
        for path in sorted({*CONTROL, *CLOSED}):
            for method in ("GET", "POST", "PUT", "OPTIONS"):
                async with stranger.request(method, url + path, json={}) as answer:
                    assert answer.status == 401, (method, path)
                async with stranger.request(method, url + path, json={}, headers=actor) as answer:
                    assert answer.status == 403, (method, path)
        for path in GENERATION:
            async with stranger.get(url + path) as answer:
                assert answer.status == 401, path
        for path in ("/health", "/metrics"):
            async with stranger.get(url + path) as answer:
                assert answer.status == 200, path
    client = EngineClient(url, key=api.engine.key("actor"))
    async with client:
        assert await client.weight_version() == _versions[url]
        assert len((await client.generate(prompt(api, 8), Sampling(max_tokens=2))).token_ids) <= 2
    assert (await api.post("/pause?mode=keep"))[0] == 200
    assert (await api.post("/resume"))[0] == 200
    for path in CLOSED:
        assert (await api.post(path))[0] == 403, path


async def test_an_engine_scores_a_prompt_as_the_learner_does(api: Api) -> None:
    ids = prompt(api, 24, seed=11)
    row = WeightProbe(ids, 0.5, LearnerMetrics(CollectorRegistry())).row
    sampling = {"max_tokens": 1, "temperature": 1.0, "prompt_logprobs": 0}
    status, answer = await api.post("/inference/v1/generate", {"token_ids": ids, "sampling_params": sampling})
    assert status == 200, answer
    expected = recomputed(api.model, ids[:1], ids[1:], 1.0)
    assert (expected - torch.from_numpy(prompt_logprobs(answer, row))).abs().mean() < MEAN_ERROR_MAX


async def test_requests_of_different_temperature_share_a_batch(api: Api) -> None:
    ids = prompt(api, 20, seed=4)
    temperatures = [0.5, 1.0, 2.0]
    choices = await asyncio.gather(
        *(api.generate(ids, temperature=t, max_tokens=20, ignore_eos=True) for t in temperatures)
    )
    for temperature, choice in zip(temperatures, choices, strict=True):
        mine = recomputed(api.model, ids, choice["token_ids"], temperature)
        assert (mine - recorded(choice)).abs().mean() < MEAN_ERROR_MAX


async def test_completion_in_two_parts_is_recorded_as_one(api: Api) -> None:
    ids = prompt(api, 20, seed=10)
    parts = [await api.generate(ids, max_tokens=24, ignore_eos=True)]
    parts += [await api.generate(ids + parts[0]["token_ids"], max_tokens=24, ignore_eos=True)]
    sampled = [token for part in parts for token in part["token_ids"]]
    mine, theirs = recomputed(api.model, ids, sampled, 1.0), torch.cat([recorded(part) for part in parts])
    assert (mine - theirs).abs().mean() < MEAN_ERROR_MAX


async def test_stop_token_ends_the_completion_and_is_part_of_it(api: Api) -> None:
    ids = prompt(api, 16, seed=5)
    first = (await api.generate(ids, temperature=0.0, max_tokens=4, ignore_eos=True))["token_ids"]
    choice = await api.generate(ids, temperature=0.0, max_tokens=4, ignore_eos=True, stop_token_ids=[first[0]])
    assert choice["token_ids"] == first[:1]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", first[0])


async def test_update_inside_a_request_gives_two_version_spans(api: Api, tmp_path: Path) -> None:
    old, new = _versions[api.engine.url], next_version(api.engine)
    folder = other_weights(api, tmp_path / "w")
    ids, length = prompt(api, 10, seed=6), 100 if on_vllm(api) else 400
    sampled = await api.metric("generation_tokens_total")
    request = asyncio.create_task(api.generate(ids, max_tokens=length, ignore_eos=True))
    if on_vllm(api):
        await api.until("generation_tokens_total", lambda value: value > sampled + 5)
    else:
        await api.until("num_requests_running", lambda value: value > 0)
    await api.update(new, folder)
    choice = await request
    spans = choice["weight_versions"]
    assert [span["version"] for span in spans] == [str(old), str(new)]
    middle = spans[0]["end"]
    assert [(span["start"], span["end"]) for span in spans] == [(0, middle), (middle, length)]
    assert 0 < middle < length
    before = recomputed(api.model, ids, choice["token_ids"], 1.0) - recorded(choice)
    assert before[:middle].abs().mean() < MEAN_ERROR_MAX, "tokens of the first span come from the old weights"
    assert before[middle:].abs().mean() > 10 * MEAN_ERROR_MAX, "tokens of the second span come from the new weights"


NO_LIMIT = aiohttp.ClientTimeout(total=None)


async def test_a_stream_comes_in_pieces_and_has_at_its_end_what_a_whole_answer_has(api: Api, tmp_path: Path) -> None:
    """The weights change when the first piece has come."""
    old, new = _versions[api.engine.url], next_version(api.engine)
    folder, ids, length = other_weights(api, tmp_path / "w"), prompt(api, 10, seed=13), 60 if on_vllm(api) else 400
    sampling = {"max_tokens": length, "temperature": 1.0, "logprobs": 0, "ignore_eos": True}
    body = {"token_ids": ids, "sampling_params": sampling, "stream": True}
    heard: list[int] = []
    stream = AnswerStream(api.engine.url, None, lambda token_ids, _: heard.extend(token_ids.tolist()))
    async with api.session.post(f"{api.engine.url}/inference/v1/generate", json=body, timeout=NO_LIMIT) as response:
        assert response.status == 200 and response.content_type == "text/event-stream"
        while not heard:
            stream.feed(await response.content.readany())
        assert len(heard) < length, "the first piece comes before the last token is sampled"
        await api.update(new, folder)
        async for data in response.content.iter_any():
            stream.feed(data)
    generation = read_generate(api.engine.url, stream.whole(), length, None)
    assert generation.token_ids.tolist() == heard and len(heard) == length
    assert [span.policy_version for span in generation.version_spans] == [old, new]
    middle = generation.version_spans[0].stop
    assert 0 < middle < length
    error = recomputed(api.model, ids, heard, 1.0) - torch.from_numpy(generation.logprobs)
    assert error[:middle].abs().mean() < MEAN_ERROR_MAX < 0.1 * error[middle:].abs().mean()


async def test_a_stream_that_its_client_leaves_is_not_sampled_on(api: Api) -> None:
    body = {"token_ids": prompt(api, 8), "sampling_params": {"max_tokens": 900, "ignore_eos": True}, "stream": True}
    async with api.session.post(f"{api.engine.url}/inference/v1/generate", json=body) as response:
        await response.content.readany()
        response.close()
    await api.until("num_requests_running", lambda value: value == 0)


async def test_outputs_follow_the_published_weights(api: Api, tmp_path: Path) -> None:
    folder = other_weights(api, tmp_path / "w", seed=2)
    ids = prompt(api, 64, seed=7)
    await api.generate(ids, max_tokens=30, ignore_eos=True)  # fills the prefix cache with KV of the old weights
    await api.update(next_version(api.engine), folder)
    choice = await api.generate(ids, max_tokens=30, ignore_eos=True)
    error = (recomputed(folder, ids, choice["token_ids"], 1.0) - recorded(choice)).abs().mean()
    assert error < MEAN_ERROR_MAX
    assert (recomputed(api.model, ids, choice["token_ids"], 1.0) - recorded(choice)).abs().mean() > 10 * MEAN_ERROR_MAX


async def test_an_engine_serves_after_a_delta_what_it_serves_after_a_whole_load(api: Api, tmp_path: Path) -> None:
    """Bit for bit, and a delta that does not fit changes nothing."""
    first, second = tmp_path / "first", tmp_path / "second"
    generator = torch.Generator().manual_seed(3)
    old = {n: t.to(torch.bfloat16) for n, t in load_file(other_weights(api, first) / "model.safetensors").items()}
    new = {n: torch.where(torch.rand(t.shape, generator=generator) < 0.02, t * 1.01, t) for n, t in old.items()}
    save_file(old, first / "model.safetensors", metadata={"format": "pt"})
    save_file(new, shutil.copytree(first, second) / "model.safetensors", metadata={"format": "pt"})
    write_delta(tmp_path / "delta", 1, 2, bits_of(old), bits_of(new))
    ids = prompt(api, 24, seed=12)

    async def score() -> list[Any]:
        body = {"token_ids": ids, "sampling_params": {"max_tokens": 1, "temperature": 1.0, "prompt_logprobs": 0}}
        scores: list[Any] = (await api.post("/inference/v1/generate", body))[1]["prompt_logprobs"]
        return [next(iter(entry.values()))["logprob"] for entry in scores[1:]]

    async def load_delta() -> None:
        assert (await api.post("/pause?mode=keep"))[0] == 200
        try:
            async with HttpClient(api.engine.control) as http:
                await EngineControl(api.engine.url, http, 60.0).load_deltas([tmp_path / "delta"])
        finally:
            await api.stamp(next_version(api.engine))
            assert (await api.post("/resume"))[0] == 200

    await api.update(next_version(api.engine), first)
    before = await score()
    await load_delta()
    after = await score()
    with pytest.raises(EngineRefused, match="refused the weight delta"):
        await load_delta()
    assert await score() == after
    await api.update(next_version(api.engine), second)
    assert await score() == after
    assert before != after


async def test_pause_stops_sampling_and_keeps_requests(api: Api) -> None:
    assert (await api.post("/pause?mode=keep"))[0] == 200
    request = asyncio.create_task(api.generate(prompt(api, 8), max_tokens=4, ignore_eos=True))
    done, _ = await asyncio.wait([request], timeout=0.5)
    assert not done
    await api.until_state("waiting for weights")
    assert (await api.post("/resume"))[0] == 200
    assert len((await request)["token_ids"]) == 4
    await api.until_state("waiting for requests")


async def test_repeated_prompt_hits_the_prefix_cache(api: Api) -> None:
    ids = prompt(api, 200, seed=8)
    await api.generate(ids, max_tokens=1)
    queries, hits = await api.metric("prefix_cache_queries_total"), await api.metric("prefix_cache_hits_total")
    await api.generate(ids, max_tokens=1)
    assert await api.metric("prefix_cache_queries_total") - queries == 200
    assert await api.metric("prefix_cache_hits_total") - hits == 192


@pytest.mark.parametrize(
    ("body", "status"),
    [
        ({"token_ids": [10**7], "sampling_params": {"max_tokens": 1}}, 400),
        ({"token_ids": [9] * 8200, "sampling_params": {"max_tokens": 1}}, 400),
        ({"token_ids": [], "sampling_params": {"max_tokens": 1}}, 400),
        ({"token_ids": [9], "sampling_params": {"temperature": -1.0}}, 400),
        ({"token_ids": [9]}, 400),
        ({"token_ids": [9], "model": "another", "sampling_params": {"max_tokens": 1}}, 404),
    ],
)
async def test_wrong_request_gets_a_json_error(api: Api, body: dict[str, Any], status: int) -> None:
    answered, error = await api.post("/inference/v1/generate", body)
    assert answered == status
    assert isinstance(error["error"]["message"], str) and error["error"]["message"]


async def test_weights_that_do_not_fit_are_refused_and_change_nothing(api: Api, tmp_path: Path) -> None:
    if on_vllm(api):
        pytest.skip("vLLM 0.32 answers 500, and would die of the next step: it stays paused until a load is whole")
    ids = prompt(api, 12, seed=9)
    body = {"method": "reload_weights", "kwargs": {"weights_path": str(tmp_path / "missing")}}
    assert (await api.post("/collective_rpc", body))[0] >= 400
    choice = await api.generate(ids, max_tokens=10, ignore_eos=True)
    assert (recomputed(api.model, ids, choice["token_ids"], 1.0) - recorded(choice)).abs().mean() < MEAN_ERROR_MAX


def cut_off(folder: Path) -> Path:
    """``folder`` with a tensor of a late layer that is too small: a load fails after most layers."""
    tensors = load_file(folder / "model.safetensors")
    name = max(name for name in tensors if name.endswith("mlp.up_proj.weight"))
    save_file(
        {**tensors, name: tensors[name][:5].contiguous()}, folder / "model.safetensors", metadata={"format": "pt"}
    )
    return folder


@pytest.mark.vllm
@pytest.mark.smoke
async def test_a_half_loaded_vllm_serves_nothing_until_a_load_is_whole(
    vllm_engine: RunningEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("learner.weights.engine_keeper.SPOILT_MAX", 1000)
    broken, whole = next_version(vllm_engine), next_version(vllm_engine)

    def write(folder: Path, tensors: Any) -> int:
        other_weights(api, folder, seed=9)
        if folder == directory.weights(broken):
            cut_off(folder)
        return 1

    directory = RunDirectory(tmp_path)
    publisher = Publisher([vllm_engine.url], directory, PublishConfig(), write, key=vllm_engine.key("learner"))
    async with (
        aiohttp.ClientSession(headers=vllm_engine.control) as session,
        publisher,
        anyio.create_task_group() as tasks,
        asyncio.timeout(120),
    ):
        api = Api(vllm_engine, session)
        ids = prompt(api, 20, seed=10)
        tasks.start_soon(publisher.run)
        done = await publisher.publish(broken, {})
        assert done.live == () and "500" in done.lagging[vllm_engine.url]
        async with session.get(vllm_engine.url + "/weight_info") as answer:
            assert await answer.json() == {"weight_version": "withdrawn"}
        request = asyncio.create_task(api.generate(ids, max_tokens=20, ignore_eos=True))
        assert not (await asyncio.wait([request], timeout=0.3))[0]
        await publisher.publish(whole, {})
        await publisher.until_live(whole)
        choice = await request
        tasks.cancel_scope.cancel()
    folder = _folders[vllm_engine.url] = directory.weights(whole)
    assert choice["weight_versions"] == [{"version": str(whole), "start": 0, "end": 20}]
    assert (recomputed(folder, ids, choice["token_ids"], 1.0) - recorded(choice)).abs().mean() < MEAN_ERROR_MAX


async def test_client_that_leaves_frees_its_place(api: Api) -> None:
    request = asyncio.create_task(api.generate(prompt(api, 8), max_tokens=900, ignore_eos=True))
    await api.until("num_requests_running", lambda value: value > 0)
    request.cancel()
    await api.until("num_requests_running", lambda value: value == 0)


def test_sigterm_ends_every_process_within_two_seconds(embedded_engine: RunningEngine) -> None:
    with running_engine(again(embedded_engine)) as engine:
        members = family(engine.process.pid)
        started = time.monotonic()
        assert engine.stop() == 0
        assert time.monotonic() - started < 2.0
        gone(members, 2.0)


def test_killed_guard_takes_the_engine_with_it(embedded_engine: RunningEngine) -> None:
    with running_engine(again(embedded_engine)) as engine:
        members = family(engine.process.pid)
        engine.kill()
        gone(members, 5.0)


@pytest.mark.vllm
@pytest.mark.smoke
@pytest.mark.kills_engine
def test_vllm_killed_hard_leaves_no_process(vllm_engine: RunningEngine) -> None:
    members = family(vllm_engine.process.pid)
    assert any(b"api_server" in Path(f"/proc/{pid}/cmdline").read_bytes() for pid in members)
    vllm_engine.kill()
    gone(members, 5.0)


def again(engine: RunningEngine) -> RunConfig:
    """The configuration of ``engine`` for a second one on another port."""
    return engine.config.model_copy(update={"engine": engine.config.engine.model_copy(update={"port": 0})})


def family(pid: int) -> set[int]:
    """``pid`` and its descendants."""
    members, frontier = {pid}, [pid]
    while frontier:
        parent = frontier.pop()
        for task in Path(f"/proc/{parent}/task").iterdir():
            with suppress(FileNotFoundError, ProcessLookupError):  # a thread may end meanwhile
                children = [int(child) for child in (task / "children").read_text().split()]
                members.update(children)
                frontier += children
    return members


def gone(members: set[int], seconds_max: float) -> None:
    deadline = time.monotonic() + seconds_max
    while alive := {pid for pid in members if _alive(pid)}:
        assert time.monotonic() < deadline, (
            f"still there: {[Path(f'/proc/{pid}/cmdline').read_bytes() for pid in alive]}"
        )
        time.sleep(0.02)


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (ProcessLookupError, FileNotFoundError):
        return False
