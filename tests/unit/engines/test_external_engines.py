"""The preflight of external engines: what does not answer or does not fit is told in one sentence, without secrets."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import anyio
import pytest
from aiohttp import web

import actors.process.preflight
from actors.process.preflight import check_engines
from pipeline.config import RunConfig
from pipeline.errors import Findings
from tests.support.stub_engine import StubServer


def card(**fields: Any) -> dict[str, Any]:
    """vLLM's answer: the base model, then an adapter."""
    base = {"id": "policy", "object": "model", "root": "Qwen/Qwen2.5-0.5B-Instruct", "max_model_len": 64, **fields}
    return {"object": "list", "data": [base, {"id": "adapter", "root": "/adapter", "parent": "policy"}]}


def configured(*urls: str, folder: Path = Path("runs"), **engine: Any) -> RunConfig:
    return RunConfig.model_validate(
        {
            "run": {"directory": folder, "name": "r"},
            "model": {"source": "Qwen/Qwen2.5-0.5B-Instruct", "max_length": 64},
            "sampling": {"max_tokens": 8},
            "engine": {"kind": "external", "urls": urls, **engine},
            "environments": {"guess": {"name": "number_guess"}},
        }
    )


async def found_of(config: RunConfig) -> Findings:
    found = Findings()
    await anyio.to_thread.run_sync(check_engines, config, found)
    return found


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"max_model_len": None},
        {"max_model_len": 128},
        {"id": "Qwen/Qwen2.5-0.5B-Instruct", "root": None},
        {"root": "/models/Qwen2.5-0.5B-Instruct"},
        {"root": "FOLDER/r/model"},
    ],
)
async def test_nothing_is_said_of_an_engine_that_fits(fields: dict[str, Any], tmp_path: Path) -> None:
    if fields.get("root"):
        fields = {**fields, "root": fields["root"].replace("FOLDER", str(tmp_path))}
    async with StubServer() as server:
        server.models = card(**fields)
        assert await found_of(configured(server.url, folder=tmp_path)) == Findings()


async def test_a_shorter_context_is_a_problem_and_another_model_is_said() -> None:
    async with StubServer() as server:
        server.models = card(root="Qwen/Qwen3-0.6B", max_model_len=32)
        found = await found_of(configured(server.url))
    assert found.problems == [
        f"engine.urls: expected an engine for model.max_length (64 tokens), got {server.url} with 32: start it with "
        "--max-model-len 64, or set model.max_length: 32"
    ]
    assert found.notes == [
        f"engine.urls: {server.url} serves Qwen/Qwen3-0.6B, and model.source is Qwen/Qwen2.5-0.5B-Instruct: expected "
        "the same model"
    ]


async def test_an_engine_that_lists_no_model_may_be_used() -> None:
    async with StubServer() as server:
        found = await found_of(configured(server.url))
    assert found == Findings(notes=[f"engine.urls: {server.url} does not say which model it serves"])


async def test_a_route_that_an_option_of_vllm_brings_is_missed_before_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    async def missing(request: web.Request) -> web.Response:
        return web.json_response({"detail": "Not Found"}, status=404)

    async with StubServer(has_generate=False) as server:
        (problem,) = (await found_of(configured(server.url))).problems
    assert "expected a route /inference/v1/generate, got 404; start vLLM with --enable-scale-out" in problem
    monkeypatch.setattr(StubServer, "_weight_info", staticmethod(missing))
    async with StubServer() as server:
        (problem,) = (await found_of(configured(server.url))).problems
    assert "start vLLM with VLLM_SERVER_DEV_MODE=1" in problem


async def test_each_engine_that_does_not_answer_is_named_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(actors.process.preflight, "SECONDS_MAX", 0.3)
    async with StubServer() as unhealthy, await anyio.create_tcp_listener(local_host="127.0.0.1") as silent:
        unhealthy.healthy = False
        port = silent.extra(anyio.abc.SocketAttribute.local_port)
        gone = "http://me:secret@127.0.0.1:1"
        found = await found_of(configured(unhealthy.url, f"http://127.0.0.1:{port}", gone))
    assert len(found.problems) == 3
    told = "\n".join(sorted(found.problems))
    assert f"engine {unhealthy.url} is not healthy: HTTP 503: start it and wait" in told
    assert f"expected an answer from the engine http://127.0.0.1:{port} within 0.3 s, got none" in told
    assert "engine http://127.0.0.1:1 takes no connection" in told
    assert "secret" not in told


async def test_a_key_that_is_not_accepted_is_told_and_not_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("THE_KEY", "very-secret")

    async def refused(request: web.Request) -> web.Response:
        return web.json_response({"error": "Unauthorized"}, status=401)

    monkeypatch.setattr(StubServer, "_models", staticmethod(refused))
    async with StubServer() as server:
        found = await found_of(configured(server.url, actor_key="env:THE_KEY"))
    (problem,) = found.problems
    assert "does not accept our key (HTTP 401)" in problem and "engine.actor_key is wrong" in problem
    assert "very-secret" not in problem
