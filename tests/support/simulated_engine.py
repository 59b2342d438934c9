"""Inference engines in memory, below HTTP: what vLLM's routes do, in virtual time, with faults.

An engine samples one token after another. Each token *is* the weights that it was sampled with (:func:`token_of`), and
its label is the stamp at that moment, so an auditor sees whether labels are true. ``/pause`` keeps requests without
sampling. A load is not atomic: until it ends the weights are those of no version, and one that failed half-way makes
the next fail until ``abandon_update``. Control requests run one after another, to their end, whether or not their
client still waits; ``/update_weight_version`` and ``/weight_info`` belong to the server in front and do not wait.
A restarted engine has the initial weights and vLLM's label ``default``.

:class:`EngineFleet` gives clients an ``aiohttp.ClientSession`` to these engines. :data:`PROCESS` names the process
that a session belongs to; connections can be cut by process.
"""

from __future__ import annotations

import random
from collections import Counter, defaultdict, deque
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from contextlib import asynccontextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import anyio
import orjson

from actors.servers.authorization import LearnerFence
from pipeline.runtime.engine_keys import LEARNER_HEADER
from pipeline.runtime.weights import UNSTAMPED, WITHDRAWN

PROCESS: ContextVar[str] = ContextVar("simulated_process", default="")
INITIAL, HALF_LOADED = 0, 1
"""Weights of the model folder, and those of a load that has begun and not ended."""
FIRST_TOKEN = 10
WEIGHTS_FILE = "weights"
"""File of a weight folder: the number of its weights."""
GENERATE, RELOAD = "/inference/v1/generate", "/collective_rpc"
CONTROL = ("/pause", "/resume", RELOAD, "/update_weight_version")
BUSY = ("429", "503")
OUTAGE_SECONDS, CUT_SECONDS = 2.0, 11.0
"""After an outage ends, for so long it may be the reason for which an actor avoids the engine: until its next probe,
which may wait for 10 s where the connection was cut."""


def token_of(weights: int) -> int:
    return FIRST_TOKEN + weights


def weights_of(token: int) -> int:
    return token - FIRST_TOKEN


def probe_logprob(weights: int) -> float:
    """Log-probability of each token of the probe under these weights: others differ by a nat."""
    return -1.0 - weights


@dataclass(eq=False)
class _Exchange:
    """A control request in the engine, until it is answered or the engine dies."""

    done: anyio.Event = field(default_factory=anyio.Event)
    status: int = 200
    answer: Mapping[str, Any] = field(default_factory=dict)
    error: Exception | None = None

    def end(self, status: int = 200, answer: Mapping[str, Any] | None = None, error: Exception | None = None) -> None:
        if not self.done.is_set():
            self.status, self.answer, self.error = status, answer or {}, error
            self.done.set()


