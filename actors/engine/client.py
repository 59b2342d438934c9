"""The client of one engine: vLLM's routes, token ids in and out.

``POST /inference/v1/generate`` gives the policy version of each token. With ``heard`` the tokens come as the engine
samples them (``"stream": true``). The answer is put together again from the pieces and read as one that came whole.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import orjson

from actors.engine.answers import AnswerStream, read_generate, read_report, read_served, read_version
from actors.engine.base import EngineReport, Generation, Heard, PausableTimeout, Sampling, ServedModel
from pipeline.errors import EngineProtocolError, EngineUnavailable
from pipeline.runtime.engine_keys import authorization
from pipeline.runtime.http import CONNECT_SECONDS_MAX, Answer, AnswerMemory, HttpClient

GENERATE = "/inference/v1/generate"

ANSWER_BYTES_MAX = 4 * 1024 * 1024
"""Bytes of an answer without tokens. vLLM's metrics are the longest, 0.2 MB."""

TOKEN_BYTES_MAX, HEAD_BYTES_MAX = 1024, 64 * 1024
"""Bytes of an answer with tokens: for each that may be sampled (vLLM's JSON takes 90 to 250,
streamed 500), and for all else."""

EXPERTS_BYTES_MAX = 4096
"""Bytes of an answer for the experts of a token: base64 of 61 layers with 8 of 384 experts takes 1,302."""

PROBE_SECONDS_MAX = 60.0
"""Longer than the pool's own patience, which decides what silence means."""


