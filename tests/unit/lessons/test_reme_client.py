"""The client of a ReMe-compatible service, against a small real HTTP server with the same routes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import anyio
import pytest
from aiohttp import web

from actors.adapters.reme import RemeSource
from actors.environments.plugins import make_source
from pipeline.config.lessons import LessonsConfig
from pipeline.errors import ConfigurationError, EngineProtocolError, EngineUnavailable
from pipeline.lessons.store import Lesson
from pipeline.schema import PromptLessons, Trajectory
from tests.support.http_server import serving

MakePlayed = Callable[..., Trajectory]


class Service:
    """Keeps what it is told in one list per workspace and finds by common words."""

    def __init__(self) -> None:
        self.memories: dict[str, list[dict[str, Any]]] = {}
        self.bodies: list[dict[str, Any]] = []
        self.delay = 0.0

    async def retrieve(self, request: web.Request) -> web.Response:
        body = await request.json()
        self.bodies.append(body)
        await asyncio.sleep(self.delay)
        words = set(body["query"].split())
        memories = [m for m in self.memories.get(body["workspace_id"], []) if words & set(m["when_to_use"].split())][
            : body["top_k"]
        ]
        answer = "\n".join(m["content"] for m in memories)
        return web.json_response({"answer": answer, "success": True, "metadata": {"memory_list": memories}})

    async def summarise(self, request: web.Request) -> web.Response:
        body = await request.json()
        self.bodies.append(body)
        made = [
            {
                "workspace_id": body["workspace_id"],
                "memory_id": f"m{n}",
                "memory_type": "task",
                "when_to_use": trajectory["messages"][0]["content"],
                "content": f"say {trajectory['messages'][-1]['content']}",
                "score": trajectory["score"],
            }
            for n, trajectory in enumerate(body["trajectories"])
            if trajectory["score"] >= 1
        ]
        self.memories.setdefault(body["workspace_id"], []).extend(made)
        return web.json_response({"answer": "", "success": True, "metadata": {"memory_list": made}})


@asynccontextmanager
async def reme_server(**routes: Any) -> AsyncIterator[tuple[Service, str]]:
    service = Service()
    app = web.Application()
    app.router.add_post("/retrieve_task_memory", routes.get("retrieve", service.retrieve))
    app.router.add_post("/summary_task_memory", routes.get("summarise", service.summarise))
    async with serving(app) as url:
        yield service, url


@asynccontextmanager
async def client(url: str) -> AsyncIterator[RemeSource]:
    reme = RemeSource(url, "w")
    try:
        yield reme
    finally:
        await reme.close()


async def test_what_was_handed_over_is_found(make_played: MakePlayed) -> None:
    lessons = PromptLessons(("1",), query="guess it")
    group = [
        make_played(["4", "3"], ["lower"], 1.0, prompt="Lessons: never\nguess it", lessons=lessons),
        make_played(["5"], [], 0.0, slot=1, prompt="guess it"),
        make_played(["5"], [], None, slot=2, prompt="guess it"),
    ]
    async with reme_server() as (service, url), client(url) as reme:
        assert await reme.summarise(group) == 1
        assert await reme.search("o", "guess again", 2) == [Lesson("m0", "say 3")]
        assert await reme.search("o", "else", 2) == []
    summary, search = service.bodies[:2]
    assert search == {"workspace_id": "w", "query": "guess again", "top_k": 2}
    assert summary["workspace_id"] == "w"
    assert summary["trajectories"] == [
        {
            "messages": [
                {"role": "user", "content": "guess it"},
                {"role": "assistant", "content": "4"},
                {"role": "user", "content": "lower"},
                {"role": "assistant", "content": "3"},
            ],
            "score": 1.0,
        },
        {"messages": [{"role": "user", "content": "guess it"}, {"role": "assistant", "content": "5"}], "score": 0.0},
    ]


async def test_a_service_that_is_late_is_given_up_and_asked_again() -> None:
    async with reme_server() as (service, url), client(url) as reme:
        service.delay = 5
        with pytest.raises(TimeoutError), anyio.fail_after(0.05):
            await reme.search("o", "guess", 2)
        service.delay = 0
        assert await reme.search("o", "guess", 2) == []


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({}, "'url'"),
        ({"url": None}, "url: expected an address like http://127.0.0.1:8002, got None"),
        ({"url": "localhost:8002"}, "got 'localhost:8002'"),
        ({"url": "http://x", "room": "w"}, "lessons.source_options: unknown room; RemeSource takes url, workspace"),
    ],
)
def test_options_that_do_not_fit_are_refused(options: dict[str, Any], words: str) -> None:
    section = LessonsConfig(enabled=True, source="actors.adapters.reme:RemeSource", source_options=options)
    with pytest.raises(ConfigurationError, match=words) as error:
        make_source(section)
    assert str(error.value).startswith("lessons.source")


async def test_a_service_that_is_not_there_is_named() -> None:
    async with client("http://127.0.0.1:9") as reme:
        with pytest.raises(EngineUnavailable, match=r"lesson service http://127\.0\.0\.1:9"):
            await reme.search("o", "guess", 2)


@pytest.mark.parametrize(
    ("answer", "error"),
    [
        (web.Response(status=500, text="no"), EngineUnavailable),
        (web.Response(text="<html>"), EngineProtocolError),
        (web.json_response([1]), EngineProtocolError),
        (web.json_response({"metadata": {"memory_list": {"a": 1}}}), EngineProtocolError),
        (web.json_response({"answer": ""}), EngineProtocolError),
    ],
)
async def test_an_answer_that_is_none_is_an_error(answer: web.Response, error: type[Exception]) -> None:
    async def respond(request: web.Request) -> web.Response:
        return answer

    async with reme_server(retrieve=respond) as (_, url), client(url) as reme:
        with pytest.raises(error, match="lesson service"):
            await reme.search("o", "guess", 2)


async def test_memories_without_text_are_left_out_and_those_without_id_get_one() -> None:
    async def respond(request: web.Request) -> web.Response:
        memories = [{"content": " "}, {"when_to_use": "x"}, "text", {"content": "say 3"}]
        return web.json_response({"metadata": {"memory_list": memories}})

    async with reme_server(retrieve=respond) as (_, url), client(url) as reme:
        first, *others = await reme.search("o", "guess", 9)
        assert not others and first.text == "say 3" and first.lesson_id
