"""A client of ReMe's task memory over HTTP: an external service that stores, finds and (with its own language model)
writes lessons.

Two routes, both ``POST`` with JSON, as the pages of ReMe document them (github.com/modelscope/ReMe: the quick start and
task memory):

``/retrieve_task_memory``
    ``{workspace_id, query, top_k}`` → ``{answer, metadata: {memory_list: [{memory_id, when_to_use, content, score}]}}``
``/summary_task_memory``
    ``{workspace_id, trajectories: [{messages: [{role, content}], score}]}`` → ``{metadata: {memory_list: [...]}}``

The service calls a trajectory of score 1.0 or more a success by default; rewards are sent as they are.

In the run file::

    lessons:
      enabled: true
      source: actors.rollout.reme:RemeSource
      source_options: {url: "http://127.0.0.1:8002", workspace: afterplay}
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import aiohttp
import orjson

from pipeline.errors import ConfigurationError, LimitExceeded, TransportError, WireError
from pipeline.experience.memory import Lesson, plain_conversation
from pipeline.schema import Trajectory

RETRIEVE, SUMMARISE = "/retrieve_task_memory", "/summary_task_memory"
ANSWER_BYTES_MAX = 16 * 1024 * 1024
KEEPALIVE_SECONDS = 3.0
_JSON_HEADERS = {"Content-Type": "application/json"}


class RemeSource:
    """A :class:`pipeline.experience.memory.LessonSource`: one service at ``url`` and one of its workspaces."""

    def __init__(self, url: str, workspace: str = "afterplay") -> None:
        if not isinstance(url, str) or not url.startswith(("http://", "https://")):
            raise ConfigurationError(f"url: expected an address like http://127.0.0.1:8002, got {url!r}")
        self._url = url.rstrip("/")
        self._workspace = workspace
        self._session: aiohttp.ClientSession | None = None

    async def close(self) -> None:
        """Close the connections. Requests in flight fail."""
        if self._session is not None:
            await self._session.close()
            self._session = None

    async def search(self, order_id: str, query: str, top_k: int) -> list[Lesson]:
        """The memories that fit ``query``. Raises :class:`TransportError` or :class:`WireError` that names the
        service."""
        body = {"workspace_id": self._workspace, "query": query, "top_k": top_k}
        memories = _memories(self._url, await self._post(RETRIEVE, body))
        return [lesson for memory in memories if (lesson := _lesson(memory))][:top_k]

    async def summarise(self, trajectories: Sequence[Trajectory]) -> int:
        """Hand over the scored trajectories of a group; returns how many memories the service made of them."""
        scored = [t for t in trajectories if t.reward is not None and t.usable]
        if not scored:
            return 0
        body = {
            "workspace_id": self._workspace,
            "trajectories": [
                {
                    "messages": [{"role": m.role, "content": m.content} for m in plain_conversation(t)],
                    "score": t.reward,
                }
                for t in scored
            ],
        }
        return len(_memories(self._url, await self._post(SUMMARISE, body)))

    async def _post(self, path: str, body: dict[str, Any]) -> Any:
        if self._session is None:
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEPALIVE_SECONDS),
                timeout=aiohttp.ClientTimeout(total=None),
            )
        try:
            async with self._session.post(self._url + path, data=orjson.dumps(body), headers=_JSON_HEADERS) as response:
                answer = await _read(self._url, response)
                status = response.status
        except (aiohttp.ClientError, OSError) as error:
            raise TransportError(
                f"lesson service {self._url} failed on {path}: {type(error).__name__}: {error}"
            ) from error
        if status != 200:
            raise TransportError(f"lesson service {self._url}{path}: expected HTTP 200, got {status} {answer[:200]!r}")
        try:
            return orjson.loads(answer)
        except orjson.JSONDecodeError as error:
            raise WireError(f"lesson service {self._url}{path}: expected JSON, got {answer[:200]!r}") from error


async def _read(url: str, response: aiohttp.ClientResponse) -> bytes:
    chunks, size = [], 0
    async for chunk in response.content.iter_any():
        size += len(chunk)
        if size > ANSWER_BYTES_MAX:
            raise LimitExceeded(f"lesson service {url}: expected at most {ANSWER_BYTES_MAX} bytes, got more")
        chunks.append(chunk)
    return b"".join(chunks)


def _memories(url: str, answer: Any) -> list[Any]:
    metadata = answer.get("metadata") if isinstance(answer, dict) else None
    memories = metadata.get("memory_list", []) if isinstance(metadata, dict) else None
    if not isinstance(memories, list):
        raise WireError(f"lesson service {url}: expected an object with metadata.memory_list, got {str(answer)[:200]}")
    return memories


def _lesson(memory: Any) -> Lesson | None:
    """None for a memory without text."""
    text = memory.get("content") if isinstance(memory, dict) else None
    if not isinstance(text, str) or not text.strip():
        return None
    number = memory.get("memory_id") or hashlib.blake2b(text.encode("utf-8", "replace"), digest_size=8).hexdigest()
    return Lesson(str(number), text)
