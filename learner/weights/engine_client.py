"""One engine's control routes, as vLLM (``VLLM_SERVER_DEV_MODE=1``) and the embedded engine serve them."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import anyio
import orjson

from pipeline.errors import EngineProtocolError, EngineRefused
from pipeline.runtime.engine_keys import LEARNER_HEADER
from pipeline.runtime.http import TEXT_MAX, HttpClient
from pipeline.runtime.progress import SILENCE_SECONDS_MAX, EngineSilence
from pipeline.runtime.weights import WITHDRAWN

WATCH_SECONDS_MAX = 10.0
"""An engine that does not report its version within this time counts as down."""
RESUME_SECONDS_MAX = 30.0
_GENERATE, _HEALTH = "/inference/v1/generate", "/health"
_KEY_HINT = " (is it an engine of another run, or engine.learner_key wrong?)"
_HINTS = {401: _KEY_HINT, 403: _KEY_HINT, 404: " (is the engine started with VLLM_SERVER_DEV_MODE=1?)"}


class EngineControl:
    """Pause, load, stamp, resume. Every call has a timeout and raises :class:`pipeline.errors.EngineUnavailable` (no
    answer), :class:`EngineRefused` (4xx) or :class:`EngineProtocolError` (anything else that is not in the
    protocol)."""

    def __init__(self, url: str, http: HttpClient, timeout_seconds: float) -> None:
        self.url = url
        self._http = http
        self.epoch: int | None = None
        """Number of this learner process, once the replay stage has told it."""
        self._timeout_seconds = timeout_seconds
        self._requests = 0
        self.starts = 0
        """Times that it was found without a label, as it is after a start."""
        self.silence = EngineSilence()
        """Since its last answer to any call, counted during an attempt to load."""

    async def health(self) -> None:
        """Return once it has answered a probe of its health, whatever it says; ``silence`` keeps the time."""
        with contextlib.suppress(EngineRefused, EngineProtocolError):
            await self._call("GET", _HEALTH, seconds=SILENCE_SECONDS_MAX, json_answer=False)

    async def version(self) -> str:
        """The stamp of the weights it serves (``GET /weight_info``); ``default`` before the first one."""
        return str(await self._look("/weight_info", "weight_version", str | int))

    async def pause(self) -> None:
        """Stop decoding; requests in flight are kept."""
        await self._call("POST", "/pause?mode=keep")

    async def resume(self) -> None:
        await self._call("POST", "/resume", seconds=min(RESUME_SECONDS_MAX, self._timeout_seconds))

    async def is_paused(self) -> bool:
        """True while it keeps requests without sampling."""
        return bool(await self._look("/is_paused", "is_paused", bool))

    async def sleep(self, level: int) -> None:
        """Give the device up: the KV cache, and the weights (``level`` 1: kept in host memory, 2: discarded). Requests
        in flight are kept, and computed again from their tokens after waking. Harmless when asleep."""
        await self._call("POST", f"/sleep?level={level}&mode=keep")

    async def wake_up(self, tag: str) -> bool:
        """Take memory back: ``weights`` or ``kv_cache``. True once nothing sleeps any more: sampling continues
        then. Harmless when awake (but it ends a pause)."""
        answer = await self._call("POST", f"/wake_up?tags={tag}")
        return answer.get("status") == "awake"

    async def is_sleeping(self) -> bool:
        """True while it does not sample: asleep, or paused."""
        return bool(await self._look("/is_sleeping", "is_sleeping", bool))

    async def reload(self, folder: Path) -> None:
        """Load the safetensors of a folder that the engine can read."""
        body = {"method": "reload_weights", "kwargs": {"weights_path": str(folder.absolute())}}
        await self._call("POST", "/collective_rpc", body)

    async def load_deltas(self, files: Sequence[Path]) -> None:
        """Bring the weights to a newer version by weight deltas that the engine can read. Raises
        :class:`EngineRefused`, before anything has changed, where they do not fit the weights that it has."""
        body = {"method": "load_deltas", "kwargs": {"files": [str(file.absolute()) for file in files]}}
        answer = await self._call("POST", "/collective_rpc", body)
        results = answer.get("results") or [None]
        reasons = [result["refused"] for result in results if isinstance(result, dict) and "refused" in result]
        if len(reasons) == len(results):
            raise EngineRefused(f"{self.url} refused the weight delta: {reasons[0]}")
        if reasons:
            raise EngineProtocolError(f"{len(reasons)} of {len(results)} workers of {self.url} refused: {reasons[0]}")

    async def load_adapter(self, name: str, folder: Path) -> None:
        """Serve the adapters of a folder under ``name``: the first time by vLLM's own route, from then on in place in
        the workers (``actors.servers.vllm_worker`` says why)."""
        listed = await self._call("GET", "/v1/models", seconds=min(WATCH_SECONDS_MAX, self._timeout_seconds))
        served = {model.get("id") for model in listed.get("data", ()) if isinstance(model, dict)}
        path = str(folder.absolute())
        if name in served:
            body = {"method": "reload_adapter", "kwargs": {"name": name, "folder": path}}
            await self._call("POST", "/collective_rpc", body)
        else:
            body = {"lora_name": name, "lora_path": path}
            await self._call("POST", "/v1/load_lora_adapter", body, json_answer=False)

    async def stamp(self, version: str) -> None:
        """Tokens sampled from now on carry ``version``."""
        await self._call("POST", "/update_weight_version", {"new_version": version})

    async def withdraw(self) -> None:
        """Label the weights as those of no version: actors send nothing there and throw away what comes from them."""
        seconds = min(RESUME_SECONDS_MAX, self._timeout_seconds)
        await self._call("POST", "/update_weight_version", {"new_version": WITHDRAWN}, seconds=seconds)

    async def generate(self, request: dict[str, Any], seconds: float) -> dict[str, Any]:
        """The answer of ``POST /inference/v1/generate``."""
        return await self._call("POST", _GENERATE, request, seconds=seconds)

    async def abandon_update(self) -> None:
        """Undo a load that did not finish, so that another can begin (:mod:`actors.servers.vllm_worker`)."""
        await self._call("POST", "/collective_rpc", {"method": "abandon_update"})

    async def end(self) -> None:
        """Kill the server, which its supervisor then starts again (:mod:`actors.servers.authorization`)."""
        await self._call("POST", "/afterplay/end")

    async def world_size(self) -> int:
        """Number of worker processes of the engine (``GET /get_world_size``)."""
        return int(await self._look("/get_world_size", "world_size", int, self._timeout_seconds))

    async def _look(self, path: str, field: str, kind: Any, seconds: float = WATCH_SECONDS_MAX) -> Any:
        answer = await self._call("GET", path, seconds=min(seconds, self._timeout_seconds))
        if not isinstance(answer.get(field), kind):
            raise EngineProtocolError(f"expected {field} of {self.url}, got {str(answer)[:TEXT_MAX]}")
        return answer[field]

    async def _call(
        self,
        method: str,
        path: str,
        body: dict[str, Any] | None = None,
        seconds: float | None = None,
        *,
        json_answer: bool = True,
    ) -> dict[str, Any]:
        headers, asked_at = {}, anyio.current_time()
        if self.epoch is not None and path not in (_GENERATE, _HEALTH):
            self._requests += 1
            headers[LEARNER_HEADER] = f"{self.epoch}.{self._requests}"
        answer = await self._http.request(
            method, self.url, path, seconds=seconds or self._timeout_seconds, headers=headers,
            data=None if body is None else orjson.dumps(body), server=f"engine {self.url}",
        )  # fmt: skip
        self.silence.heard(anyio.current_time() - asked_at if method == "GET" else None)
        what, status = f"{method} {self.url}{path}", answer.status
        if 400 <= status < 500:
            raise EngineRefused(f"{what} was refused with {status}: {answer.text}{_HINTS.get(status, '')}")
        if status != 200:
            raise EngineProtocolError(f"expected 200 from {what}, got {status}: {answer.text}")
        if not answer.body.strip() or not json_answer:
            return {}
        value = answer.json()
        return value if isinstance(value, dict) else {"result": value}
