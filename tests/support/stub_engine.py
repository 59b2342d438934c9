"""A fake engine, shipped: for tests, simulation and the measurement of what an actor itself costs.

:class:`StubEngine` has the client's interface in this process; :class:`StubServer` serves vLLM's routes on a free
loopback port, so that the real client can be tested against good, slow and hostile answers.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from typing import Any

import anyio
import numpy as np
import orjson
from aiohttp import web

from actors.engine.base import EngineReport, Generation, Heard, Sampling
from pipeline.errors import EngineGone, EngineRefused
from pipeline.schema import FinishReason, VersionSpan

Script = Callable[[Sequence[int], Sampling], Sequence[int]]
"""From prompt ids and sampling to completion ids (with the stop token, if one is to be sampled)."""


def cycling(vocabulary: int, length: int, end_id: int | None) -> Script:
    """Completions of ``length`` tokens that depend only on the prompt's length; the last is ``end_id`` where given."""

    def script(token_ids: Sequence[int], sampling: Sampling) -> Sequence[int]:
        n = min(length, sampling.max_tokens)
        ids = [(len(token_ids) * 31 + i * 7) % vocabulary for i in range(n)]
        if end_id is not None and n == length:
            ids[-1] = end_id
        return ids

    return script


class StubEngine:
    """Answers after ``latency_seconds`` with what ``script`` says. ``alive``, ``version`` and ``fault`` may be
    changed at any time."""

    def __init__(
        self,
        name: str = "stub://0",
        *,
        script: Script | None = None,
        latency_seconds: float = 0.0,
        version: int | None = 0,
    ) -> None:
        self._name = name
        self._script = script or cycling(32, 4, None)
        self.latency_seconds = latency_seconds
        self.version = version
        self.alive = True
        self.sleeping = False
        """Requests are kept until :meth:`wake`."""
        self.awake = anyio.Event()
        self.fault: Exception | None = None
        """Raised by the next requests instead of an answer."""
        self.requests: list[tuple[str, tuple[int, ...]]] = []
        """(session id, prompt ids) of each request."""
        self._rest: dict[tuple[int, ...], Sequence[int]] = {}
        """Rest of a completion that was cut, by the prompt that continues it."""
        self.reported: EngineReport | None = None
        """Its report of load."""
        self.keep_requests = True
        self.closed = False
        self.n_requests = 0
        self.in_flight = 0
        self.in_flight_max = 0

    @property
    def name(self) -> str:
        return self._name

    async def generate(
        self,
        token_ids: Sequence[int],
        sampling: Sampling,
        *,
        session_id: str = "",
        cache_salt: str = "",
        heard: Heard | None = None,
    ) -> Generation:
        self.n_requests += 1
        if self.keep_requests:
            self.requests.append((session_id, tuple(token_ids)))
        self.in_flight += 1
        self.in_flight_max = max(self.in_flight_max, self.in_flight)
        first = self.version
        try:
            await anyio.sleep(self.latency_seconds)
            while self.sleeping:
                await self.awake.wait()
        finally:
            self.in_flight -= 1
        if not self.alive:
            raise EngineGone(f"engine {self._name} is dead")
        if self.fault is not None:
            raise self.fault
        if first is None or self.version is None:
            raise EngineGone(f"engine {self._name} has weights without a version stamp")
        ids = np.asarray(self._said(token_ids, sampling), dtype=np.int32)
        stopped = len(ids) > 0 and int(ids[-1]) in sampling.stop_token_ids
        logprobs = np.linspace(-2.0, -0.1, len(ids), dtype=np.float32)
        if heard is not None:
            for at in range(len(ids)):
                heard(ids[at : at + 1], logprobs[at : at + 1])
                await self.between(at + 1)
            if not self.alive:
                raise EngineGone(f"engine {self._name} died in a request")
        return Generation(
            ids, logprobs, _halves(len(ids), first, self.version), FinishReason.STOP if stopped else FinishReason.LENGTH
        )

    def _said(self, token_ids: Sequence[int], sampling: Sampling) -> Sequence[int]:
        """The completion that the script says, or the rest of it where the prompt ends with the part before."""
        rest = self._rest.pop(tuple(token_ids), None) if self._rest else None
        said = self._script(token_ids, sampling) if rest is None else rest
        if len(said) > sampling.max_tokens:
            said, rest = said[: sampling.max_tokens], said[sampling.max_tokens :]
            self._rest[(*token_ids, *said)] = rest
        return said

    async def between(self, n_heard: int) -> None:
        """Called after each token of a request that is heard."""
        await anyio.lowlevel.checkpoint()

    async def weight_version(self) -> int | None:
        await self.health()
        return self.version

    async def health(self) -> None:
        await anyio.lowlevel.checkpoint()
        if not self.alive:
            raise EngineGone(f"engine {self._name} is dead")

    def wake(self) -> None:
        self.sleeping = False
        awake, self.awake = self.awake, anyio.Event()
        awake.set()

    async def is_sleeping(self) -> bool:
        await self.health()
        return self.sleeping

    async def report(self) -> EngineReport | None:
        return self.reported

    async def close(self) -> None:
        self.closed = True


