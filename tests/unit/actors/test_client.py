"""The HTTP client against good, old, slow and hostile engines. Nothing hangs, nothing false gets through."""

from __future__ import annotations

import asyncio
import copy
import random
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import anyio
import numpy as np
import orjson
import pytest
from aiohttp import web
from hypothesis import given
from hypothesis import strategies as st

from actors.engine.answers import AnswerStream, read_generate
from actors.engine.base import EngineReport, Sampling
from actors.engine.client import HEAD_BYTES_MAX, TOKEN_BYTES_MAX, EngineClient
from actors.process.role import connector
from pipeline.config import RunConfig
from pipeline.errors import EngineBusy, EngineError, EngineGone, EngineProtocolError, EngineRefused, EngineUnavailable
from pipeline.runtime.engine_keys import make_key_files
from pipeline.runtime.http import AnswerMemory
from pipeline.schema import FinishReason, VersionSpan
from tests.support.http_server import serving
from tests.support.stub_engine import StubServer, good_answer

SAMPLING = Sampling(max_tokens=4, stop_token_ids=(2,))


def changed(**fields: Any) -> Callable[[dict[str, Any]], Any]:
    def answer(body: dict[str, Any]) -> dict[str, Any]:
        value = good_answer(body)
        value["choices"][0].update(fields)
        return value

    return answer


def logprobs(*values: Any, ids: tuple[int, ...] = (5, 6, 7, 8)) -> dict[str, Any]:
    content = [{"token_id": i, "logprob": v} for i, v in zip(ids, values, strict=False)]
    return {"token_ids": [5, 6, 7, 8], "logprobs": {"content": content}}


def versions(*spans: tuple[Any, int, int]) -> dict[str, Any]:
    return {"weight_versions": [{"version": v, "start": s, "end": e} for v, s, e in spans]}


async def test_good_answer_gives_ids_logprobs_versions_and_reason() -> None:
    answer = changed(
        **logprobs(-0.5, -1, -2.5, 0.0), **versions(("3", 0, 0), ("4", 0, 1), ("7", 1, 4)), finish_reason="stop"
    )
    async with StubServer(answer) as server, EngineClient(server.url) as client:
        sampling = Sampling(max_tokens=4, temperature=0.7, top_p=0.9, top_k=5, stop=("x",), stop_token_ids=(2, 9))
        generation = await client.generate((1, 2, 3), sampling, session_id="s", cache_salt="v4")
    assert generation.token_ids.tolist() == [5, 6, 7, 8] and generation.token_ids.dtype == np.int32
    assert generation.logprobs.tolist() == [-0.5, -1.0, -2.5, 0.0]
    assert generation.version_spans == (VersionSpan(0, 1, 4), VersionSpan(1, 4, 7))
    assert generation.finish_reason is FinishReason.STOP
    body = server.bodies[0]
    assert body["token_ids"] == [1, 2, 3] and body["cache_salt"] == "v4"
    parameters = body["sampling_params"]
    assert "seed" not in parameters and "seed" not in body
    assert (
        parameters
        | {
            "max_tokens": 4,
            "temperature": 0.7,
            "top_p": 0.9,
            "top_k": 5,
            "stop": ["x"],
            "stop_token_ids": [2, 9],
            "logprobs": 0,
        }
        == parameters
    )


