"""The HTTP client of one engine: vLLM's routes, token ids in and out. The only module of actors that speaks HTTP to it.

``POST /inference/v1/generate`` gives the policy version of each token. Where that route does not exist (404), the
client goes over to ``POST /v1/completions`` with token ids for the life of this object; versions then come from ``GET
/weight_info``, read before and after each request. If the version changed under the request, the boundary is unknown
and all its tokens get the older version, so that staleness is never underestimated.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import aiohttp
import orjson

from actors.engine.base import AnswerMemory, EngineReport, Generation, PausableTimeout, Sampling, ServedModel
from actors.engine.responses import read_completion, read_generate, read_report, read_served, read_version
from pipeline.config.rollouts import ANSWERS_BYTES_MAX
from pipeline.errors import EngineBusy, EngineGone, EngineProtocolError, EngineRefused, EngineUnavailable
from pipeline.runtime.engine_keys import authorization

GENERATE, COMPLETIONS = "/inference/v1/generate", "/v1/completions"
ANSWER_BYTES_MAX = 4 * 1024 * 1024
"""Bytes of an answer without tokens. vLLM's metrics are the longest, 0.2 MB."""
TOKEN_BYTES_MAX, HEAD_BYTES_MAX = 1024, 64 * 1024
"""Bytes of an answer with tokens: for each that may be sampled (vLLM's JSON takes 90 to 250), and for all else."""
CONNECT_SECONDS_MAX = 30.0
"""Long, because thousands of first requests at once may have to wait for the engine to accept them; probes are
shorter."""
PROBE_SECONDS_MAX = 60.0
"""Longer than the pool's own patience, which decides what silence means."""
KEEPALIVE_SECONDS = 3.0
"""Below the 5 s after which vLLM closes idle connections: a request on a connection that is being closed would fail."""
_JSON_HEADERS = {"Content-Type": "application/json"}


