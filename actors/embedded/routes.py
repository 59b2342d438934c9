"""The HTTP routes of the embedded engine, with vLLM's paths, bodies and metric names, so that one client
and one dashboard fit either engine.

``POST /v1/chat/completions`` is for people who talk to the policy of a run. Actors send token ids instead
(:mod:`actors.embedded.requests`).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import orjson
from aiohttp import web

from actors.embedded.experts import encoded
from actors.embedded.generator import GeneratedTokens, Generator
from actors.embedded.requests import EngineRequest
from actors.rendering.renderer import Renderer
from actors.rendering.tokenizer import load_tokenizer
from actors.servers.authorization import OPEN, RouteAuthorization
from actors.servers.connections import Handler, errors_as_json, json_answer
from actors.servers.refusal import Refusal, read_object
from pipeline.errors import DeltaMismatch, PlugInError
from pipeline.runtime.engine_keys import LEARNER_HEADER
from pipeline.schema import Message

_SAMPLING = {"max_tokens": "max_tokens", "max_completion_tokens": "max_tokens", "temperature": "temperature"}

_NEUTRAL: Mapping[str, tuple[Any, ...]] = {"n": (1, None), "stream": (False, None), "top_p": (1, None)}

_IGNORED = frozenset({"model", "messages", "user", "metadata", "store"})


class Chat:
    """Messages to a generate request, and its tokens back to a message. ``folder`` is the model's."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    @cached_property
    def _renderer(self) -> Renderer:
        return Renderer(*load_tokenizer(self._folder))

    def generate_body(self, body: Mapping[str, Any]) -> bytes:
        """The same request to ``/inference/v1/generate``. Raises :class:`Refusal` (400)."""
        for name, value in body.items():
            if name not in _SAMPLING and name not in _IGNORED and value not in _NEUTRAL.get(name, (None,)):
                raise Refusal(400, f"{name}: the embedded engine answers messages with text, without this option")
        messages = body.get("messages")
        if not isinstance(messages, list) or not messages:
            raise Refusal(400, "expected messages to be a list of at least one message")
        try:
            prompt = self._renderer.start([_message(message) for message in messages]).prompt_ids
        except PlugInError as error:
            raise Refusal(400, f"the chat template refused the messages: {error.message}") from error
        sampling = {_SAMPLING[name]: value for name, value in body.items() if name in _SAMPLING and value is not None}
        limit = {"max_tokens": 2**31, "stop_token_ids": list(self._renderer.end_ids)}
        request = {"model": body.get("model"), "token_ids": list(prompt), "sampling_params": {**limit, **sampling}}
        return orjson.dumps(request)

    def answer(self, model: str, request: EngineRequest, completion: GeneratedTokens) -> dict[str, Any]:
        """Body of the answer."""
        message = {"role": "assistant", "content": self._renderer.completed(completion.token_ids).text}
        prompt, sampled = len(request.token_ids), len(completion.token_ids)
        return {
            "id": f"chatcmpl-{request.request_id}",
            "object": "chat.completion",
            "created": int(time.time()),
            "model": model,
            "choices": [{"index": 0, "message": message, "finish_reason": completion.finish_reason, "logprobs": None}],
            "usage": {"prompt_tokens": prompt, "completion_tokens": sampled, "total_tokens": prompt + sampled},
        }


def _message(value: Any) -> Message:
    role, content = (value.get("role"), value.get("content")) if isinstance(value, Mapping) else (None, None)
    if role not in ("system", "user", "assistant", "tool") or not isinstance(content, str):
        raise Refusal(400, f"messages: expected a role and a text as content, got {value!r}")
    return Message(role, content)


_HELP = {
    "num_requests_running": "Requests in the current batch.",
    "num_requests_waiting": "Requests that wait for a slot in the batch.",
    "kv_cache_usage_perc": "Share of the KV cache in use, 0 to 1.",
    "prompt_tokens_total": "Prompt tokens of finished requests.",
    "generation_tokens_total": "Sampled tokens.",
    "prefix_cache_queries_total": "Prompt tokens looked up in the prefix cache.",
    "prefix_cache_hits_total": "Prompt tokens found in the prefix cache.",
}


def exposition(model: str, values: Mapping[str, float], finished: Mapping[str, int]) -> str:
    """Text format 0.0.4."""
    labels = f'engine="0",model_name="{model}"'
    lines = []
    for name, value in values.items():
        kind = "counter" if name.endswith("_total") else "gauge"
        lines += [f"# HELP vllm:{name} {_HELP[name]}", f"# TYPE vllm:{name} {kind}", f"vllm:{name}{{{labels}}} {value}"]
    lines += ["# HELP vllm:request_success_total Finished requests.", "# TYPE vllm:request_success_total counter"]
    lines += [
        f'vllm:request_success_total{{{labels},finished_reason="{reason}"}} {count}'
        for reason, count in finished.items()
    ]
    return "\n".join(lines) + "\n"