class SimulatedEngine:
    """One engine at ``url``. It starts dead; :meth:`boot` it."""

    def __init__(self, url: str, rng: random.Random, start: Callable[..., None]) -> None:
        """``start``: begins a task that outlives the client's request."""
        self.url = url
        self.up = False
        self.paused = False
        self.label = UNSTAMPED
        self.weights = INITIAL
        self.unfinished = False
        """A load failed half-way and was not abandoned."""
        self.faults: defaultdict[str, deque[str]] = defaultdict(deque)
        """Faults of the next control requests, by path: ``500`` before anything happens, ``lost`` after it happened,
        ``hang``, ``late``; of a load also ``half``."""
        self.failing: tuple[str, float] | None = None
        """Answer of requests for tokens, and its probability."""
        self.failing_left = 0.0
        """Requests that may still be answered so."""
        self.cut_from: set[str] = set()
        """Roles whose connections are cut; nothing arrives, and nobody notices."""
        self.stopped = False
        """As after SIGSTOP: what was asked is answered once it continues."""
        self.failed: Counter[str] = Counter()
        """Requests for tokens that did not succeed, by process. To have too much to do is no failure."""
        self.outages: list[list[float]] = []
        """Times in which requests could not succeed, as begin and end; infinite while it lasts."""
        self.loads = 0
        self.loading = 0
        """Requests to load that are under way, also those that come late."""
        self._rng = rng
        self._start = start
        self._changed = anyio.Event()
        self._control = anyio.Lock()
        self._exchanges: set[_Exchange] = set()
        self.boots = 0
        self.fence = LearnerFence(anyio.current_time)
        self._begin_outage()

    def boot(self) -> None:
        self.up, self.paused, self.unfinished = True, False, False
        self.label, self.weights = UNSTAMPED, INITIAL
        self.boots += 1
        self.fence = LearnerFence(anyio.current_time)
        self._control = anyio.Lock()

    def die(self) -> None:
        """As ``kill -9``."""
        self.up = self.stopped = False
        self.boots += 1
        self._begin_outage()
        for exchange in self._exchanges:
            exchange.end(error=_disconnected())
        self._exchanges.clear()
        self._notify()

    def cut(self, roles: set[str]) -> None:
        self.cut_from |= roles
        self._begin_outage()

    def reconnect(self) -> None:
        if self.cut_from:
            self.cut_from.clear()
            self._end_outage(CUT_SECONDS)

    def stop(self) -> None:
        self.stopped = True
        self._begin_outage()

    def proceed(self) -> None:
        """As SIGCONT."""
        if self.stopped:
            self.stopped = False
            self._end_outage(CUT_SECONDS)
            self._notify()

    async def running(self) -> None:
        """Return once it is not stopped."""
        while self.stopped:
            await self._changed.wait()

    def mend(self) -> None:
        """All connections work again, and no fault is left."""
        self.failing = None
        self.faults.clear()
        self.reconnect()
        self.proceed()

    def troubled(self, now: float) -> bool:
        """True if a reason to avoid it was there not long ago."""
        return any(end + OUTAGE_SECONDS >= now for _, end in self.outages)

    def _begin_outage(self) -> None:
        if not self.outages or self.outages[-1][1] != float("inf"):
            self.outages.append([anyio.current_time(), float("inf")])

    def _end_outage(self, later: float = 0.0) -> None:
        if self.outages[-1][1] == float("inf") and not (self.cut_from or self.stopped) and self.up and self.stamped:
            self.outages[-1][1] = anyio.current_time() + later

    @property
    def stamped(self) -> bool:
        """True if its weights are labelled with a version."""
        return self.label not in (UNSTAMPED, WITHDRAWN)

    def _notify(self) -> None:
        changed, self._changed = self._changed, anyio.Event()
        changed.set()

    async def serve(
        self, client: str, method: str, path: str, body: Mapping[str, Any], learners: Iterable[str] = ()
    ) -> tuple[int, Any]:
        """Status and JSON of the answer. ``learners``: see :class:`LearnerFence`."""
        if not (self.answers(client) and self.up):
            self.failed[client] += path == GENERATE
        if not self.answers(client):
            await anyio.sleep_forever()
        if not self.up:
            raise _refused(self.url)
        if path == GENERATE:
            status, answer = await self._generate(client, body)
        elif method == "GET":
            status, answer = self.look(path, learners)
        else:
            status, answer = await self._controlled(path, body, learners)
        if not self.answers(client):
            await anyio.sleep_forever()
        return status, answer

    def answers(self, client: str) -> bool:
        """False while the connection of a process is cut."""
        return not self.cut_from or client.partition("#")[0] not in self.cut_from

    def serves(self, client: str) -> bool:
        """True if it can answer requests for tokens of a process."""
        return self.up and self.stamped and not self.stopped and self.answers(client)

    def look(self, path: str, learners: Iterable[str] = ()) -> tuple[int, Any]:
        """Answer a GET."""
        if not self.up:
            raise _refused(self.url)
        refusal = self.fence.refusal(learners)
        if refusal is not None:
            return refusal[0], {"error": {"message": refusal[1]}}
        match path:
            case "/weight_info":
                return 200, {"weight_version": self.label}
            case "/is_paused":
                return 200, {"is_paused": self.paused}
            case "/health":
                return 200, {}
        return 404, {"error": {"message": "not found"}}

    async def _controlled(self, path: str, body: Mapping[str, Any], learners: Iterable[str]) -> tuple[int, Any]:
        exchange = _Exchange()
        self._exchanges.add(exchange)
        self._start(self._control_request, path, body, learners, exchange)
        await exchange.done.wait()
        if exchange.error is not None:
            raise exchange.error
        return exchange.status, exchange.answer

    async def _control_request(
        self, path: str, body: Mapping[str, Any], learners: Iterable[str], exchange: _Exchange
    ) -> None:
        faults = self.faults[path.partition("?")[0]]
        fault = faults.popleft() if faults else ""
        await self.running()
        if fault == "hang":
            return
        self.loading += body.get("method") == "reload_weights"
        try:
            await self._obey(path, body, learners, exchange, fault)
        finally:
            self.loading -= body.get("method") == "reload_weights"

    async def _obey(
        self, path: str, body: Mapping[str, Any], learners: Iterable[str], exchange: _Exchange, fault: str
    ) -> None:
        boots = self.boots
        if fault == "late":
            await anyio.sleep(self._rng.uniform(0.5, 6.0))
            if boots != self.boots:
                return  # it went to a process that is gone
        if (refusal := self.fence.refusal(learners)) is not None:
            exchange.end(refusal[0], {"error": {"message": refusal[1]}})
            return
        if fault == "500":
            exchange.end(500, {"error": {"message": "injected"}})
            return
        if path == "/update_weight_version":
            before, self.label = self.label, body["new_version"]
            if not self.stamped or _version(self.label) < _version(before):
                self._begin_outage()
            self._end_outage()
            result: tuple[int, Any] = (200, {"success": True})
        else:
            async with self._control:
                if boots != self.boots:
                    return
                result = await self._engine_call(path, body, fault)
        self._exchanges.discard(exchange)
        if fault == "lost":
            exchange.end(error=_disconnected())
        else:
            exchange.end(*result)

    async def _engine_call(self, path: str, body: Mapping[str, Any], fault: str) -> tuple[int, Any]:
        match path, body.get("method"):
            case "/pause?mode=keep", _:
                self.paused = True
            case "/resume", _:
                self.paused = False
                self._notify()
            case "/collective_rpc", "reload_weights":
                return await self._load(Path(body["kwargs"]["weights_path"]), fault)
            case "/collective_rpc", "abandon_update":
                self.unfinished = False
            case "/afterplay/end", _:
                self.die()
                self._start(self._boot_soon)
            case _:
                return 404, {"error": {"message": f"{path} is not simulated"}}
        return 200, {"status": "ok"}

    async def _load(self, folder: Path, fault: str) -> tuple[int, Any]:
        boots = self.boots
        if self.unfinished:
            return 500, {"error": {"message": "a weight update is active"}}
        self.weights = HALF_LOADED
        await anyio.sleep(self._rng.uniform(0.01, 0.2))
        if boots != self.boots:
            return 500, {}
        if fault == "half":
            self.unfinished = True
            return 500, {"error": {"message": "injected in the middle of a load"}}
        try:
            weights = INITIAL if folder.name == "model" else int((folder / WEIGHTS_FILE).read_text())
        except (OSError, ValueError) as error:
            self.unfinished = True
            return 500, {"error": {"message": str(error)}}
        await anyio.sleep(self._rng.uniform(0.01, 0.2))
        if boots == self.boots:
            self.weights = weights
            self.loads += 1
        return 200, {"results": [None]}

    async def _boot_soon(self) -> None:
        boots = self.boots
        await anyio.sleep(self._rng.uniform(0.5, 3.0))
        if boots == self.boots:
            self.boot()

    async def _generate(self, client: str, body: Mapping[str, Any]) -> tuple[int, Any]:
        """Sampling ends with its client's interest."""
        if self.failing is not None and self.failing_left > 0 and self._rng.random() < self.failing[1]:
            answer, self.failing_left = self.failing[0], self.failing_left - 1
            self.failed[client] += answer not in BUSY
            if answer == "late":
                await anyio.sleep_forever()
            await anyio.sleep(0.01)
            return int(answer), {"error": {"message": "injected"}}
        boots, parameters = self.boots, body["sampling_params"]
        tokens: list[int] = []
        labels: list[str] = []
        try:
            for _ in range(parameters["max_tokens"]):
                await anyio.sleep(self._rng.uniform(0.02, 0.3))
                while (self.paused or self.stopped) and boots == self.boots:
                    await self._changed.wait()
                if boots != self.boots:
                    raise _disconnected()
                tokens.append(token_of(self.weights))
                labels.append(self.label)
        except BaseException:
            self.failed[client] += 1
            raise
        result = _completion(tokens, labels)
        if parameters.get("prompt_logprobs") is not None:
            score = {"logprob": probe_logprob(self.weights)}
            result["prompt_logprobs"] = [None, *({str(token): score} for token in body["token_ids"][1:])]
        return 200, result