class EngineClient(HttpClient):
    """One engine at ``url`` (``http://host:port``). Use inside an event loop and ``await close()`` it, or ``async
    with``.

    ``vocabulary``: size of the model's vocabulary, where given; ids at or above it are refused as garbage. ``model``:
    name that requests ask for; None: what the engine serves. ``patience``: the time of a request stands still while
    the engine sleeps. ``key`` opens the engine's routes. ``run``: only weights with this run's stamp have a version.
    ``memory``: of the answers of all engines.
    """

    def __init__(
        self,
        url: str,
        *,
        request_seconds_max: float = 120.0,
        vocabulary: int | None = None,
        model: str | None = None,
        patience: PausableTimeout | None = None,
        memory: AnswerMemory | None = None,
        key: str | None = None,
        run: str | None = None,
    ) -> None:
        self._url = url.rstrip("/")
        self._named: dict[str, Any] = {} if model is None else {"model": model}
        self._vocabulary = vocabulary
        self._server = f"engine {self._url}"
        self._patience = patience
        self._run = run
        self._request_seconds_max = request_seconds_max
        super().__init__(authorization(key), memory=memory)

    @property
    def name(self) -> str:
        return self._url

    async def generate(
        self,
        token_ids: Sequence[int],
        sampling: Sampling,
        *,
        session_id: str = "",
        cache_salt: str = "",
        heard: Heard | None = None,
    ) -> Generation:
        """Continue ``token_ids``. ``session_id`` goes to the engine as a hint; ``cache_salt`` separates prefix
        caches."""
        body = {"token_ids": token_ids, "sampling_params": _sampling_parameters(sampling), **self._named}
        if cache_salt:
            body["cache_salt"] = cache_salt
        # tokens of the prompt whose experts are asked for; None: none are
        n_before = None if sampling.experts_from is None else len(token_ids) - sampling.experts_from
        stream = None
        if heard is not None:
            body["stream"] = True
            stream = AnswerStream(self._url, self._vocabulary, heard)
        answer = await self._generate(body, session_id, sampling.max_tokens, n_before, stream)
        self._require_route(answer)
        accepted = stream.whole() if stream is not None and stream.begun else self._accepted(answer)
        return read_generate(self._url, accepted, sampling.max_tokens, self._vocabulary, self._run, n_before)

    async def weight_version(self) -> int | None:
        answer = await self._get("/weight_info")
        if answer.status == 404:
            raise EngineProtocolError(
                f"engine {self._url}: expected a route /weight_info, got 404; "
                "start vLLM with VLLM_SERVER_DEV_MODE=1 on loopback"
            )
        info = self._accepted(answer)
        if not isinstance(info, dict) or "weight_version" not in info:
            raise EngineProtocolError(
                f"engine {self._url}: expected weight_info to hold weight_version, got {str(info)[:160]}"
            )
        return read_version(self._url, info["weight_version"], self._run)

    async def require_routes(self) -> None:
        """Raise :class:`EngineProtocolError` where a route is missing that vLLM has only with an option."""
        await self.weight_version()
        self._require_route(await self._get(GENERATE))  # where it is, it takes no GET: 405

    def _require_route(self, answer: Answer) -> None:
        if answer.status == 404 and answer.error is None:
            raise EngineProtocolError(
                f"engine {self._url}: expected a route {GENERATE}, got 404; start vLLM with --enable-scale-out"
            )

    async def health(self) -> None:
        answer = await self._get("/health")
        if answer.status != 200:
            raise EngineUnavailable(f"engine {self._url} is not healthy: HTTP {answer.status} {answer.text}")

    async def is_sleeping(self) -> bool:
        state = self._accepted(await self._get("/is_sleeping"))
        if not isinstance(state, dict) or not isinstance(state.get("is_sleeping"), bool):
            raise EngineProtocolError(f"engine {self._url}: expected is_sleeping, got {str(state)[:160]}")
        return bool(state["is_sleeping"])

    async def served(self) -> ServedModel | None:
        """The model that it serves; None where it lists none."""
        answer = await self._get("/v1/models")
        return None if answer.status == 404 else read_served(self._accepted(answer))

    async def report(self) -> EngineReport | None:
        answer = await self._get("/metrics")
        return read_report(answer.body.decode("utf-8", "replace")) if answer.status == 200 else None

    async def _generate(
        self,
        body: dict[str, Any],
        session_id: str,
        tokens_max: int,
        n_before: int | None,
        stream: AnswerStream | None,
    ) -> Answer:
        experts_bytes_max = 0 if n_before is None else (n_before + tokens_max) * EXPERTS_BYTES_MAX
        post = partial(
            self.request, "POST", self._url, GENERATE, connect_seconds=CONNECT_SECONDS_MAX, data=orjson.dumps(body),
            headers={"X-Session-ID": session_id} if session_id else None,
            bytes_max=HEAD_BYTES_MAX + tokens_max * TOKEN_BYTES_MAX + experts_bytes_max, server=self._server,
            heard=None if stream is None else stream.feed,
        )  # fmt: skip
        if self._patience is None:
            return await post(seconds=self._request_seconds_max)
        with self._patience.limit(self._request_seconds_max):
            return await post(seconds=None)
        raise EngineUnavailable(
            f"{self._server} did not answer {GENERATE} within {self._request_seconds_max:g} s awake"
        )

    async def _get(self, path: str) -> Answer:
        return await self.request(
            "GET", self._url, path, seconds=PROBE_SECONDS_MAX, bytes_max=ANSWER_BYTES_MAX, server=self._server
        )

    def _accepted(self, answer: Answer) -> Any:
        """The JSON of a good answer; raises what a bad status means."""
        if answer.status in (401, 403):
            raise EngineUnavailable(
                f"{self._server} does not accept our key (HTTP {answer.status}): it belongs to another run, or "
                f"engine.actor_key is wrong: {answer.error or answer.text}"
            )
        return answer.accepted()


def _sampling_parameters(sampling: Sampling) -> dict[str, Any]:
    """All of them, also where they equal vLLM's defaults: a model's generation_config.json would change those."""
    parameters: dict[str, Any] = {
        "max_tokens": sampling.max_tokens,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "min_p": 0.0,
        "repetition_penalty": 1.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "logprobs": 0,
        "stop_token_ids": list(sampling.stop_token_ids),
    }
    if sampling.stop:
        parameters["stop"] = list(sampling.stop)
    if sampling.experts_from is not None:
        parameters["routed_experts_prompt_start"] = sampling.experts_from
    return parameters