@pytest.mark.parametrize(
    "answer",
    [
        lambda body: b"{not json",
        lambda body: b"",
        lambda body: [],
        lambda body: {"choices": []},
        lambda body: {"choices": [1]},
        changed(token_ids=None),
        changed(token_ids=[]),
        changed(token_ids=[1, 2, 3, "4"]),
        changed(token_ids=[1, 2, 3, True]),
        changed(token_ids=[1, 2, 3, 4, 5]),
        changed(token_ids=[1, 2, 3, -4]),
        changed(token_ids=[1, 2, 3, 32]),
        changed(logprobs=None),
        changed(logprobs={"content": None}),
        changed(**logprobs(-1, -1, -1)),
        changed(**logprobs(-1, -1, -1, -1, ids=(5, 6, 8, 7))),
        changed(**logprobs(-1, -1, -1, 0.5)),
        changed(**logprobs(-1, -1, -1, None)),
        changed(**logprobs(-1, -1, -1, "-1")),
        changed(**logprobs(-1, -1, -1, True)),
        changed(**logprobs(-1, -1, -1, -3e38)),
        changed(**logprobs(-1, -1, -1, -1e400)),
        changed(**logprobs(-1, -1, -1, -100.5)),
        changed(finish_reason="tired"),
        changed(finish_reason=None),
        changed(finish_reason=["stop"]),
        changed(weight_versions=None),
        changed(weight_versions=[3]),
        changed(weight_versions=[]),
        changed(**versions(("0", 0, 3))),
        changed(**versions(("0", 1, 4))),
        changed(**versions(("0", 0, 2), ("1", 3, 4))),
        changed(**versions(("2", 0, 2), ("1", 2, 4))),
        changed(**versions(("new", 0, 4))),
        changed(**versions(("-1", 0, 4))),
        changed(**versions((1.5, 0, 4))),
        changed(**versions(("0", 0, 9))),
        lambda body: web.Response(status=204),
        lambda body: web.Response(status=302, headers={"Location": "/health"}),
    ],
)
async def test_garbage_is_a_protocol_error_that_names_the_engine(answer: Callable[[dict[str, Any]], Any]) -> None:
    async with StubServer(answer) as server, EngineClient(server.url, vocabulary=32) as client:
        with pytest.raises(EngineProtocolError, match=f"{server.url}: expected "):
            await client.generate([1], SAMPLING)


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (400, EngineRefused),
        (404, EngineRefused),
        (422, EngineRefused),
        (429, EngineBusy),
        (503, EngineBusy),
        (500, EngineUnavailable),
    ],
)
async def test_status_decides_whether_to_try_again_and_the_engines_message_is_told(
    status: int, kind: type[EngineError]
) -> None:
    def answer(body: dict[str, Any]) -> web.Response:
        return web.json_response({"error": {"message": "prompt is too long", "code": status}}, status=status)

    async with StubServer(answer) as server, EngineClient(server.url) as client:
        with pytest.raises(kind, match="prompt is too long") as raised:
            await client.generate([1], SAMPLING)
        assert type(raised.value) is kind, "an engine that is gone takes no requests at all"


@pytest.mark.parametrize("label", ["other/3", "3", "withdrawn", "default"])
async def test_weights_that_are_not_of_this_run_have_no_version(label: str) -> None:
    def answer(body: dict[str, Any]) -> Any:
        return good_answer(body, version=label)

    async with StubServer(answer, version=label) as server, EngineClient(server.url, run="mine") as client:
        assert await client.weight_version() is None
        with pytest.raises(EngineUnavailable, match="not of this run"):
            await client.generate([1, 2], Sampling(max_tokens=2))
    async with StubServer(version="mine/3") as server, EngineClient(server.url, run="mine") as client:
        assert await client.weight_version() == 3


@pytest.mark.parametrize("status", [401, 403])
async def test_an_engine_that_does_not_take_our_key_is_unavailable_and_another_is_tried(status: int) -> None:
    def answer(body: dict[str, Any]) -> Any:
        return web.json_response({"error": {"message": "closed"}}, status=status)

    async with StubServer(answer) as server, EngineClient(server.url) as client:
        with pytest.raises(EngineUnavailable, match="key"):
            await client.generate([1, 2], Sampling(max_tokens=2))


async def test_every_request_shows_the_actors_key_to_engines_that_are_external_too(tmp_path: Path) -> None:
    seen: list[str | None] = []

    async def handle(request: web.Request) -> web.Response:
        seen.append(request.headers.get("Authorization"))
        return web.json_response({"weight_version": "0"})

    make_key_files(tmp_path)
    keys = {f"{role}_key": f"file:{tmp_path}/engine_{role}.secret" for role in ("actor", "learner")}
    async with serving(handle) as url:
        engine = {"kind": "external", "urls": [url], **keys}
        async with connector(RunConfig.model_validate({"engine": engine}), None)(url) as client:
            await client.weight_version()
            await client.health()
            with pytest.raises(EngineProtocolError):
                await client.generate([1, 2], Sampling(max_tokens=2))
    assert seen == [f"Bearer {(tmp_path / 'engine_actor.secret').read_text().strip()}"] * 3


async def test_unstamped_tokens_are_not_version_zero() -> None:
    answer = changed(**versions(("default", 0, 4)))
    async with StubServer(answer, version="default") as server, EngineClient(server.url) as client:
        assert await client.weight_version() is None
        with pytest.raises(EngineUnavailable, match="labelled 'default'"):
            await client.generate([1], SAMPLING)


async def test_aborted_request_is_given_back_with_what_was_sampled() -> None:
    async with StubServer(changed(finish_reason="abort")) as server, EngineClient(server.url) as client:
        assert (await client.generate([1], SAMPLING)).finish_reason is FinishReason.ABORT