def _version(label: str) -> int:
    """-1 for weights without one. A learner that was replaced may give an engine an older one."""
    number = label.rpartition("/")[2]
    return int(number) if number.isdecimal() else -1


def _completion(tokens: list[int], labels: list[str]) -> dict[str, Any]:
    spans: list[dict[str, Any]] = []
    for at, label in enumerate(labels):
        if spans and spans[-1]["version"] == label:
            spans[-1]["end"] = at + 1
        else:
            spans.append({"version": label, "start": at, "end": at + 1})
    content = [{"token_id": token, "logprob": -0.5} for token in tokens]
    choice = {"index": 0, "token_ids": tokens, "logprobs": {"content": content}, "finish_reason": "length"}
    return {"choices": [{**choice, "weight_versions": spans}]}


SEEN_SECONDS = 0.5
"""Time after which a change of the addresses is seen."""


class EngineFleet:
    """The engines of a run, the sessions that reach them, and in place of
    :class:`pipeline.runtime.engine_addresses.EngineAddresses` their addresses."""

    def __init__(self, urls: list[str], rng: random.Random, start: Callable[..., None]) -> None:
        self.engines = {url: SimulatedEngine(url, rng, start) for url in urls}
        """Also those that have left."""
        self.fixed = tuple(urls)
        """Engines of the run now."""
        self._changed = anyio.Event()
        self.held: dict[str, float] = {}
        """Processes that are stopped, and until when."""

    @property
    def members(self) -> list[SimulatedEngine]:
        return [self.engines[url] for url in self.fixed]

    def join(self, engine: SimulatedEngine) -> None:
        """Another engine announces itself."""
        self.engines[engine.url] = engine
        self._change((*self.fixed, engine.url))

    def leave(self, engine: SimulatedEngine) -> None:
        """The engine withdraws; it serves on until it dies."""
        self._change(tuple(url for url in self.fixed if url != engine.url))

    def _change(self, urls: tuple[str, ...]) -> None:
        self.fixed = urls
        changed, self._changed = self._changed, anyio.Event()
        changed.set()

    async def follow(self, changed: Callable[[tuple[str, ...]], None]) -> None:
        """Tell the addresses whenever they change."""
        while True:
            changed(self.fixed)
            await self._changed.wait()
            await anyio.sleep(SEEN_SECONDS)

    def session(self, **_: Any) -> MemorySession:
        """In place of ``aiohttp.ClientSession``."""
        return MemorySession(self, PROCESS.get())