class RefusingEngine(StubEngine):
    """Says that every request is wrong."""

    async def generate(self, token_ids: Sequence[int], sampling: Sampling, **more: Any) -> Generation:
        raise EngineRefused(f"engine {self.name} refused the request (HTTP 400): too long")


Answer = Callable[[dict[str, Any]], Any]
"""From the request's JSON to a JSON value, to bytes sent as they are, or to a ``web.Response``; may be async."""


def good_answer(body: dict[str, Any], *, version: str = "0", end_id: int | None = None) -> dict[str, Any]:
    """An answer of ``/inference/v1/generate`` with random tokens below 32."""
    n = int(body["sampling_params"]["max_tokens"])
    ids = [random.randrange(3, 32) for _ in range(n)]
    if end_id is not None:
        ids[-1] = end_id
    return {
        "choices": [
            {
                "index": 0,
                "token_ids": ids,
                "logprobs": {"content": [{"token_id": i, "logprob": -0.5, "rank": 1, "top_logprobs": []} for i in ids]},
                "finish_reason": "length" if end_id is None else "stop",
                "weight_versions": [{"version": version, "start": 0, "end": n}],
            }
        ]
    }


class StubServer:
    """vLLM's routes on loopback. ``async with StubServer() as server: server.url``."""

    def __init__(
        self,
        answer: Answer = good_answer,
        *,
        version: str = "0",
        has_generate: bool = True,
        keep_bodies: bool = True,
    ) -> None:
        self.answer = answer
        self.version = version
        self.healthy = True
        self.sleeping = False
        self.awake = anyio.Event()
        """Set when it wakes: then it answers what was asked while it slept."""
        self.has_generate = has_generate
        self.url = ""
        self.bodies: list[dict[str, Any]] = []
        self.keep_bodies = keep_bodies
        self.metrics_text = ""
        self.models: dict[str, Any] | None = None
        """Answer of ``/v1/models``; None: there is no such route."""
        self._stack = AsyncExitStack()

    async def __aenter__(self) -> StubServer:
        app = web.Application()
        if self.has_generate:
            app.router.add_post("/inference/v1/generate", self._generate)
        app.router.add_get("/weight_info", self._weight_info)
        app.router.add_get("/health", self._health)
        app.router.add_post("/sleep", self._sleep)
        app.router.add_post("/wake_up", self._wake_up)
        app.router.add_get("/is_sleeping", self._is_sleeping)
        app.router.add_get("/metrics", self._metrics)
        app.router.add_get("/v1/models", self._models)
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        self._stack.push_async_callback(runner.cleanup)
        site = web.TCPSite(runner, "127.0.0.1", 0, backlog=4096)
        await site.start()
        self.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        return self

    async def __aexit__(self, *args: object) -> None:
        await self._stack.aclose()

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        body = orjson.loads(await request.read())
        if self.keep_bodies:
            self.bodies.append(body)
        while self.sleeping:
            await self.awake.wait()
        value = self.answer(body)
        if hasattr(value, "__await__"):
            value = await value
        if isinstance(value, web.StreamResponse):
            return value
        return web.Response(
            body=value if isinstance(value, bytes) else orjson.dumps(value), content_type="application/json"
        )

    async def _weight_info(self, request: web.Request) -> web.Response:
        return web.json_response({"weight_version": self.version})

    async def _health(self, request: web.Request) -> web.Response:
        return web.Response(status=200 if self.healthy else 503)

    async def _sleep(self, request: web.Request) -> web.Response:
        self.sleeping, self.awake = True, anyio.Event()
        return web.json_response({"status": "sleeping", "level": int(request.query.get("level", "1"))})

    async def _wake_up(self, request: web.Request) -> web.Response:
        """The weights are always there: with them alone it sleeps on, as vLLM does."""
        tags = request.query.getall("tags", [])
        if not tags or "kv_cache" in tags:
            self.sleeping = False
            self.awake.set()
        return web.json_response({"status": "sleeping" if self.sleeping else "awake", "tags": tags or None})

    async def _is_sleeping(self, request: web.Request) -> web.Response:
        return web.json_response({"is_sleeping": self.sleeping})

    async def _metrics(self, request: web.Request) -> web.Response:
        return web.Response(text=self.metrics_text)

    async def _models(self, request: web.Request) -> web.Response:
        return web.Response(status=404) if self.models is None else web.json_response(self.models)


def _halves(n: int, first: int, last: int) -> tuple[VersionSpan, ...]:
    """Spans of a request during which the version may have changed."""
    middle = n // 2
    if first == last or middle == 0:
        return (VersionSpan(0, n, last),) if n else ()
    return (VersionSpan(0, middle, first), VersionSpan(middle, n, last))