BODY_BYTES_MAX = 64 * 2**20


def application(generator: Generator, authorization: RouteAuthorization | None = None) -> web.Application:
    """Routes over ``generator``, behind ``authorization``."""
    guards: list[Any] = [] if authorization is None else [_guard(authorization)]
    app = web.Application(middlewares=[errors_as_json(), *guards], client_max_size=BODY_BYTES_MAX)
    routes = Routes(generator)
    app.router.add_post("/inference/v1/generate", routes.generate)
    app.router.add_post("/v1/chat/completions", routes.chat)
    app.router.add_post("/pause", routes.pause)
    app.router.add_post("/resume", routes.resume)
    app.router.add_get("/is_paused", routes.is_paused)
    app.router.add_post("/sleep", routes.sleep)
    app.router.add_post("/wake_up", routes.wake_up)
    app.router.add_get("/is_sleeping", routes.is_sleeping)
    app.router.add_post("/collective_rpc", routes.collective_rpc)
    app.router.add_post("/update_weight_version", routes.update_weight_version)
    app.router.add_get("/weight_info", routes.weight_info)
    app.router.add_get("/health", routes.health)
    app.router.add_get("/metrics", routes.metrics)
    app.router.add_get("/v1/models", routes.models)
    return app


class Routes:
    """Handlers; each checks its input and leaves the work to the generator."""

    def __init__(self, generator: Generator) -> None:
        self._generator = generator
        self._chat = Chat(generator.options.model)

    async def generate(self, request: web.Request) -> web.StreamResponse:
        parsed = self._generator.bounds.parse(await request.read())
        if parsed.stream:
            return await self._stream(request, parsed)
        completion = await self._generator.generate(parsed)
        answer = _generate_body(parsed, completion)
        if parsed.prompt_logprobs:
            scores = zip(parsed.token_ids[1:], await self._generator.score(parsed.token_ids), strict=True)
            answer["prompt_logprobs"] = [None, *({str(token): {"logprob": score}} for token, score in scores)]
        return json_answer(answer)

    async def _stream(self, request: web.Request, parsed: EngineRequest) -> web.StreamResponse:
        """The completion as server-sent events; versions and experts of all tokens come with the last ones."""
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8"})
        heard: asyncio.Queue[tuple[list[int], list[float]] | None] = asyncio.Queue()
        sampling = asyncio.ensure_future(self._generator.generate(parsed, lambda *tokens: heard.put_nowait(tokens)))
        sampling.add_done_callback(lambda _: heard.put_nowait(None))
        n_written = 0

        async def write(value: Any) -> None:
            if not response.prepared:
                await response.prepare(request)
            await response.write(b"data: " + (value if isinstance(value, bytes) else orjson.dumps(value)) + b"\n\n")

        try:
            while (tokens := await heard.get()) is not None:
                await write(_generate_body(parsed, GeneratedTokens(*tokens), n_written))
                n_written = len(tokens[0])
            await write(_generate_body(parsed, await sampling, n_written))
        except Refusal as refusal:
            if not response.prepared:
                raise
            await write(refusal.body())
        finally:
            sampling.cancel()
        await write(b"[DONE]")
        await response.write_eof()
        return response

    async def chat(self, request: web.Request) -> web.Response:
        parsed = self._generator.bounds.parse(self._chat.generate_body(read_object(await request.read())))
        completion = await self._generator.generate(parsed)
        return json_answer(self._chat.answer(self._generator.options.served_name, parsed, completion))

    async def pause(self, request: web.Request) -> web.Response:
        mode = request.query.get("mode", "abort")
        if mode != "keep":
            raise Refusal(400, f"pause?mode={mode}: the embedded engine supports mode=keep")
        await self._generator.pause()
        return json_answer({"status": "paused"})

    async def resume(self, request: web.Request) -> web.Response:
        await self._generator.resume()
        return json_answer({"status": "resumed"})

    async def is_paused(self, request: web.Request) -> web.Response:
        return json_answer({"is_paused": self._generator.paused})

    async def sleep(self, request: web.Request) -> web.Response:
        level, mode = request.query.get("level", "1"), request.query.get("mode", "abort")
        if level not in ("1", "2") or mode != "keep":
            raise Refusal(
                400, f"sleep?level={level}&mode={mode}: the embedded engine supports levels 1, 2 and mode=keep"
            )
        await self._generator.sleep(int(level))
        return json_answer({"status": "sleeping", "level": int(level)})

    async def wake_up(self, request: web.Request) -> web.Response:
        tags = request.query.getall("tags", [])
        awake = await self._generator.wake_up(*([tags] if tags else []))
        return json_answer({"status": "awake" if awake else "sleeping", "tags": tags or None})

    async def is_sleeping(self, request: web.Request) -> web.Response:
        return json_answer({"is_sleeping": self._generator.sleeping})

    async def collective_rpc(self, request: web.Request) -> web.Response:
        body = read_object(await request.read())
        method, kwargs = body.get("method"), body.get("kwargs")
        arguments = kwargs if isinstance(kwargs, dict) else {}
        if method == "reload_weights":
            path = arguments.get("weights_path")
            if not isinstance(path, str):
                raise Refusal(400, "reload_weights: expected kwargs.weights_path, a folder with *.safetensors")
            await self._generator.reload(Path(path))
            return json_answer({"results": [None]})
        if method == "load_deltas":
            files = arguments.get("files")
            if not isinstance(files, list) or not files or not all(isinstance(file, str) for file in files):
                raise Refusal(400, "load_deltas: expected kwargs.files, a list of weight deltas")
            try:
                await self._generator.load_deltas([Path(file) for file in files])
            except DeltaMismatch as error:
                return json_answer({"results": [{"refused": str(error)}]})
            return json_answer({"results": [None]})
        raise Refusal(400, f"method {method!r}: the embedded engine knows 'reload_weights' and 'load_deltas'")

    async def update_weight_version(self, request: web.Request) -> web.Response:
        version = read_object(await request.read()).get("new_version")
        if not isinstance(version, str) or not version:
            raise Refusal(400, f"expected new_version to be a non-empty string, got {version!r}")
        await self._generator.stamp(version)
        return json_answer({"success": True, "new_version": version})

    async def weight_info(self, request: web.Request) -> web.Response:
        return json_answer({"weight_version": self._generator.versions.current})

    async def health(self, request: web.Request) -> web.Response:
        if not self._generator.alive:
            raise Refusal(503, "the sampling thread has ended")
        reason = self._generator.progress.reason()
        return web.Response() if reason is None else json_answer(reason, 503)

    async def metrics(self, request: web.Request) -> web.Response:
        generator = self._generator
        text = exposition(generator.options.served_name, generator.statistics(), generator.finished)
        text += generator.progress.exposition()
        return web.Response(body=text.encode(), headers={"Content-Type": "text/plain; version=0.0.4; charset=utf-8"})

    async def models(self, request: web.Request) -> web.Response:
        options = self._generator.options
        card = {"id": options.served_name, "object": "model", "owned_by": "afterplay", "root": str(options.model)}
        return json_answer({"object": "list", "data": [{**card, "max_model_len": options.max_length}]})


