"""Judges and reward models against a real local server that also fails in every way."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import anyio
import pytest
from aiohttp import web

from pipeline.config.rewards import ScorerConfig
from pipeline.errors import ConfigurationError
from pipeline.scorer.scorer import Scorer
from tests.support.http_server import serving
from tests.unit.scorer.conftest import said

Handler = Callable[[web.Request], Any]


class Server:
    """Answers with ``answers`` one after another, the last for ever."""

    def __init__(self) -> None:
        self.url = ""
        self.bodies: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.paths: list[str] = []
        self.answers: list[Any] = []
        self.now = self.most = 0
        self.release = asyncio.Event()

    async def handle(self, request: web.Request) -> web.StreamResponse:
        self.bodies.append(await request.json())
        self.headers.append(dict(request.headers))
        self.paths.append(request.path)
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        self.now += 1
        self.most = max(self.most, self.now)
        try:
            if answer == "hang":
                await self.release.wait()
            if answer == "cut":
                assert request.transport is not None
                request.transport.close()
            if callable(answer):
                answer = answer(self.bodies[-1])
            if isinstance(answer, web.Response):
                return answer
            await asyncio.sleep(0)
            return answer if isinstance(answer, web.StreamResponse) else web.json_response(answer)
        finally:
            self.now -= 1


@asynccontextmanager
async def answering(*answers: Any) -> AsyncIterator[Server]:
    server = Server()
    server.answers = list(answers)
    async with serving(server.handle) as server.url:
        try:
            yield server
        finally:
            server.release.set()


def spoken(text: str, finish_reason: str = "stop") -> dict[str, Any]:
    return {"choices": [{"message": {"role": "assistant", "content": text}, "finish_reason": finish_reason}]}


@pytest.fixture(autouse=True)
def short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pipeline.scorer.judges.RETRY_SECONDS", 0.01)


@asynccontextmanager
async def scoring(kind: str, url: str, seen: list[Any] | None = None, **section: Any) -> AsyncIterator[Scorer]:
    defaults = {"name": "it", "url": url, "timeout_seconds": 5.0}
    config = ScorerConfig.model_validate({"environment_weight": 0, kind: [{**defaults, **section}]})
    retries: list[str] = []
    observe = (lambda *a: seen.append(a)) if seen is not None else None
    with anyio.fail_after(60):
        async with Scorer(config, observe, retries.append) as scorer:
            scorer.retries = retries  # type: ignore[attr-defined]
            yield scorer


async def test_a_judge_is_asked_with_the_template_and_its_score_is_scaled() -> None:
    async with (
        answering(spoken("Score: 3, no.\n**Score: 7.5**")) as server,
        scoring("judges", server.url, model="m", system="s", extra={"top_p": 0.5, "max_tokens": 9}) as scorer,
    ):
        verdict = await scorer.score(said("It is {4}.", asked="2 + 2?", answer=4))
    assert verdict.reward == 0.75 and dict(verdict.rewards) == {"environment": 0.0, "it": 0.75}
    body = server.bodies[0]
    assert (body["model"], body["temperature"], body["top_p"], body["max_tokens"]) == ("m", 0.0, 0.5, 9)
    assert body["messages"][0] == {"role": "system", "content": "s"}
    text = body["messages"][1]["content"]
    assert "2 + 2?" in text and "It is {4}." in text and "Right answer:\n4" in text
    assert server.paths == ["/v1/chat/completions"]


@pytest.mark.parametrize("url", ["/v1", "/v1/", "/v1/chat/completions"])
async def test_a_judge_is_found_however_its_url_is_written(url: str) -> None:
    async with answering(spoken("Score: 10")) as server, scoring("judges", server.url + url) as scorer:
        assert (await scorer.score(said(""))).reward == 1.0
    assert server.paths == ["/v1/chat/completions"]


def busy(pause: str) -> web.Response:
    return web.Response(status=429, text="busy", headers={"Retry-After": pause})


@pytest.mark.parametrize(
    "faults",
    [["cut"], ["hang"], [lambda _: web.Response(status=500)], [lambda _: busy("0")], [lambda _: busy("soon"), "cut"]],
)
async def test_what_passes_is_tried_again(faults: list[Any]) -> None:
    async with answering(*faults, spoken("Score: 5")) as server:
        async with scoring("judges", server.url, timeout_seconds=2.0 if "hang" in faults else 60.0) as scorer:
            assert (await scorer.score(said("x"))).reward == 0.5
            assert scorer.retries == ["it"] * len(faults)  # type: ignore[attr-defined]
        assert len(server.bodies) == len(faults) + 1


@pytest.mark.parametrize(
    ("answer", "reason", "requests"),
    [
        ("hang", "timeout", 2), ("cut", "unavailable", 2), (lambda _: web.Response(status=503), "unavailable", 2),
        (lambda _: web.Response(status=400, text="no such model"), "refused", 1),
        (lambda _: web.Response(status=302, headers={"Location": "/x"}), "protocol", 1),
        (lambda _: web.Response(text="<html>"), "protocol", 1), (["x"], "protocol", 1),
        ({"choices": []}, "protocol", 1),
        (spoken("no idea"), "protocol", 1), (spoken("Score: 11"), "protocol", 1), (spoken("Score: -1"), "protocol", 1),
        ({"choices": [{"message": {"content": None}}]}, "protocol", 1),
        (spoken("Style alone has a score: 2. As to its content", "length"), "protocol", 1),
        (spoken("Good. Score: 1", "length"), "protocol", 1),
        (lambda _: web.Response(body=b"[" + b"0," * 9_000_000 + b"0]"), "protocol", 1),
    ],
)  # fmt: skip
async def test_a_judge_that_fails_gives_no_reward_and_its_kind_of_failure(
    answer: Any, reason: str, requests: int
) -> None:
    seen: list[Any] = []
    async with (
        answering(answer) as server,
        scoring("judges", server.url, seen, retries=1, timeout_seconds=0.5 if answer == "hang" else 20.0) as scorer,
    ):
        verdict = await scorer.score(said("x"))
        assert verdict.reward is None and verdict.rewards["it"] is None
        assert [(name, failure) for name, _, failure in seen] == [("it", reason)]
        assert len(server.bodies) == requests


async def test_a_judge_that_may_say_nothing_but_its_score_is_heard() -> None:
    answer = spoken(" 7", "length")
    async with (
        answering(answer) as server,
        scoring("judges", server.url, score_pattern=r"(\d+)", extra={"max_tokens": 1}) as scorer,
    ):
        assert (await scorer.score(said("x"))).reward == 0.7


async def test_a_server_that_is_not_there_is_unavailable() -> None:
    async with answering({}) as server:
        url = server.url
    async with scoring("judges", url, retries=0) as scorer:
        assert [f.reason for f in (await scorer.score(said("x"))).failures] == ["unavailable"]


async def test_no_more_requests_than_concurrency_are_in_flight() -> None:
    async with answering(spoken("Score: 1")) as server, scoring("judges", server.url, concurrency=3) as scorer:
        async with anyio.create_task_group() as group:
            for number in range(20):
                group.start_soon(scorer.score, said("x", number))
        assert 1 <= server.most <= 3 and len(server.bodies) == 20


async def test_the_token_comes_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("JUDGE_KEY", raising=False)
    with pytest.raises(ConfigurationError, match="environment variable JUDGE_KEY, got none"):
        Scorer(ScorerConfig.model_validate({"judges": [{"name": "j", "url": "http://x", "api_key_env": "JUDGE_KEY"}]}))
    monkeypatch.setenv("JUDGE_KEY", "abc")
    async with answering(spoken("Score: 1")) as server:
        async with scoring("judges", server.url, api_key_env="JUDGE_KEY") as scorer:
            await scorer.score(said("x"))
        assert server.headers[0]["Authorization"] == "Bearer abc"


async def test_a_template_name_that_the_payload_lacks_is_no_reward() -> None:
    async with answering(spoken("Score: 1")) as server:
        async with scoring("judges", server.url, prompt="{rubric} {reply}") as scorer:
            verdict = await scorer.score(said("x", answer=1))
        assert verdict.reward is None and "{rubric}" in verdict.failures[0].details and not server.bodies


async def score_many(scorer: Scorer, n: int) -> list[Any]:
    verdicts: dict[int, Any] = {}

    async def one(number: int) -> None:
        verdicts[number] = await scorer.score(said(f"r{number}", number, answer=number))

    async with anyio.create_task_group() as group:
        for number in range(n):
            group.start_soon(one, number)
    return [verdicts[n] for n in range(n)]


def plain(body: dict[str, Any]) -> dict[str, Any]:
    return {"scores": [item["payload"]["answer"] / 10 for item in body["items"]]}


def openrlhf(body: dict[str, Any]) -> dict[str, Any]:
    assert body["query"][0].endswith(f"assistant: r{body['labels'][0]}") and body["prompts"][0] == "What?"
    return {"rewards": [label / 10 for label in body["labels"]]}


def classify(body: dict[str, Any]) -> dict[str, Any]:
    numbers = [int(text.rpartition("r")[2]) for text in body["input"]]
    data = [{"index": i, "label": "good", "probs": [0.0, n / 10]} for i, n in enumerate(numbers)]
    return {"data": data[::-1]}


def pooling(body: dict[str, Any]) -> dict[str, Any]:
    numbers = [int(text.rpartition("r")[2]) for text in body["input"]]
    return {"data": [{"index": i, "data": [[9.0, 9.0], [0.0, n / 10]]} for i, n in enumerate(numbers)]}


@pytest.mark.parametrize(
    ("kind", "answer", "path", "label"),
    [
        ("plain", plain, "/score", 0), ("openrlhf", openrlhf, "/get_reward", 0), ("vllm_classify", classify, "", 1),
        ("vllm_pooling", pooling, "", 1),
    ],
)  # fmt: skip
async def test_a_reward_model_scores_batches(kind: str, answer: Any, path: str, label: int) -> None:
    async with answering(answer) as server:
        async with scoring("reward_models", server.url + path, format=kind, label=label, batch_max=4) as scorer:
            verdicts = await score_many(scorer, 10)
        assert [verdict.reward for verdict in verdicts] == [n / 10 for n in range(10)]
        assert len(server.bodies) == 3
    assert set(server.paths) == {path or f"/{kind.removeprefix('vllm_')}"}


@pytest.mark.parametrize(
    ("answer", "reason", "failed"),
    [
        (lambda _: web.Response(status=500), "unavailable", 3), ({"scores": [1.0]}, "protocol", 3),
        ({"rewards": [1, 2, 3]}, "protocol", 3), ({"scores": [1.0, None, 1.0]}, "missing", 1),
        ({"scores": [1.0, "high", 1.0]}, "type", 1), ({"scores": [True, 1.0, 1.0]}, "type", 1),
        ([1, 2, 3], "protocol", 3),
    ],
)  # fmt: skip
async def test_a_reward_model_that_fails_fails_whom_it_concerns(
    monkeypatch: pytest.MonkeyPatch, answer: Any, reason: str, failed: int
) -> None:
    monkeypatch.setattr("pipeline.scorer.scorer.BATCH_WAIT_SECONDS", 5)
    async with (
        answering(answer) as server,
        scoring("reward_models", server.url, retries=1, batch_max=3) as scorer,
    ):
        verdicts = await score_many(scorer, 3)
    assert sum(verdict.reward is None for verdict in verdicts) == failed
    assert {failure.reason for verdict in verdicts for failure in verdict.failures} == {reason}