async def test_dead_engine_slow_engine_and_engine_that_hangs_up_are_unavailable() -> None:
    release = anyio.Event()

    async def hang(body: dict[str, Any]) -> Any:
        await release.wait()
        return good_answer(body)

    async with StubServer(hang) as server, EngineClient(server.url, request_seconds_max=0.05) as client:
        with pytest.raises(EngineUnavailable, match=r"did not answer .* within 0.05 s") as late:
            await client.generate([1], SAMPLING)
        assert type(late.value) is EngineUnavailable, "one slow answer does not say that the engine is gone"
        release.set()
    with pytest.raises(EngineGone):
        await client.generate([1], SAMPLING)
    await client.close()

    async def hang_up(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(10)
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\n{")
        await writer.drain()
        writer.close()

    raw = await asyncio.start_server(hang_up, "127.0.0.1", 0)
    async with raw, EngineClient(f"http://127.0.0.1:{raw.sockets[0].getsockname()[1]}") as client:
        with pytest.raises(EngineUnavailable):
            await client.generate([1], SAMPLING)
        with pytest.raises(EngineUnavailable):
            await client.health()


async def test_busy_engine_says_how_long_to_wait() -> None:
    for header, seconds in (("7", 7.0), ("Wed, 21 Oct 2026 07:28:00 GMT", None), ("-1", None)):
        busy = web.Response(status=429, headers={"Retry-After": header})
        async with StubServer(lambda body, busy=busy: busy) as server, EngineClient(server.url) as client:
            with pytest.raises(EngineBusy) as raised:
                await client.generate([1], SAMPLING)
            assert raised.value.seconds == seconds


@pytest.mark.parametrize("with_length", [True, False])
async def test_answer_longer_than_its_tokens_allow_is_refused_unread(with_length: bool) -> None:
    longest = HEAD_BYTES_MAX + SAMPLING.max_tokens * TOKEN_BYTES_MAX
    sent = 0

    async def endless(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal sent
        await reader.readuntil(b"\r\n\r\n")
        length = b"Content-Length: 1000000000" if with_length else b"Connection: close"
        writer.write(b"HTTP/1.1 200 OK\r\n" + length + b"\r\n\r\n")
        try:
            while sent < 100 * longest:
                writer.write(b" " * longest)
                sent += longest
                await writer.drain()
        except ConnectionError:
            pass
        finally:
            writer.close()

    raw = await asyncio.start_server(endless, "127.0.0.1", 0)
    memory = AnswerMemory(2 * longest)
    async with raw, EngineClient(f"http://127.0.0.1:{raw.sockets[0].getsockname()[1]}", memory=memory) as client:
        with pytest.raises(EngineProtocolError, match=f"at most {longest} bytes"):
            await client.generate([1], SAMPLING)
    assert sent < 100 * longest and memory.bytes_reserved == 0


async def test_answers_that_are_read_at_once_share_one_memory() -> None:
    memory, most = AnswerMemory(10), 0

    async def read(n_bytes: int) -> None:
        nonlocal most
        async with memory.reserve(n_bytes):
            most = max(most, memory.bytes_reserved)
            await anyio.lowlevel.checkpoint()

    async with anyio.create_task_group() as group:
        for n_bytes in (4, 4, 4, 10, 1, 7, 3):
            group.start_soon(read, n_bytes)
    assert most <= 10 and memory.bytes_reserved == 0
    await read(1000)
    assert most == 1000, "one that is larger than the memory is read alone"


async def test_an_engine_without_the_generate_route_says_how_to_start_it() -> None:
    async with StubServer(has_generate=False) as server, EngineClient(server.url) as client:
        with pytest.raises(EngineProtocolError, match="start vLLM with --enable-scale-out"):
            await client.generate([1, 2], SAMPLING)


async def test_what_an_engine_reports_is_summed_over_its_cores_and_nothing_is_none() -> None:
    async with StubServer() as server, EngineClient(server.url) as client:
        assert await client.report() is None
        server.metrics_text = (
            "# HELP vllm:prefix_cache_queries_total x\n"
            'vllm:prefix_cache_queries_total{engine="0"} 100.0\nvllm:prefix_cache_queries_total{engine="1"} 20.0\n'
            'vllm:prefix_cache_hits_total{engine="0"} 90.0\nvllm:prefix_cache_queries_created{engine="0"} 1.7e9\n'
            'vllm:num_requests_running{engine="0"} 4.0\nvllm:num_requests_running{engine="1"} 5.0\n'
            'vllm:num_requests_waiting{engine="0"} 3.0\nvllm:num_requests_waiting_by_reason{reason="capacity"} 3.0\n'
            'vllm:kv_cache_usage_perc{engine="0"} 0.2\nvllm:kv_cache_usage_perc{engine="1"} 0.9\n'
            "vllm:num_preemptions_total 2.0\nvllm:generation_tokens_total 1.7e3\nvllm:generation_tokens_total x\n"
        )
        assert await client.report() == EngineReport(
            running=9, waiting=3, kv_used=0.9, preemptions=2, sampled=1700, prefix_queries=120, prefix_hits=90
        )


async def test_sick_engine_is_unavailable() -> None:
    async with StubServer() as server, EngineClient(server.url) as client:
        await client.health()
        server.healthy = False
        with pytest.raises(EngineUnavailable, match="503"):
            await client.health()


def streamed(value: dict[str, Any], rng: random.Random) -> bytes:
    """An answer as vLLM streams it: versions and reason with the last tokens, or behind them."""
    (choice,) = value["choices"]
    ids, content = choice["token_ids"], choice["logprobs"]["content"]
    cuts = sorted(rng.sample(range(len(ids) + 1), rng.randrange(len(ids) + 1)))
    events: list[Any] = []
    for start, end in pairwise([0, *cuts, len(ids)]):
        none = dict.fromkeys(("finish_reason", "weight_versions", "routed_experts"))
        piece = {"token_ids": ids[start:end], "logprobs": {"content": content[start:end]}, **none}
        events.append({"request_id": "r", "choices": [{"index": 0, **piece}]})
    if rng.random() < 0.3:
        events.append(copy.deepcopy(events[-1]))
        events[-1]["choices"][0] |= {"token_ids": [], "logprobs": {"content": []}}
    last = events[-1]["choices"][0]
    last |= {name: choice[name] for name in ("finish_reason", "weight_versions")}
    return b"".join(b"data: " + orjson.dumps(event) + b"\n\n" for event in events) + b"data: [DONE]\n\n"


@given(seed=st.integers(0, 2**32))
def test_a_stream_is_read_as_the_answer_that_comes_whole_however_it_is_cut(seed: int) -> None:
    rng = random.Random(seed)
    n = rng.randrange(1, 9)
    value = good_answer({"sampling_params": {"max_tokens": n}})
    value["choices"][0] |= versions(("3", 0, n // 2), ("4", n // 2, n))
    heard: list[tuple[list[int], list[float]]] = []
    stream = AnswerStream("e", 32, lambda ids, scores: heard.append((ids.tolist(), scores.tolist())))
    data, at = streamed(value, rng), 0
    while at < len(data):
        end = rng.randint(at + 1, len(data))
        stream.feed(data[at:end])
        at = end
    whole, came = read_generate("e", value, n, 32), read_generate("e", stream.whole(), n, 32)
    assert (came.token_ids == whole.token_ids).all() and (came.logprobs == whole.logprobs).all()
    assert (came.version_spans, came.finish_reason) == (whole.version_spans, whole.finish_reason)
    assert [i for ids, _ in heard for i in ids] == whole.token_ids.tolist() and all(ids for ids, _ in heard)
    assert [score for _, scores in heard for score in scores] == whole.logprobs.tolist()


async def test_only_who_hears_asks_for_a_stream_and_an_engine_without_one_answers_whole() -> None:
    heard: list[int] = []

    def hear(ids: Any, scores: Any) -> None:
        heard.extend(ids.tolist())

    def answer(body: dict[str, Any]) -> Any:
        if not body.get("stream"):
            return good_answer(body)
        data = streamed(good_answer(body), random.Random(1))
        return web.Response(body=data, content_type="text/event-stream")

    memory = AnswerMemory(1)
    async with StubServer(answer) as server, EngineClient(server.url, memory=memory) as client:
        await client.generate([1], SAMPLING)
        generation = await client.generate([1], SAMPLING, heard=hear)
        assert generation.token_ids.tolist() == heard and len(heard) == 4
        assert ["stream" in body for body in server.bodies] == [False, True]
        server.answer = good_answer
        assert len((await client.generate([1], SAMPLING, heard=hear)).token_ids) == len(heard) == 4


@pytest.mark.parametrize(
    ("events", "fault"),
    [
        ([b'{"choices": [{"token_ids": [5], "logprobs": {"content": [{"token_id": 5, "logprob": -1}]}}]}'],
         (EngineUnavailable, "ended a stream after 1 tokens")),
        ([b'{"error": {"message": "out of memory"}}'], (EngineUnavailable, "out of memory")),
        ([b"{"], (EngineProtocolError, "events with JSON")),
        ([b'{"choices": []}'], (EngineProtocolError, "exactly one choice")),
        ([b'{"choices": [{"token_ids": [99], "logprobs": {"content": [{"token_id": 99, "logprob": -1}]}}]}'],
         (EngineProtocolError, r"token ids in 0\.\.31")),
        ([b'{"choices": [{"token_ids": [5], "logprobs": null}]}'], (EngineProtocolError, "one per token")),
        ([b" " * 100_000], (EngineProtocolError, "at most")),
    ],
)  # fmt: skip
async def test_a_stream_that_is_wrong_broken_off_or_endless_is_a_fault(events: list[bytes], fault: Any) -> None:
    data = b"".join(b"data: " + event + b"\n\n" for event in events)
    answer = web.Response(body=data, content_type="text/event-stream")
    async with StubServer(lambda body: answer) as server, EngineClient(server.url, vocabulary=32) as client:
        with pytest.raises(fault[0], match=fault[1]):
            await client.generate([1], SAMPLING, heard=lambda ids, scores: None)