def _guard(authorization: RouteAuthorization) -> Callable[[web.Request, Handler], Awaitable[web.StreamResponse]]:
    @web.middleware
    async def guard(request: web.Request, handler: Handler) -> web.StreamResponse:
        authorizations, learners = (request.headers.getall(name, []) for name in ("Authorization", LEARNER_HEADER))
        refusal = authorization.refusal(request.path, authorizations, learners)
        if refusal is not None:
            raise Refusal(*refusal)
        answer = await handler(request)
        if request.path in OPEN:
            answer.force_close()
        return answer

    return guard


def _generate_body(request: EngineRequest, completion: GeneratedTokens, start: int = 0) -> dict[str, Any]:
    """The tokens from ``start`` on, with the versions and experts of all."""
    token_ids, logprobs = completion.token_ids[start:], None
    if request.logprobs:
        pairs = zip(token_ids, completion.logprobs[start:], strict=True)
        logprobs = {"content": [{"token_id": token, "logprob": logprob} for token, logprob in pairs]}
    choice = {
        "index": 0,
        "token_ids": token_ids,
        "logprobs": logprobs,
        "finish_reason": completion.finish_reason,
        "stop_reason": completion.stop_reason,
        "weight_versions": completion.spans,
    }
    if completion.experts is not None:
        choice["routed_experts"] = encoded(completion.experts)
    prompt, sampled = len(request.token_ids), len(completion.token_ids)
    usage = {"prompt_tokens": prompt, "completion_tokens": sampled, "total_tokens": prompt + sampled}
    return {"request_id": request.request_id, "choices": [choice], "usage": usage}