class EngineClient:
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
        self._request_timeout = aiohttp.ClientTimeout(total=request_seconds_max, sock_connect=CONNECT_SECONDS_MAX)
        self._patience = patience
        self._headers = authorization(key)
        self._run = run
        self._request_seconds_max = request_seconds_max
        self._probe_timeout = aiohttp.ClientTimeout(total=PROBE_SECONDS_MAX)
        self._memory = memory or AnswerMemory(ANSWERS_BYTES_MAX)
        self._session: aiohttp.ClientSession | None = None
        self._has_generate = True

    @property
    def name(self) -> str:
        return self._url

    async def __aenter__(self) -> EngineClient:
        return self

    async def __aexit__(self, *args: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the connections. Requests in flight fail."""
        if self._session is not None:
            await self._session.close()
            self._session = None

    async def generate(
        self, token_ids: Sequence[int], sampling: Sampling, *, session_id: str = "", cache_salt: str = ""
    ) -> Generation:
        """Continue ``token_ids``. ``session_id`` goes to the engine as a hint; ``cache_salt`` separates prefix
        caches."""
        parameters = _sampling_parameters(sampling)
        if self._has_generate:
            body: dict[str, Any] = {"token_ids": token_ids, "sampling_params": parameters, **self._named}
            if cache_salt:
                body["cache_salt"] = cache_salt
            status, answer = await self._post(GENERATE, body, session_id, sampling.max_tokens)
            if status != 404 or _error_object(answer) is not None:
                accepted = self._accepted(status, answer)
                return read_generate(self._url, accepted, sampling.max_tokens, self._vocabulary, self._run)
            self._has_generate = False
        return await self._complete(token_ids, sampling, parameters, session_id, cache_salt)

    async def _complete(
        self, token_ids: Sequence[int], sampling: Sampling, parameters: dict[str, Any], session_id: str, cache_salt: str
    ) -> Generation:
        before = await self.weight_version()
        if before is None:
            raise EngineGone(f"engine {self._url} has weights without a version stamp")
        body = {"prompt": token_ids, "return_token_ids": True, "add_special_tokens": False, **parameters, **self._named}
        if cache_salt:
            body["cache_salt"] = cache_salt
        status, answer = await self._post(COMPLETIONS, body, session_id, sampling.max_tokens)
        accepted = self._accepted(status, answer)
        after = await self.weight_version()
        if after is None or after < before:
            raise EngineGone(f"engine {self._url} was restarted during a request")
        return read_completion(self._url, accepted, sampling.max_tokens, self._vocabulary, before)

    async def weight_version(self) -> int | None:
        status, answer = await self._request("GET", "/weight_info", None, self._probe_timeout)
        if status == 404:
            raise EngineProtocolError(
                f"engine {self._url}: expected a route /weight_info, got 404; "
                "start vLLM with VLLM_SERVER_DEV_MODE=1 on loopback"
            )
        info = self._accepted(status, answer)
        if not isinstance(info, dict) or "weight_version" not in info:
            raise EngineProtocolError(
                f"engine {self._url}: expected weight_info to hold weight_version, got {str(info)[:160]}"
            )
        return read_version(self._url, info["weight_version"], self._run)

    async def health(self) -> None:
        status, answer = await self._request("GET", "/health", None, self._probe_timeout)
        if status != 200:
            raise EngineUnavailable(f"engine {self._url} is not healthy: HTTP {status} {_text(answer)}")

    async def is_sleeping(self) -> bool:
        status, answer = await self._request("GET", "/is_sleeping", None, self._probe_timeout)
        state = self._accepted(status, answer)
        if not isinstance(state, dict) or not isinstance(state.get("is_sleeping"), bool):
            raise EngineProtocolError(f"engine {self._url}: expected is_sleeping, got {str(state)[:160]}")
        return bool(state["is_sleeping"])

    async def served(self) -> ServedModel | None:
        """The model that it serves; None where it lists none."""
        status, answer = await self._request("GET", "/v1/models", None, self._probe_timeout)
        return None if status == 404 else read_served(self._accepted(status, answer))

    async def report(self) -> EngineReport | None:
        status, answer = await self._request("GET", "/metrics", None, self._probe_timeout)
        return read_report(answer.decode("utf-8", "replace")) if status == 200 else None

    async def _post(self, path: str, body: dict[str, Any], session_id: str, tokens_max: int) -> tuple[int, bytes]:
        headers = {**_JSON_HEADERS, "X-Session-ID": session_id} if session_id else _JSON_HEADERS
        data, bytes_max = orjson.dumps(body), HEAD_BYTES_MAX + tokens_max * TOKEN_BYTES_MAX
        if self._patience is None:
            return await self._request("POST", path, data, self._request_timeout, headers, bytes_max)
        unlimited = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_SECONDS_MAX)
        with self._patience.limit(self._request_seconds_max):
            return await self._request("POST", path, data, unlimited, headers, bytes_max)
        raise EngineUnavailable(
            f"engine {self._url} did not answer {path} within {self._request_seconds_max:g} s awake"
        )

    async def _request(
        self,
        method: str,
        path: str,
        data: bytes | None,
        timeout: aiohttp.ClientTimeout,
        headers: Mapping[str, str] | None = None,
        bytes_max: int = ANSWER_BYTES_MAX,
    ) -> tuple[int, bytes]:
        try:
            async with self._open().request(
                method, self._url + path, data=data, headers=headers, timeout=timeout, allow_redirects=False
            ) as response:
                answer = await self._read(response, bytes_max)
                if method == "POST" and response.status in (429, 503):
                    raise EngineBusy(
                        f"engine {self._url} answered HTTP {response.status}: {_error_object(answer) or _text(answer)}",
                        _seconds(response.headers.get("Retry-After")),
                    )
                return response.status, answer
        except aiohttp.ConnectionTimeoutError as error:
            raise EngineUnavailable(
                f"engine {self._url} did not accept a connection within {CONNECT_SECONDS_MAX:g} s"
            ) from error
        except TimeoutError as error:
            raise EngineUnavailable(f"engine {self._url} did not answer {path} within {timeout.total:g} s") from error
        except aiohttp.ClientConnectorError as error:
            raise EngineGone(f"engine {self._url} takes no connection: {error}") from error
        except (aiohttp.ClientError, OSError) as error:
            raise EngineUnavailable(f"engine {self._url} failed on {path}: {type(error).__name__}: {error}") from error

    def _accepted(self, status: int, answer: bytes) -> Any:
        """The JSON of a good answer; raises what a bad status means."""
        if status >= 500 or status in (408, 425):
            raise EngineUnavailable(f"engine {self._url} answered HTTP {status}: {_text(answer)}")
        if status in (401, 403):
            raise EngineUnavailable(
                f"engine {self._url} does not accept our key (HTTP {status}): it belongs to another run, or "
                f"engine.actor_key is wrong: {_error_object(answer) or _text(answer)}"
            )
        if status >= 400:
            raise EngineRefused(
                f"engine {self._url} refused the request (HTTP {status}): {_error_object(answer) or _text(answer)}"
            )
        if status != 200:
            raise EngineProtocolError(f"engine {self._url}: expected HTTP 200, got {status} {_text(answer)}")
        try:
            return orjson.loads(answer)
        except orjson.JSONDecodeError as error:
            raise EngineProtocolError(f"engine {self._url}: expected JSON, got {_text(answer)!r} ({error})") from error

    async def _read(self, response: aiohttp.ClientResponse, bytes_max: int) -> bytes:
        """The body of an answer, of at most ``bytes_max``, once there is room for it."""
        length = response.content_length
        if length is not None and length > bytes_max:
            raise self._too_long(bytes_max, f"{length}")
        async with self._memory.reserve(bytes_max if length is None else length):
            if length is not None:
                return await response.read()
            chunks, size = [], 0
            async for chunk in response.content.iter_any():
                size += len(chunk)
                if size > bytes_max:
                    raise self._too_long(bytes_max, "more")
                chunks.append(chunk)
            return b"".join(chunks)

    def _too_long(self, bytes_max: int, came: str) -> EngineProtocolError:
        return EngineProtocolError(f"engine {self._url}: expected an answer of at most {bytes_max} bytes, got {came}")

    def _open(self) -> aiohttp.ClientSession:
        if self._session is None:
            connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEPALIVE_SECONDS)
            self._session = aiohttp.ClientSession(
                connector=connector,
                auto_decompress=False,
                cookie_jar=aiohttp.DummyCookieJar(),
                headers=self._headers,
            )
        return self._session


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
    return parameters


def _seconds(retry_after: str | None) -> float | None:
    """Retry-After in seconds; None where it is absent or a date."""
    return float(retry_after) if retry_after is not None and retry_after.isascii() and retry_after.isdecimal() else None


def _error_object(answer: bytes) -> str | None:
    """The message of vLLM's JSON error object; None when the answer is not one (a route that does not exist)."""
    try:
        error = orjson.loads(answer).get("error")
    except (orjson.JSONDecodeError, AttributeError):
        return None
    if isinstance(error, dict) and isinstance(error.get("message"), str):
        return str(error["message"])[:1000]
    return None


def _text(answer: bytes) -> str:
    return answer[:300].decode("utf-8", "replace").strip()