@dataclass(slots=True)
class _Response:
    status: int
    body: bytes
    headers: Mapping[str, str] = field(default_factory=dict)

    @property
    def content_length(self) -> int:
        return len(self.body)

    async def read(self) -> bytes:
        return self.body


class MemorySession:
    """Requests of one process to the engines of a fleet."""

    def __init__(self, fleet: EngineFleet, process: str) -> None:
        self._fleet = fleet
        self._process = process

    @asynccontextmanager
    async def request(
        self, method: str, url: str, *, timeout: aiohttp.ClientTimeout, data: bytes | None = None, json: Any = None,
        headers: Mapping[str, str] | None = None, **_: Any,
    ) -> AsyncIterator[_Response]:  # fmt: skip
        scheme, _, address = url.partition("://")
        host, slash, path = address.partition("/")
        engine = self._fleet.engines[f"{scheme}://{host}"]
        body = json if json is not None else orjson.loads(data) if data else {}
        learners = [(headers or {})[LEARNER_HEADER]] if LEARNER_HEADER in (headers or {}) else []
        held = self._fleet.held.get(self._process, 0.0) > anyio.current_time()
        if method == "GET" and not (held or engine.stopped) and engine.answers(self._process):
            status, answer = engine.look(slash + path, learners)
        else:
            with anyio.fail_after(timeout.total):
                await anyio.sleep_until(self._fleet.held.get(self._process, 0.0))
                if method == "GET":
                    await engine.running()
                status, answer = await engine.serve(self._process, method, slash + path, body, learners)
        yield _Response(status, orjson.dumps(answer))

    async def close(self) -> None:
        pass


def _refused(url: str) -> aiohttp.ClientConnectorError:
    parts = urlsplit(url)
    key = aiohttp.client_reqrep.ConnectionKey(parts.hostname or "", parts.port, False, True, None, None, None)
    return aiohttp.ClientConnectorError(key, ConnectionRefusedError(111, "refused"))


def _disconnected() -> aiohttp.ServerDisconnectedError:
    return aiohttp.ServerDisconnectedError()
